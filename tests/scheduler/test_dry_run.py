"""What would become of a job that is not submitted."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.contracts.explanations import StartEstimate
from services.contracts.identity import Identity, Role
from services.core.cycle.snapshot import Trigger
from services.core.domain.carbon import CarbonOutlook, Signal
from services.kit.problems import install_problem_handlers
from services.scheduler import endpoints
from services.scheduler.planning.dry_run import DryRuns, LiveView
from services.scheduler.power.hooks import NoHook
from tests.scheduler.world import World, a_world
from tests.support.builders import hourly_curve
from tests.support.servers import fresh_database
from tests.support.tokens import ActingAs

pytestmark = pytest.mark.usefixtures("the_lab")

HOUR_S = 3_600
WHOLE, PARTIAL = "a" * 64, "b" * 64


@pytest.fixture
async def dirty(postgres_url: str, redis_url: str) -> AsyncIterator[World]:
    """A world under ``gaia``, in the first of five dirty hours before four green ones."""
    async with a_world(fresh_database(postgres_url), redis_url, policy="gaia") as world:
        set_grid(world)
        yield world


def set_grid(world: World) -> float:
    """Give the world's grid five dirty hours, four green ones and fifteen dirty ones; return when they begin."""
    begin_s = time.time() // HOUR_S * HOUR_S
    curve = hourly_curve([400] * 5 + [50] * 4 + [400] * 15, start_s=begin_s)
    world.scheduler._carbon._known["Z"] = CarbonOutlook("Z", Signal.AVERAGE_DIRECT, curve)
    return begin_s


async def answer(world: World, **spec: Any) -> httpx.Response:
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(endpoints.router)
    view = LiveView(world.database, world.settings, world.scheduler._carbon, NoHook())
    app.state.dry_runs = DryRuns(world.database, view)
    identity = Identity(tenant_id="default", role=Role.USER, key_id="key-1")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(ActingAs(app, identity)), base_url="http://scheduler"
    ) as client:
        return await client.post("/v1/jobs:estimate", json={"name": "draft", "command": ["true"], **spec})


async def estimate(world: World, **spec: Any) -> StartEstimate:
    return StartEstimate.model_validate_json((await answer(world, **spec)).content)


async def test_a_job_that_fits_would_start_now_and_is_not_submitted(world: World) -> None:
    await world.node("n1")
    await world.scheduler.turn()
    set_grid(world)
    before = await world.fetch("SELECT count(*) FROM jobs")

    found = await estimate(world, gpus={"min": 2}, time_limit_s=HOUR_S)

    assert (found.policy, found.starts_now, found.gpus, found.reason) == ("fifo", True, 2, None)
    assert [(share.node_id, len(share.devices)) for share in found.placement] == [("n1", 2)]
    assert (found.free_gpus, found.suitable_gpus, found.waiting_jobs) == (4, 4, 0)
    assert await world.fetch("SELECT count(*) FROM jobs") == before
    assert await world.claims() == 0
    # The real job does what was said.
    job = await world.job(2)
    await world.scheduler.hold(Trigger.PASSIVE)
    assert await world.state(job) == "starting"


async def test_what_it_would_emit_is_power_times_time_times_intensity(world: World) -> None:
    await world.node("n1")
    await world.scheduler.turn()
    begin_s = set_grid(world)

    found = await estimate(world, gpus={"min": 2}, time_limit_s=HOUR_S)

    assert found.now is not None
    assert found.greenest is not None
    assert (found.duration_from, found.power_from) == ("time_limit", "typical")
    assert found.power_w is not None
    assert 2 * 50 < found.power_w < 2 * 400
    assert found.now.intensity_gco2_per_kwh == pytest.approx(400)
    assert found.now.carbon_gco2 == pytest.approx(found.power_w / 1_000 * 400)
    assert found.greenest.starts_at == datetime.fromtimestamp(begin_s + 5 * HOUR_S, UTC)
    assert found.greenest.carbon_gco2 == pytest.approx(found.power_w / 1_000 * 50)


async def test_a_run_that_the_forecast_does_not_cover_has_no_greenest_time_and_says_why(world: World) -> None:
    await world.node("n1")
    await world.scheduler.turn()
    set_grid(world)

    short, long = await estimate(world, time_limit_s=HOUR_S), await estimate(world, time_limit_s=400 * HOUR_S)

    why = "Greenest time: unknown, as the forecast ends before a run that began now would."
    assert (short.greenest is None, why in short.assumptions) == (False, False)
    assert (long.greenest is None, why in long.assumptions) == (True, True)


@pytest.mark.parametrize("limit", ["flexibility_s", "deadline"])
async def test_the_green_window_is_one_that_the_job_allows(world: World, limit: str) -> None:
    await world.node("n1")
    await world.scheduler.turn()
    begin_s = set_grid(world)
    end_s = begin_s + 5 * HOUR_S - 1  # the green hours begin a second later
    value = end_s - time.time() if limit == "flexibility_s" else datetime.fromtimestamp(end_s, UTC).isoformat()

    found = await estimate(world, time_limit_s=60, **{limit: value})

    assert found.greenest is not None
    assert found.greenest.intensity_gco2_per_kwh == pytest.approx(400)


async def test_an_unknown_length_stays_unknown(world: World) -> None:
    await world.node("n1")
    await world.scheduler.turn()
    set_grid(world)

    found = await estimate(world)

    assert found.now is not None
    assert (found.duration_s, found.duration_from, found.now.carbon_gco2) == (None, None, None)
    assert found.now.carbon_gco2_per_hour == pytest.approx((found.power_w or 0) / 1_000 * 400)
    assert any("Length: unknown" in sentence for sentence in found.assumptions)


@pytest.mark.parametrize(
    ("spec", "reason", "suitable"),
    [
        ({"gpus": {"min": 3}}, "not_enough_free_gpus", 4),
        ({"gpus": {"min": 1, "model": "H100"}}, "no_eligible_node", 0),
        ({"gpus": {"min": 1}, "hold": True}, "held", 4),
    ],
)
async def test_a_job_that_would_wait_says_why(world: World, spec: Any, reason: str, suitable: int) -> None:
    await world.node("n1")
    await world.running(2)

    found = await estimate(world, **spec)

    assert (found.starts_now, found.reason, found.suitable_gpus) == (False, reason, suitable)
    assert found.detail
    assert found.placement == []
    assert (found.now is None) == (suitable == 0)


async def test_a_cell_has_room_while_its_jobs_can_have_what_they_ask_for(postgres_url: str, redis_url: str) -> None:
    """Under a policy that resizes gangs each new job would start in the next round, however many there are."""
    async with a_world(fresh_database(postgres_url), redis_url, policy="joint") as world:
        await world.node("n1")
        await world.running(1, maximum=4, preemptible=True)
        assert await world.claims() == 4

        roomy = await estimate(world)
        for _ in range(3):
            await world.job()
        full = await estimate(world)

    assert (roomy.starts_now, roomy.room_at is not None, full.room_at) == (False, True, None)
    assert full.expected_start_at is not None


async def test_a_policy_that_waits_for_green_hours_says_until_when(dirty: World) -> None:
    await dirty.node("n1")
    await dirty.scheduler.turn()
    begin_s = set_grid(dirty)

    found = await estimate(dirty, flexibility_s=12 * HOUR_S)

    assert (found.policy, found.starts_now, found.reason) == ("gaia", False, "greener_hours")
    assert found.expected_start_at is not None
    assert found.expected_start_at.timestamp() >= begin_s + HOUR_S


async def test_a_service_instance_and_a_bad_spec_are_refused(world: World) -> None:
    await world.scheduler.turn()
    for spec, pointer in (({"service": {}}, "/service"), ({"gpus": {"min": 0}}, "/gpus/min")):
        refused = await answer(world, **spec)
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["pointer"] == pointer


async def test_secrets_count_for_what_a_program_starts_with_as_for_a_submission(world: World) -> None:
    await world.scheduler.turn()
    await world.fetch("INSERT INTO tenants (id, limits) VALUES ('default', '{}')")
    await world.fetch(
        "INSERT INTO secrets (tenant_id, project, name, version, sealed) "
        "SELECT 'default', '', 'S' || n, 1, decode(repeat('00', 60000), 'hex') FROM generate_series(0, 39) n"
    )
    uses = [{"name": f"S{number}", "env": f"V{number}"} for number in range(40)]
    assert (await answer(world, secrets=[use | {"file": use["env"], "env": None} for use in uses])).status_code == 200
    refused = await answer(world, secrets=uses)
    assert refused.status_code == 422
    assert "command, environment and secrets have" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("spec", "pointer"),
    [
        ({"secrets": [{"name": "HERE", "env": "A"}, {"name": "GONE", "env": "B"}]}, "/secrets/1/name"),
        ({"secrets": [{"name": "ELSEWHERE", "env": "A"}]}, "/secrets/0/name"),
        ({"source": {"upload": PARTIAL}}, "/source/upload"),
        ({"source": {"upload": "c" * 64}}, "/source/upload"),
        ({"secrets": [{"name": "HERE", "env": "A"}, {"name": "OURS", "file": "b"}], "source": {"upload": WHOLE}}, None),
    ],
)
async def test_what_a_job_names_has_to_exist_as_for_a_submission(world: World, spec: Any, pointer: str | None) -> None:
    await world.scheduler.turn()
    await world.fetch("INSERT INTO tenants (id, limits) VALUES ('default', '{}')")
    for name, project in (("HERE", ""), ("OURS", "default"), ("ELSEWHERE", "other")):
        await world.fetch(
            "INSERT INTO secrets (tenant_id, project, name, version, sealed) VALUES ('default', $2, $1, 1, '')",
            name,
            project,
        )
    for sha256 in (WHOLE, PARTIAL):
        await world.fetch(
            "INSERT INTO uploads (tenant_id, sha256, size_bytes, is_complete) VALUES ('default', $1, 1, $2)",
            sha256,
            sha256 == WHOLE,
        )

    found = await answer(world, **spec)

    if pointer is None:
        assert found.status_code == 200, found.text
    else:
        assert found.status_code == 422
        assert [error["pointer"] for error in found.json()["errors"]] == [pointer]
