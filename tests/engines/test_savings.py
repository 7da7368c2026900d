"""What a dry run would have saved: from the plan's holds, the engine's runs and the ledger to a day's figures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fastapi import FastAPI

from services.cli.site import engines as cli
from services.contracts.engines import EngineMode
from services.contracts.identity import Identity, Role
from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Signal
from services.kit.carbon import Carbon
from services.kit.http import ServiceClient, new_session
from services.kit.problems import install_problem_handlers
from services.scheduler import engine_endpoints
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.saving import Savings
from tests.engines.bridge import Bridge, a_job, on
from tests.scheduler.world import World
from tests.support.tokens import ActingAs

pytestmark = pytest.mark.usefixtures("the_lab")

HOUR_S = 3_600.0
DIRTY, GREEN = 500.0, 100.0


def midnight_s(at: datetime) -> float:
    return datetime.combine(at.date(), datetime.min.time(), UTC).timestamp()


class Grid:
    """A grid that was measured until ``until_s``: dirty before ``green_s``, green from then on."""

    green_s = until_s = 0.0
    watch: CarbonWatch

    async def history(self, request: web.Request) -> web.Response:
        """Answer as the carbon service does, by the hour, in pages of three."""
        start_s, end_s = (datetime.fromisoformat(request.query[name]).timestamp() for name in ("start", "end"))
        first_s = float(request.query.get("cursor", start_s // HOUR_S * HOUR_S))
        hours = np.arange(first_s, min(end_s, self.until_s), HOUR_S).tolist()
        points = [
            {
                "start_at": datetime.fromtimestamp(hour, UTC).isoformat(),
                "end_at": datetime.fromtimestamp(min(hour + HOUR_S, self.until_s), UTC).isoformat(),
                "gco2_per_kwh": DIRTY if hour < self.green_s else GREEN,
            }
            for hour in hours
        ]
        rest = {"next_cursor": str(hours[3])} if len(hours) > 3 else {}
        page = {"zone": "Z", "signal": "average_direct", "provider": "test", "points": points[:3], **rest}
        return web.json_response(page)


async def until_green(world: World, green_s: float, policy: str = "wait-awhile", **parameters: float) -> None:
    """Have a policy hold jobs until the grid is green."""
    await world.scheduler.prepare()
    await world.fetch(
        "UPDATE scheduler_state SET policy = $1, parameters = $2, memory = '{}', last_active_at = NULL, "
        "version = version + 1 RETURNING 1",
        policy,
        parameters,
    )
    times, values = np.array([green_s - 48 * HOUR_S, green_s, green_s + 2 * HOUR_S]), np.array([DIRTY, GREEN, DIRTY])
    curve = CarbonCurve(times, values, green_s + 48 * HOUR_S)
    world.scheduler._carbon._known = {"Z": CarbonOutlook("Z", Signal.AVERAGE_DIRECT, curve)}


async def used(world: World, external_id: str, start_s: float, kwh: float, grams_per_kwh: float = DIRTY) -> None:
    """Enter an hour of a job into the ledger, with a PUE of 1.5."""
    await world.fetch(
        "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j, "
        "cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, "
        "carbon_gco2) SELECT 'slurm.g1', 'b', $2::float8::bigint, j.id, j.id, to_timestamp($2::float8), "
        "to_timestamp($2::float8 + 3600), 1, $3::float8 * 3.6e6, 0, 0, 'modelled', 'Z', 'average_direct', "
        "$4::float8, false, 1.5, "
        "$3::float8 * $4::float8 * 1.5 FROM jobs j WHERE j.external_id = $1 RETURNING 1",
        external_id,
        start_s,
        kwh,
        grams_per_kwh,
    )


async def ended(world: World, bridge: Bridge, *names: str) -> None:
    await bridge.say(*(a_job(name, "succeeded", exit_code=0) for name in names))


async def the_day(world: World) -> dict[str, Any]:
    """Return what was reckoned; one day was."""
    (row,) = await world.fetch("SELECT * FROM engine_savings")
    return dict(row)


@pytest.fixture
async def grid() -> AsyncIterator[Grid]:
    """A grid whose history is asked for over HTTP."""
    found, app = Grid(), web.Application()
    app.router.add_get("/v1/carbon/Z/history", found.history)
    async with TestServer(app) as server, new_session() as session:
        client = ServiceClient(session, f"http://127.0.0.1:{server.port}", "carbon")
        found.watch = CarbonWatch(
            Carbon(client, attempts=1), "Z", refresh_s=1e9, window_s=86_400, default_gco2_per_kwh=400
        )
        yield found


async def test_held_jobs_are_reckoned_in_the_hours_in_which_they_would_have_run(world: World, grid: Grid) -> None:
    """One was held for four hours, one had begun before it was planned, and of one no energy is known."""
    now = datetime.now(UTC)
    start_s = now.timestamp()
    green_s = (start_s // HOUR_S + 5) * HOUR_S
    await until_green(world, green_s)
    bridge = Bridge(world, EngineMode.DRY_RUN)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("unseen", "running", shares=[on("g1", 3)], started_at=now))
    await bridge.say(
        a_job("held", time_limit_s=3_600, submitted_at=now), a_job("unmeasured", time_limit_s=3_600, submitted_at=now)
    )
    runs = [
        a_job(name, "running", shares=[on("g1", at)], started_at=now, submitted_at=now)
        for at, name in enumerate(("held", "unmeasured"))
    ]
    await bridge.say(*runs)
    await used(world, "held", start_s, 2.0)
    await used(world, "unseen", start_s, 1.0)
    await ended(world, bridge, "held", "unseen", "unmeasured")
    savings = Savings(world.database, grid.watch)
    grid.green_s = green_s
    next_day_s = midnight_s(now) + 86_400

    assert await savings.look(start_s) == 0  # the day is not over
    grid.until_s = green_s - HOUR_S
    await savings.look(max(next_day_s, grid.until_s) + 60)
    early = await the_day(world)
    assert (early["jobs"], early["unpriced"], early["settled"]) == (3, 1, False)
    assert early["carbon_gco2"] == early["would_carbon_gco2"] == pytest.approx(1.0 * DIRTY * 1.5)

    grid.until_s = green_s + 30 * HOUR_S
    assert await savings.look(next_day_s + 24 * HOUR_S - 60) == 1
    day = await the_day(world)
    assert (day["jobs"], day["unplanned"], day["unmeasured"], day["unpriced"], day["later"]) == (3, 1, 1, 0, 2)
    assert day["later_h"] == pytest.approx(2 * (green_s - start_s) / HOUR_S, abs=0.01)
    assert day["carbon_gco2"] == pytest.approx(3.0 * DIRTY * 1.5)
    assert day["would_carbon_gco2"] == pytest.approx((1.0 * DIRTY + 2.0 * GREEN) * 1.5)
    assert day["settled"]
    assert await savings.look(next_day_s + 24 * HOUR_S - 60) == 0


async def test_days_without_energy_have_hours_and_no_grams(world: World, grid: Grid) -> None:
    """As those of Kueue, whose bridge measures none; after five days nothing is waited for."""
    now = datetime.now(UTC)
    green_s = (now.timestamp() // HOUR_S + 5) * HOUR_S
    await until_green(world, green_s)
    bridge = Bridge(world, EngineMode.DRY_RUN)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", time_limit_s=3_600, submitted_at=now))
    await bridge.say(a_job("1", "running", shares=[on("g1", 0)], started_at=now))
    await ended(world, bridge, "1")
    await Savings(world.database, grid.watch).look(midnight_s(now) + 86_400 + 7 * HOUR_S)

    day = await the_day(world)
    assert (day["jobs"], day["unmeasured"], day["carbon_gco2"], day["would_carbon_gco2"]) == (1, 1, None, None)
    assert day["later_h"] == pytest.approx((green_s - now.timestamp()) / HOUR_S, abs=0.01)


async def test_a_day_whose_hours_nobody_knows_is_settled_before_its_jobs_are_forgotten(
    world: World, grid: Grid
) -> None:
    now = datetime.now(UTC)
    await until_green(world, (now.timestamp() // HOUR_S + 5) * HOUR_S)
    bridge = Bridge(world, EngineMode.DRY_RUN)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", time_limit_s=3_600, submitted_at=now))
    await bridge.say(a_job("1", "running", shares=[on("g1", 0)], started_at=now))
    await used(world, "1", now.timestamp(), 1.0)
    await ended(world, bridge, "1")
    savings = Savings(world.database, grid.watch)
    for day in range(1, 6):
        assert await savings.look(midnight_s(now) + day * 86_400 + 8 * HOUR_S) == 1
        assert (await the_day(world))["settled"] == (day == 5)
    assert (await the_day(world))["unpriced"] == 1
    assert await savings.look(midnight_s(now) + 6 * 86_400) == 0


async def test_what_is_under_control_is_in_no_dry_run(world: World, grid: Grid) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1"))
    await bridge.say(a_job("1", "running", shares=[on("g1", 0)], revision=1))
    await ended(world, bridge, "1")

    assert await Savings(world.database, grid.watch).look(midnight_s(datetime.now(UTC)) + 86_400 + 7 * HOUR_S) == 0


REVOKED = """
INSERT INTO node_credentials (node_id, credential_sha256, redis_sha256, enrolment, revoked_at)
VALUES ('slurm', '', '', '', now()) RETURNING 1
"""


async def test_the_engine_has_its_days(world: World, grid: Grid) -> None:
    """As operators read them over HTTP, and in the shell."""
    bridge = Bridge(world, EngineMode.DRY_RUN)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1"))
    yesterday = datetime.now(UTC).date() - timedelta(days=1)
    await world.fetch(
        "INSERT INTO engine_savings VALUES ('slurm', $1, 4, 1, 1, 0, 2, 3.5, 1500, 900, false) RETURNING 1", yesterday
    )
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(engine_endpoints.router)
    app.state.database = world.database
    identity = Identity(tenant_id="default", role=Role.OPERATOR, key_id="key-1")
    transport = httpx.ASGITransport(ActingAs(app, identity))
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as api:
        rows = (await api.get("/v1/engines/slurm/days?days=2")).json()["items"]
        (engine,) = (await api.get("/v1/engines")).json()["items"]
        assert [len((await api.get("/v1/engines/slurm/days?days=1")).json()["items"])] == [1]
        refused = [await api.get(f"/v1/engines/{path}") for path in ("other/days", "slurm/days?days=0")]
        await world.fetch(REVOKED)
        assert (await api.get("/v1/engines")).json()["items"] == [], "no list shows one whose bridge is let in no more"
    assert [answer.status_code for answer in refused] == [404, 422]
    assert engine["days"] == rows
    assert [(row["day"], row["counts"]) for row in rows] == [
        (str(yesterday + timedelta(days=1)), {"would_release": 1}),
        (str(yesterday), {}),
    ]
    assert rows[0]["savings"] is None
    assert rows[1]["savings"]["would_carbon_gco2"] == 900
    shown: Any = cli._days_table(rows)
    cells = list(zip(*(column.cells for column in shown.columns[1:7]), strict=True))
    assert cells == [("",) * 6, ("4", "2", "3 h 30 min", "1.500 kg", "0.900 kg", "0.600 kg")]
    assert cli._left_out(rows[1]["savings"]) == "1 unplanned, 1 unmeasured, not settled"
