"""Nodes in several zones: the grids the scheduler asks for, and what a live round decides by them."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from services.core.cycle.snapshot import Trigger
from services.core.domain.carbon import CarbonOutlook, Signal
from services.kit.carbon import Carbon
from services.kit.http import ServiceClient, new_session
from services.kit.problems import unavailable
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.snapshot import load
from tests.scheduler.world import World, a_world
from tests.support.builders import flat_curve, hourly_curve
from tests.support.servers import fresh_database


def an_outlook(zone: str, intensity: float, signal: Signal = Signal.MARGINAL) -> CarbonOutlook:
    return CarbonOutlook(zone, signal, flat_curve(intensity))


class Answers(CarbonWatch):
    """A watch whose carbon service answers for the zones it is given, and says that it is away for all others."""

    def __init__(self, client: ServiceClient, *, refresh_s: float = 0.0) -> None:
        super().__init__(Carbon(client), "home", refresh_s=refresh_s, window_s=86_400, default_gco2_per_kwh=400)
        self.answers: dict[str, CarbonOutlook] = {}
        self.asked: list[str] = []

    async def _ask(self, zone: str) -> CarbonOutlook:
        self.asked.append(zone)
        if zone not in self.answers:
            raise unavailable("The carbon service")
        return self.answers[zone]


@pytest.fixture
async def client():
    async with new_session() as session:
        yield ServiceClient(session, "http://127.0.0.1:1", "carbon")


async def seen(watch: CarbonWatch, *zones: str) -> list[tuple[str, float, Signal, bool]]:
    found = await watch.outlooks(zones, 1e9)
    return [(each.zone, each.curve.at(1e9), each.signal, each.stale) for each in found]


async def test_a_job_that_names_a_zone_runs_in_no_other(world: World) -> None:
    await world.node("far", 4, zone="FAR")
    stays = await world.job(2, gpus={"min": 2, "zone": "HERE"})
    goes = await world.job(2)
    await world.scheduler.turn()
    assert [await world.state(job) for job in (stays, goes)] == ["queued", "starting"], "no node is there yet"
    assert await world.fetch("SELECT reason FROM jobs WHERE id = $1", stays) == [("no_eligible_node",)]
    await world.node("here", 4, zone="HERE")
    await world.scheduler.turn()
    placed = "SELECT shares -> 0 ->> 'node_id' FROM allocations WHERE job_id = $1"
    assert await world.fetch(placed, stays) == [("here",)]
    assert await world.fetch(placed, goes) == [("far",)]


async def test_each_zone_falls_back_by_itself(client: ServiceClient) -> None:
    watch = Answers(client)
    watch.answers = {"a": an_outlook("a", 100), "b": an_outlook("b", 200)}
    assert await seen(watch, "b", "a", "b", "c") == [
        ("a", 100, Signal.MARGINAL, False),
        ("b", 200, Signal.MARGINAL, False),
        ("c", 400, Signal.MARGINAL, True),
    ]
    watch.answers = {"b": an_outlook("b", 300)}
    assert await seen(watch, "a", "b") == [("a", 100, Signal.MARGINAL, True), ("b", 300, Signal.MARGINAL, False)]
    assert (await watch.outlooks(["c"], 1e9))[0].curve.is_estimated(1e9, 1e9 + 1)


async def test_zones_are_compared_by_one_signal_only(client: ServiceClient) -> None:
    watch = Answers(client)
    watch.answers = {"a": an_outlook("a", 100), "b": an_outlook("b", 200, Signal.AVERAGE_DIRECT)}

    assert await seen(watch, "a", "b") == [("a", 100, Signal.MARGINAL, False), ("b", 400, Signal.MARGINAL, True)]


async def test_without_nodes_the_default_zone_is_asked_and_each_zone_no_sooner_than_allowed(
    client: ServiceClient,
) -> None:
    watch = Answers(client, refresh_s=1e9)

    assert await seen(watch) == [("home", 400, Signal.AVERAGE_DIRECT, True)]
    assert [zone for zone, *_ in await seen(watch, "home", "x")] == ["home", "x"]
    await seen(watch, "x")
    assert watch.asked == ["home", "x"]


@pytest.mark.usefixtures("the_lab")
async def test_a_live_round_decides_by_the_zone_of_the_nodes_a_job_may_use(postgres_url: str, redis_url: str) -> None:
    hour_s = time.time() // 3_600 * 3_600
    dirty = hourly_curve([500.0] * 6 + [50.0] * 42, start_s=hour_s)
    green = hourly_curve([100.0] * 6 + [500.0] * 42, start_s=hour_s)
    async with a_world(fresh_database(postgres_url), redis_url, policy="gaia") as world:
        world.scheduler._carbon._known = {
            zone: CarbonOutlook(zone, Signal.AVERAGE_DIRECT, curve) for zone, curve in (("Z", dirty), ("A", green))
        }
        await world.node("n1", 1, model="A100", zone="Z")
        await world.node("n2", 3, model="V100", zone="A")
        jobs = {model: await world.job(1, gpus={"min": 1, "max": 1, "model": model}) for model in ("A100", "V100")}
        await world.scheduler.turn()

        assert {model: await world.state(job) for model, job in jobs.items()} == {"A100": "queued", "V100": "starting"}
        (row,) = await world.fetch("SELECT intensity_gco2_per_kwh, intensity_stale FROM plans ORDER BY round LIMIT 1")
        assert (row["intensity_gco2_per_kwh"], row["intensity_stale"]) == ((1 * 500 + 3 * 100) / 4, False)


async def test_live_gangs_start_in_the_cleaner_zone_and_span_none(postgres_url: str, redis_url: str) -> None:
    hour_s = time.time() // 3_600 * 3_600
    first, second = (hourly_curve([each] * 48, start_s=hour_s) for each in (500.0, 100.0))
    async with a_world(fresh_database(postgres_url), redis_url, policy="fifo") as world:
        world.scheduler._carbon._known = {
            zone: CarbonOutlook(zone, Signal.AVERAGE_DIRECT, curve) for zone, curve in (("A", first), ("B", second))
        }
        await world.node("n1", 1, model="A100", zone="A")
        await world.node("n2", 1, model="A100", zone="B")
        first_job, wide, last = await world.job(1), await world.job(2), await world.job(1)
        await world.scheduler.turn()

        rows = await world.fetch("SELECT job_id, shares #>> '{0,node_id}' AS node FROM allocations")
        assert {row["job_id"]: row["node"] for row in rows} == {first_job: "n2", last: "n1"}
        (row,) = await world.fetch(f"SELECT reason FROM jobs WHERE id = '{wide}'")
        assert row["reason"] == "no_eligible_node"

        outlooks = await world.scheduler._carbon.outlooks(["A", "B"], time.time())
        shown = (await load(world.database, Trigger.PASSIVE, outlooks, world.settings)).snapshot.jobs
        zones = {job_id: int(shown.data_zone[at]) for job_id, at in shown.index.items()}
        assert zones == {first_job: 1, wide: -1, last: 0}, "where their checkpoints will be"


async def test_a_zone_without_answers_is_logged_once_until_it_has_one(caplog: pytest.LogCaptureFixture) -> None:
    class Away:
        async def outlook(self, zone: str, **_: Any) -> Any:
            raise unavailable("The carbon service")

    watch = CarbonWatch(cast(Any, Away()), "A", refresh_s=0.0, window_s=1.0, default_gco2_per_kwh=400.0)
    said = list[int]()
    for _ in range(4):
        (outlook,) = await watch.outlooks([], 0.0)
        assert outlook.stale
        said.append(sum("carbon.unknown" in each.getMessage() for each in caplog.records))
    assert said == [0, 1, 1, 1], "the first failure is usual while services start"
