"""The process: restarts, a database that goes away, and settings that do not hold together."""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from carbon_service.app import create_app
from carbon_service.learner import LOOK_INTERVAL_S
from carbon_service.providers.entry import ProviderContext
from carbon_service.providers.http import Pacing
from carbon_service.providers.registry import PROVIDERS, build_providers, read_settings
from carbon_service.replay import Replay
from carbon_service.zones import ZoneConfigError
from services.contracts.carbon import CurrentIntensity
from services.core.domain.carbon import Signal
from services.db import locks
from services.db.engine import create_engine
from tests.carbon.door import door_to
from tests.carbon.harness import NOW_S, TOKEN, Now, running, settings
from tests.support.servers import ROOT
from tests.support.services import services

ZONE = "/v1/carbon/US-CAL-CISO"
START_S = datetime(2021, 8, 1, tzinfo=UTC).timestamp()
LOCK_LOW = locks.CARBON_LEARNING & 0xFFFF_FFFF
"""As pg_locks has it: the lower half of the key."""
APP = "carbon_service.app"
NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


async def test_a_restart_goes_on_with_the_same_replay(empty_database: str) -> None:
    now = Now()
    for passed_s in (0.0, 3600.0):
        now.s = NOW_S + passed_s
        async with running(empty_database, now, replay_speed=600.0) as client:
            current = CurrentIntensity.model_validate_json((await client.get(f"{ZONE}/current")).content)
            assert current.grid_now is not None
            assert current.grid_now.timestamp() == START_S + 600 * passed_s


async def test_without_its_database_it_says_so_and_comes_back(empty_database: str) -> None:
    async with door_to(empty_database) as door, running(door.database_url, Now(), replay_speed=600.0) as client:
        assert (await client.get(f"{ZONE}/current")).status_code == 200
        await door.shut()
        answer = await client.get(f"{ZONE}/current")
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        await door.open()
        assert (await client.get(f"{ZONE}/current")).status_code == 200


def started(**environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the process with these settings until it ends by itself."""
    chosen = {"WATTSHIFT_SERVICE_TOKEN": TOKEN, "DATABASE_URL": NOWHERE, **environment}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CARBON_")}
    return subprocess.run(
        [sys.executable, "-m", "carbon_service.app"],
        cwd=ROOT,
        env={**kept, **chosen},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_zone_without_credentials_ends_the_start_with_what_is_missing() -> None:
    ended = started(CARBON_ZONES="DE,US-CAL-CISO", CARBON_PROVIDERS="DE=electricity_maps,US-CAL-CISO=watttime")
    assert ended.returncode == 2
    assert "zone DE is to come from electricity_maps, which needs CARBON_ELECTRICITY_MAPS_TOKEN" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ({"zones": ""}, "at least 1 item"),
        ({"providers": "GB=uk"}, "names GB, which CARBON_ZONES does not"),
        ({"zones": "GB", "providers": "GB"}, "expected name=value"),
        ({"zones": "GB", "providers": "GB=uk,GB=recorded"}, "GB is named twice"),
        ({"replay_speed": "0"}, "greater than 0"),
        ({"replay_speed": "nan"}, "finite"),
        ({"replay_start": "9999-01-01T00:00:00Z"}, "between the years"),
        ({"location_aliases": "eastus=DE"}, "points to DE"),
        ({"zones": "GB,XX"}, "there is no recording of XX"),
        ({"zones": "XX", "providers": "XX=uk+recorded"}, "there is no recording of XX"),
        ({"default_signal": "red"}, "average_direct"),
    ],
)
def test_settings_that_do_not_hold_together(chosen: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        settings(**chosen)


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ({"default_signal": "marginal"}, "marginal is not among the signals of US-CAL-CISO"),
        ({"zones": "GB", "providers": "GB=recorded+uk"}, "recorded and uk both offer average_direct for GB"),
        (
            {"zones": "US-MIDA-PJM", "providers": "US-MIDA-PJM=pjm", "default_signal": "marginal"},
            "US-MIDA-PJM has no average_direct, by which its emissions are accounted",
        ),
        ({"zones": "GB", "providers": "GB=united_kingdom"}, "GB=united_kingdom: the providers are recorded, uk"),
    ],
)
def test_zones_that_do_not_go_together(chosen: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARBON_PJM_KEY", "k")
    with pytest.raises(ZoneConfigError, match=complaint):
        create_app(settings(DATABASE_URL=NOWHERE, **chosen))


@pytest.mark.parametrize(
    ("provider", "environment", "complaint"),
    [
        ("recorded+pjm", {}, "zone DE is to come from pjm, which needs CARBON_PJM_KEY"),
        ("pjm", {"PJM_KEY": ""}, "needs CARBON_PJM_KEY"),
        ("watttime", {"WATTTIME_USERNAME": "a"}, "needs CARBON_WATTTIME_PASSWORD"),
        ("watttime", {}, "needs CARBON_WATTTIME_USERNAME and CARBON_WATTTIME_PASSWORD"),
        ("watttime", {"WATTTIME_USERNAME": "a", "WATTTIME_PASSWORD": "b"}, "watttime has nothing for zone DE"),
        (
            "electricity_maps",
            {"ELECTRICITY_MAPS_TOKEN": "t", "ELECTRICITY_MAPS_SIGNALS": "marginal"},
            "CARBON_ELECTRICITY_MAPS_SIGNALS: must be among average_lifecycle, average_direct",
        ),
        ("electricity_maps", {"ELECTRICITY_MAPS_TOKEN": "t", "ELECTRICITY_MAPS_SIGNALS": ","}, "must be among"),
        ("pjm", {"PJM_KEY": "k", "PJM_REQUESTS_PER_MINUTE": "0"}, "PJM_REQUESTS_PER_MINUTE: must be at least 1$"),
        ("pjm", {"PJM_KEY": "k", "PJM_RESOLUTION": "weekly"}, "CARBON_PJM_RESOLUTION: must be 'fivemin' or 'hourly'$"),
        ("pjm", {"PJM_KEY": "k", "PJM_PNODES": "DE=x"}, "CARBON_PJM_PNODES: must be a whole number$"),
    ],
)
def test_a_provider_whose_settings_do_not_hold(
    provider: str, environment: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"CARBON_{name}", value)
    with pytest.raises(ZoneConfigError, match=complaint):
        create_app(settings(DATABASE_URL=NOWHERE, zones="DE", providers=f"DE={provider}"))


def test_every_provider_takes_its_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        "ELECTRICITY_MAPS_TOKEN": "t",
        "WATTTIME_USERNAME": "a",
        "WATTTIME_PASSWORD": "b",
        "WATTTIME_REGIONS": "GB=UK, US-CAL-CISO=CAISO_NORTH",
        "PJM_KEY": "k",
        "PJM_PNODES": "GB=7",
        "EIA_KEY": "k",
        "ENTSOE_TOKEN": "t",
        "ENTSOE_AREAS": "GB=10YGB----------A",
        "UK_URL": "http://127.0.0.1:1",
    }
    for name, value in chosen.items():
        monkeypatch.setenv(f"CARBON_{name}", value)
    read = read_settings({"GB": PROVIDERS}, PROVIDERS)
    context = ProviderContext(httpx.AsyncClient(), Now(), Pacing(), Replay(0.0, 0.0, 1.0))
    built = build_providers(read, PROVIDERS, context)
    assert set(built) == set(PROVIDERS)
    of_others = {"eco2mix": "FR", "energinet": "DK-DK1", "eia": "US-CAL-CISO", "aemo": "AU-NSW"}
    assert all(provider.feed(of_others.get(name, "GB")) is not None for name, provider in built.items())


def test_a_zone_may_take_two_signals_from_two_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARBON_PJM_KEY", "k")
    chosen = settings(zones="US-MIDA-PJM", providers="US-MIDA-PJM=recorded+pjm")
    assert chosen.sources == {"US-MIDA-PJM": ("recorded", "pjm")}
    assert chosen.default_signal is Signal.AVERAGE_DIRECT
    create_app(chosen.model_copy(update={"database_url": NOWHERE}))


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARBON_ELECTRICITY_MAPS_TOKEN", "hidden")
    assert "hidden" not in repr(read_settings({"DE": ["electricity_maps"]}, PROVIDERS))
    monkeypatch.setenv("CARBON_ELECTRICITY_MAPS_SIGNALS", "red")
    with pytest.raises(ZoneConfigError) as caught:
        read_settings({"DE": ["electricity_maps"]}, PROVIDERS)
    assert "hidden" not in str(caught.value)


async def test_killed_while_it_learns_another_process_does_and_of_two_only_one(
    empty_database: str, tmp_path: Path
) -> None:
    """Real processes on one database: the lock goes with the killed one, and what stands there is not learned again."""
    engine = create_engine(empty_database, pool_size=2)

    async def count(query: str) -> int:
        async with engine.connect() as connection:
            return int((await connection.execute(text(query))).scalar_one())

    async def until(query: str) -> None:
        for _ in range(6_000):
            if await count(query):
                return
            await asyncio.sleep(0.01)
        raise TimeoutError(query)

    learned = "SELECT count(*) FROM carbon_learned_forecasts"
    (tmp_path / "other").mkdir()
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(services(folder, empty_database, "redis://127.0.0.1:1", CARBON_ZONES="GB"))
            for folder in (tmp_path, tmp_path / "other")
        )
        with one.started(APP) as victim:
            await until(f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = {LOCK_LOW} AND granted")
            await until("SELECT count(*) FROM carbon_points")
            victim.kill()
            assert await count(learned) <= 1
        with one.started(APP), other.started(APP):
            await until(learned)
            await asyncio.sleep(LOOK_INTERVAL_S + 1.0)  # each has looked again
            assert await count(learned) == 1
        with one.started(APP):  # a restart
            await asyncio.sleep(LOOK_INTERVAL_S + 1.0)
            assert await count(learned) == 1
    await engine.dispose()
