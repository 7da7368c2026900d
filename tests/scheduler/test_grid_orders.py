"""The grid's orders, live: given over HTTP, stored, met by the next round, amended, withdrawn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from lab.grid_report import problems
from services.contracts.identity import Identity, Role
from services.core.domain.ids import JobId
from services.kit.identity import forbidden
from services.kit.metrics import Metrics
from services.kit.problems import install_problem_handlers
from services.scheduler import grid_endpoints
from services.scheduler.explaining.reach import Judging
from services.scheduler.figures import show_figures
from services.scheduler.grid.orders import GridOrders
from services.scheduler.loop import Scheduler
from services.scheduler.planning.dry_run import LiveView
from tests.scheduler.test_device_controls import active_round, set_of
from tests.scheduler.test_explanations import explain
from tests.scheduler.test_power_limit import seen
from tests.scheduler.world import World
from tests.support.tokens import ActingAs

BUSY_W, IDLE_W = 360.0, 60.0


@asynccontextmanager
async def grid(world: World, role: Role = Role.OPERATOR, key_id: str = "key-1") -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(grid_endpoints.router)
    app.state.grid_orders, app.state.redis = GridOrders(world.database), world.redis
    loop = world.scheduler
    app.state.grid_judging = Judging(LiveView(world.database, world.settings, loop._carbon, loop._nodes.hook))
    identity = Identity(tenant_id="default", role=role, key_id=key_id)
    transport = httpx.ASGITransport(ActingAs(app, identity))
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as api:
        yield api


async def node(world: World, name: str = "n1", gpus: int = 4, zone: str = "Z") -> None:
    """A node whose GPUs take power limits from 100 to 400 W, all of which draw what busy ones do."""
    await world.node(name, gpus, zone=zone)
    await world.fetch(
        "UPDATE nodes SET devices = (SELECT jsonb_agg(d || jsonb_build_object('can_set_power_limit', true, "
        "'power_limit_w', 400, 'lowest_limit_w', 100)) FROM jsonb_array_elements(devices) d), readings = $2 "
        "WHERE id = $1 RETURNING 1",
        name,
        [reading(index, BUSY_W) for index in range(gpus)],
    )


def reading(gpu: int, watts: float) -> dict[str, float]:
    return {"index": gpu, "power_w": watts, "utilization": 1.0}


async def running(world: World, gpus: int = 2, **spec: Any) -> str:
    """Return a job that runs and has drawn what a busy GPU does for a while."""
    job = await world.running(gpus, **spec)
    await world.fetch(
        "INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s) "
        "VALUES ($1, $2::float8 * 100, $2::float8 * 100, 0, 0, 100) RETURNING 1",
        job,
        BUSY_W,
    )
    return job


async def minute(world: World, job: str, since: datetime, minutes: int, watts: float) -> None:
    """Book what a job draws in one minute, so many minutes from a time."""
    await world.fetch(
        "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, "
        "gpu_energy_j, cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, "
        "intensity_estimated, pue, carbon_gco2) SELECT 'n1', 'b', $1::int + 200, $2, $2, "
        "$3::timestamptz + make_interval(mins => $1::int), $3::timestamptz + make_interval(mins => $1::int + 1), "
        "2, 60 * $4::float8, 0, 0, 'counter', 'Z', 'average', 300, false, 1, 0 RETURNING 1",
        minutes,
        job,
        since,
        watts,
    )


async def limit_w(world: World, job: str) -> float | None:
    return (await set_of(world, await world.allocation(job)))[0]


async def give(world: World, **terms: Any) -> dict[str, Any]:
    async with grid(world) as api:
        answer = await api.post("/v1/grid/orders", json={"duration_s": 600, **terms})
    assert answer.status_code == 201, answer.text
    await world.scheduler.turn()
    return answer.json()


def cut(share: float) -> list[dict[str, float]]:
    return [{"cut": share}]


async def reason(world: World, job: str) -> str | None:
    (row,) = await world.fetch("SELECT reason FROM jobs WHERE id = $1", job)
    return row["reason"]


async def test_an_order_is_met_by_the_next_round_and_leaves_nothing_behind(world: World) -> None:
    await node(world)
    soft, hard = await running(world, flex=50), await running(world, flex=0)

    order = await give(world, steps=cut(0.2))

    assert (order["state"], order["baseline_w"]) == ("in_force", 4 * BUSY_W)
    assert order["limit_w"] == pytest.approx(0.8 * 4 * BUSY_W)
    lowered = await limit_w(world, soft)
    assert lowered == pytest.approx(BUSY_W - 0.2 * 4 * BUSY_W / 2, abs=2), "two GPUs save what four have to"
    assert await limit_w(world, hard) is None
    (event,) = await world.fetch("SELECT data FROM job_events WHERE type = 'job.set'")
    assert event["data"]["reason"] == "grid_order"

    await active_round(world)
    assert await set_of(world, await world.allocation(soft)) == (lowered, None, 1), "it is not set again"

    async with grid(world) as api:
        gone = (await api.delete(f"/v1/grid/orders/{order['id']}")).json()
        again = await api.delete(f"/v1/grid/orders/{order['id']}")
    await world.scheduler.turn()
    assert (gone["state"], again.status_code) == ("withdrawn", 200)
    assert await limit_w(world, soft) is None
    rows = await world.fetch("SELECT action, target FROM audit_log ORDER BY at")
    assert [tuple(row) for row in rows] == [("grid.order", order["id"]), ("grid.withdraw", order["id"])]


async def test_gangs_pause_where_limits_do_not_suffice_and_come_back(world: World) -> None:
    await node(world)
    kept, paused = await running(world, flex=0), await running(world, flex=50)
    order = await give(world, steps=cut(0.42))
    gang = await world.allocation(paused)

    (row,) = await world.fetch("SELECT state, stop_reason FROM allocations WHERE id = $1", gang)
    assert tuple(row) == ("stopping", "preempted")
    assert await limit_w(world, kept) is None
    await world.report(gang, "exited", exit_code=0, ended_by="stop")
    for _ in range(3):
        await world.scheduler.turn()
    assert (await world.state(paused), await reason(world, paused)) == ("queued", "grid_order")
    (row,) = await world.fetch("SELECT state FROM allocations WHERE job_id = $1", kept)
    assert row["state"] == "running", "GPUs that were just given up draw nothing more, whatever was read of them last"

    async with grid(world) as api:
        await api.delete(f"/v1/grid/orders/{order['id']}")
    await world.scheduler.turn()
    assert await world.state(paused) == "starting"


@pytest.mark.parametrize(("model", "known"), [("A100", True), ("H100", False)])
async def test_what_a_gang_draws_is_not_taken_from_when_it_was_limited(world: World, model: str, known: bool) -> None:
    await node(world)
    soft, hard = await running(world, flex=50, max_restarts=1), await running(world, flex=0)
    order = await give(world, steps=cut(0.2))
    assert await limit_w(world, soft) is not None
    await world.fetch("UPDATE job_footprints SET gpu_energy_j = 100 * 200 WHERE job_id = $1 RETURNING 1", soft)
    async with grid(world) as api:
        await api.delete(f"/v1/grid/orders/{order['id']}")
    await world.scheduler.turn()
    assert await limit_w(world, soft) is None

    async def drawn_w(job: str) -> float:
        jobs = (await seen(world)).jobs
        return jobs.gpu_power_w.item(jobs.index[JobId(job)])

    assert [await drawn_w(soft), await drawn_w(hard)] == [BUSY_W, BUSY_W]
    await world.node("n2", 4, zone="Z", model=model)
    await world.fetch("UPDATE nodes SET draining = true WHERE id = 'n1' RETURNING 1")
    await world.report(await world.allocation(soft), "exited", exit_code=1, ended_by="itself")
    for _ in range(3):
        await world.scheduler.turn()
    assert await world.state(soft) == "starting", "it runs again"
    assert await drawn_w(soft) == (BUSY_W if known else 200.0), "another model draws another power"


async def found(world: World, order: dict[str, Any]) -> dict[str, Any]:
    async with grid(world) as api:
        (listed,) = [each for each in (await api.get("/v1/grid/orders")).json()["items"] if each["id"] == order["id"]]
        assert (await api.get(f"/v1/grid/orders/{order['id']}")).json() == listed
    return listed


@pytest.mark.parametrize("starts_in_s", [0, 3_600])
async def test_what_cannot_be_met_is_said_with_the_answer(world: World, starts_in_s: int) -> None:
    await node(world, "n1", 6)
    await running(world, flex=0, preemptible=False)
    await running(world, flex=50)
    await world.fetch(
        "UPDATE nodes SET readings = $1 RETURNING 1",
        [reading(gpu, BUSY_W) if gpu < 4 else {**reading(gpu, IDLE_W), "utilization": 0.0} for gpu in range(6)],
    )
    start_at = (datetime.now(UTC) + timedelta(seconds=starts_in_s)).isoformat() if starts_in_s else None

    order = await give(world, steps=cut(0.9), start_at=start_at)

    least_w = 2 * 100 + 4 * IDLE_W
    assert (order["drawn_w"], order["least_w"]) == (4 * BUSY_W + 2 * IDLE_W, pytest.approx(least_w))
    allows = "At its lowest it will allow" if starts_in_s else "It allows"
    assert order["shortfall"] == (
        f"{allows} 156 W; 1,560 W are drawn, and 440 W can at least be reached: 240 W by idle GPUs and hosts, "
        "200 W by jobs that may not be stopped, at their lowest limits."
    )
    assert (await found(world, order))["shortfall"] == order["shortfall"]
    async with grid(world) as api:
        eased = (await api.patch(f"/v1/grid/orders/{order['id']}", json={"steps": [{"to_w": least_w}]})).json()
        gone = (await api.delete(f"/v1/grid/orders/{order['id']}")).json()
    assert (eased["least_w"], eased["shortfall"]) == (pytest.approx(least_w), None)
    assert (gone["drawn_w"], gone["least_w"], gone["shortfall"]) == (None, None, None)


async def test_a_job_that_waits_is_told_why_its_order_is_not_met(world: World) -> None:
    await node(world)
    await running(world, preemptible=False)
    order = await give(world, steps=cut(0.9))
    job = await world.job(2)
    await active_round(world)
    detail = (await explain(world, job)).detail or ""
    assert f"The order {order['id']} allows 144 W; 310 W can at least be reached: " in detail
    async with grid(world) as api:
        await api.patch(f"/v1/grid/orders/{order['id']}", json={"steps": [{"to_w": 400.0}]})
    assert "can at least be reached" not in ((await explain(world, job)).detail or "")


async def test_limits_that_are_not_kept_are_said(world: World) -> None:
    await node(world)
    await running(world, 4, flex=50, preemptible=False)
    order = await give(world, steps=cut(0.2))
    assert order["shortfall"] is None, "there is time yet"
    await world.fetch(
        "UPDATE grid_orders SET announced_at = announced_at - interval '5 min', "
        "start_at = start_at - interval '5 min' RETURNING 1"
    )
    assert "GPUs do not keep the limits" in (await found(world, order))["shortfall"]
    await world.fetch("UPDATE nodes SET readings = $1 RETURNING 1", [reading(gpu, 0.8 * BUSY_W) for gpu in range(4)])
    assert (await found(world, order))["shortfall"] is None
    await world.fetch("UPDATE nodes SET readings = '[]' RETURNING 1")
    assert "None of its nodes says" in (await found(world, order))["shortfall"]


async def test_an_order_for_a_zone_whose_nodes_have_gone_says_so(world: World) -> None:
    await node(world, zone="Z")
    await node(world, "n2", zone="Y")
    order = await give(world, zone="Y", steps=cut(0.2))
    assert order["shortfall"] is None
    await world.fetch("UPDATE nodes SET zone = 'Z' RETURNING 1")
    assert (await found(world, order))["shortfall"] == "The zone Y has no nodes now: nothing can draw less."


async def test_a_limit_of_the_cluster_is_kept_without_an_order(world: World) -> None:
    await node(world)
    job, late = await running(world, 4, flex=50), await world.job(4)
    settings = world.settings.model_copy(update={"power_limit_w": 1_000.0})
    world.scheduler = Scheduler(
        settings, world.database, world.redis, world.scheduler._carbon, world.scheduler._nodes.hook
    )

    await active_round(world)

    assert await limit_w(world, job) == pytest.approx(250, abs=1)
    assert await world.state(late) == "queued"


async def test_metrics_have_what_is_drawn_beside_what_may_be(world: World) -> None:
    await node(world)
    job = await running(world, 4, flex=50)
    order = await give(world, steps=cut(0.2))
    for at in (1, 2):
        await minute(world, job, datetime.now(UTC) - timedelta(seconds=0.5), -at, 1_000.0 * at)
    metrics = Metrics(CollectorRegistry())
    show_figures(metrics, world.database, world.redis, world.scheduler, world.settings)

    shown = (await metrics.text()).decode()

    assert f'wattshift_grid_order_drawn_watts{{order="{order["id"]}",zone=""}} 1000.0' in shown


async def test_an_order_outlives_the_scheduler(world: World) -> None:
    await node(world)
    soft = await running(world, 4, flex=50)
    await give(world, steps=cut(0.2))
    as_modelled = await limit_w(world, soft)
    assert as_modelled is not None
    assert as_modelled == pytest.approx(0.8 * BUSY_W, abs=1)
    await world.fetch("UPDATE nodes SET readings = $1 RETURNING 1", [reading(at, 0.9 * BUSY_W) for at in range(4)])
    world.scheduler._power._settle_s = 0.0  # what was set is in force by now
    await active_round(world)
    before = await set_of(world, await world.allocation(soft))
    assert before[0] < as_modelled - 5, "more is drawn than the models say"

    world.scheduler = Scheduler(
        world.settings, world.database, world.redis, world.scheduler._carbon, world.scheduler._nodes.hook
    )
    await active_round(world)

    assert await set_of(world, await world.allocation(soft)) == before
    await world.fetch("UPDATE grid_orders SET withdrawn_at = now(), revision = 2 RETURNING 1")
    await world.scheduler.turn()
    assert await limit_w(world, soft) is None


async def test_an_order_for_later_waits_for_its_time_and_may_be_amended(world: World) -> None:
    await node(world)
    soft = await running(world, 4, flex=50)
    later = datetime.now(UTC) + timedelta(hours=2)
    order = await give(world, start_at=later.isoformat(), steps=cut(0.2), notice_s=600)
    assert (order["state"], order["baseline_w"], order["limit_w"]) == ("announced", None, None)
    assert await limit_w(world, soft) is None

    async with grid(world) as api:
        url = f"/v1/grid/orders/{order['id']}"
        sooner = await api.patch(url, json={"start_at": (datetime.now(UTC) + timedelta(seconds=1)).isoformat()})
        await world.fetch("UPDATE grid_orders SET start_at = now() RETURNING 1")
        await world.scheduler.turn()
        refused = await api.patch(url, json={"start_at": later.isoformat()})
        deeper = await api.patch(url, json={"steps": [{"to_w": 4 * 200.0}], "duration_s": 1200})
        found = (await api.get(url)).json()
        listed = (await api.get("/v1/grid/orders")).json()["items"]
    assert [each.status_code for each in (sooner, refused, deeper)] == [200, 409, 200]
    assert (found["revision"], found["limit_w"], found["baseline_w"]) == (3, 800.0, 4 * BUSY_W)
    assert listed == [found]
    (row,) = await world.fetch("SELECT past FROM grid_orders")
    assert [each["steps"] for each in row["past"]] == [[{"offset_s": 0, "cut": 0.2, "to_w": None}]] * 2
    await world.scheduler.turn()
    assert await limit_w(world, soft) == pytest.approx(200.0, abs=1)


async def test_a_zone_alone_is_ordered(world: World) -> None:
    await node(world, "n1", zone="Z")
    await node(world, "n2", zone="Y")
    jobs = [await running(world, 4, flex=50) for _ in range(2)]
    (there,) = await world.fetch("SELECT job_id FROM allocations WHERE shares -> 0 ->> 'node_id' = 'n2'")

    order = await give(world, zone="Y", steps=cut(0.2))

    assert order["baseline_w"] == 4 * BUSY_W
    assert {job: await limit_w(world, job) is not None for job in jobs} == {job: job == there["job_id"] for job in jobs}


@pytest.mark.parametrize(
    ("first", "ago_s", "second"),
    [
        (None, 0, None),
        ("Z", 0, "Z"),
        (None, 0, "Z"),
        ("Z", 0, None),
        (None, 660, None),
        (None, 1_320, None),
        ("X", 0, "Z"),
    ],
)
async def test_what_is_drawn_for_one_order_is_not_what_another_is_measured_by(
    world: World, first: str | None, ago_s: int, second: str | None
) -> None:
    """The second is given while the first is in force, in the time after it, or when that is over; or elsewhere."""
    await node(world, zone="Z")
    await node(world, "n2", zone="X")
    job = await running(world, 4, flex=50)
    given = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=20)
    for at in range(-40, 20):
        await minute(world, job, given, at, 720.0 if at < 0 else 430.0)
    before = await give(world, steps=cut(0.2), duration_s=600, **({"zone": first} if first else {}))
    await world.fetch(
        "UPDATE grid_orders SET baseline_w = 720 * (zone IS DISTINCT FROM 'X')::int, baseline_at = $1, "
        "start_at = now() - make_interval(secs => $2), end_at = now() - make_interval(secs => $2) + interval '600 s' "
        "RETURNING 1",
        given,
        ago_s,
    )

    order = await give(world, steps=cut(0.25), **({"zone": second} if second else {}))

    apart = ago_s > 1_200 or (first, second) == ("X", "Z")
    assert order["id"] != before["id"]
    assert order["baseline_w"] == pytest.approx(430.0 if apart else 720.0)
    assert (datetime.fromisoformat(order["baseline_at"]) == given) is not apart


async def test_a_report_says_what_was_cut_and_whose_part_that_is(world: World) -> None:
    await node(world)
    soft, hard = await running(world, flex=50), await running(world, flex=0)
    order = await give(world, steps=cut(0.2), duration_s=1200)
    (now,) = await world.fetch("SELECT start_at FROM grid_orders")
    draws = {soft: (720.0, 430.0), hard: (720.0, 720.0)}
    for job, (before_w, during_w) in draws.items():
        for at in range(-10, 40):  # minutes: before, during, and after the order
            watts = during_w if 0 <= at < 20 else 1.04 * before_w if at >= 20 else before_w
            await minute(world, job, now["start_at"], at - 60, watts)
    async with grid(world) as api:
        early = await api.get(f"/v1/grid/orders/{order['id']}/report")
        await world.fetch(
            "UPDATE grid_orders SET announced_at = announced_at - interval '1 hour', "
            "start_at = start_at - interval '1 hour', end_at = end_at - interval '1 hour', "
            "baseline_at = baseline_at - interval '1 hour' RETURNING 1"
        )
        report = (await api.get(f"/v1/grid/orders/{order['id']}/report")).json()
    assert early.status_code == 409
    assert (report["baseline_w"], report["limit_w"]) == (pytest.approx(1440), pytest.approx(0.8 * 1440))
    assert (report["mean_w"], report["delivered_w"]) == (pytest.approx(1150), pytest.approx(290))
    assert report["above_most"] == 0
    assert report["rebound"] == pytest.approx(0.04)
    assert report["jobs"] == [
        {"job_id": soft, "before_w": pytest.approx(720), "during_w": pytest.approx(430)},
        {"job_id": hard, "before_w": pytest.approx(720), "during_w": pytest.approx(720)},
    ]


async def cut_at(world: World) -> datetime:
    """Return when a job began to draw 430 W instead of 720 W: twenty minutes ago."""
    await node(world)
    job = await running(world, flex=50)
    given = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=20)
    for at in range(-40, 20):
        await minute(world, job, given, at, 720.0 if at < 0 else 430.0)
    return given


async def test_nothing_is_said_to_be_delivered_before_an_order_was_in_force(world: World) -> None:
    given = await cut_at(world)
    begun = {"start_at": (given - timedelta(minutes=20)).isoformat(), "duration_s": 3_600}
    late = await give(world, steps=cut(0.35), **begun)
    moved = await give(world, steps=cut(0.35), start_at=(given + timedelta(hours=3)).isoformat())
    async with grid(world) as api:
        assert (await api.patch(f"/v1/grid/orders/{moved['id']}", json=begun)).is_success
        await world.fetch(
            "UPDATE grid_orders SET baseline_at = $2, announced_at = least($2, start_at + (id = $1)::int * "
            "interval '20 min'), past = jsonb_set(past, '{0,until}', to_jsonb($2::timestamptz)) RETURNING 1",
            late["id"],
            given,
        )
        reports = [(await api.get(f"/v1/grid/orders/{each['id']}/report")).json() for each in (late, moved)]
    for report in reports:
        assert report["mean_w"] == pytest.approx(430, rel=0.02)
        assert datetime.fromisoformat(report["since"]) == given


TERMS = ((0, 720, 440.0), (720, 1_170, 100.0), (1_170, 1_200, 50.0))


async def test_a_report_judges_by_what_was_ordered_at_the_time(world: World) -> None:
    given = await cut_at(world)
    order = await give(world, steps=[{"to_w": 440.0}], start_at=given.isoformat(), duration_s=3_600)
    late = [{"to_w": 440.0}, {"offset_s": 900, "to_w": 5.0}]
    async with grid(world) as api:
        url = f"/v1/grid/orders/{order['id']}"
        for steps in (late, [{"to_w": 100.0}], [{"to_w": 50.0}]):
            assert (await api.patch(url, json={"steps": steps})).is_success
        await world.fetch(  # amended after 5, 12 and 19.5 minutes
            "UPDATE grid_orders SET announced_at = $1, baseline_at = $1, baseline_w = 720, past = ("
            "SELECT jsonb_agg(jsonb_set(p, '{until}', to_jsonb($1::timestamptz + make_interval(secs => "
            "(ARRAY[300, 720, 1170])[n]))) ORDER BY n) FROM jsonb_array_elements(past) WITH ORDINALITY AS of (p, n)) "
            "RETURNING 1",
            given,
        )
        report = (await api.get(f"{url}/report")).json()
    rows = await world.fetch("SELECT node_id, job_id, start_at, end_at, gpu_energy_j FROM energy_usages")
    lines = [(row[0], row[1], row[2].timestamp(), row[3].timestamp(), row[4]) for row in rows]
    assert problems(report, lines) == []
    assert "limit_w" in problems({**report, "amended": []}, lines)
    assert [each["steps"][0]["to_w"] for each in report["amended"]] == [440, 440, 100]
    assert report["limit_w"] == pytest.approx((720 * 440 + 450 * 100 + 30 * 50) / 1_200, rel=1e-3)
    windows = [(300 * at, 300 * at + 300) for at in range(4)]
    limits = [
        sum(max(min(last, upto) - max(first, since), 0) * watts for since, upto, watts in TERMS) / 300
        for first, last in windows
    ]
    assert report["above_most"] == pytest.approx(max(430 / each - 1 for each in limits), rel=1e-3)


async def test_a_node_that_is_said_to_be_elsewhere_changes_no_report(world: World) -> None:
    given = await cut_at(world)
    order = await give(world, zone="Z", steps=cut(0.35), start_at=given.isoformat(), duration_s=3_600)
    await world.fetch("UPDATE grid_orders SET baseline_at = $1, announced_at = $1 RETURNING 1", given)
    async with grid(world) as api:
        before = (await api.get(f"/v1/grid/orders/{order['id']}/report")).json()
        await world.fetch("UPDATE nodes SET zone = 'Y' RETURNING 1")
        after = (await api.get(f"/v1/grid/orders/{order['id']}/report")).json()
    assert before["mean_w"] == pytest.approx(430)
    assert {**after, "order": None} == {**before, "order": None}


async def test_what_has_passed_is_not_amended(world: World) -> None:
    await node(world)
    order = await give(world, steps=cut(0.2), duration_s=7_200)
    await world.fetch("UPDATE grid_orders SET start_at = start_at - interval '1 hour' RETURNING 1")
    ahead = await give(world, steps=cut(0.2), start_at=(datetime.now(UTC) + timedelta(minutes=1)).isoformat())
    assert ahead["baseline_w"] is not None
    async with grid(world) as api:
        before = datetime.now(UTC) - timedelta(seconds=1)
        shorter = (await api.patch(f"/v1/grid/orders/{order['id']}", json={"duration_s": 60})).json()
        url = f"/v1/grid/orders/{ahead['id']}"
        over = await api.patch(url, json={"start_at": "2020-01-01T00:00:00Z"})
        later = (await api.patch(url, json={"start_at": (before + timedelta(days=1)).isoformat()})).json()
        sooner = (await api.patch(url, json={"start_at": (before + timedelta(minutes=1)).isoformat()})).json()
        await api.delete(url)
        nothing = await api.get(f"{url}/report")
    assert shorter["state"] == "ended"
    assert datetime.fromisoformat(shorter["end_at"]) >= before, "what it had limited until now is no other past"
    assert (over.status_code, over.json()["errors"][0]["pointer"]) == (422, "/start_at")
    assert (later["state"], later["baseline_w"]) == ("announced", None), "what is drawn before is not known yet"
    assert sooner["baseline_w"] is not None
    assert (nothing.status_code, "withdrawn before it began" in nothing.json()["detail"]) == (409, True)


async def test_a_step_that_would_never_begin_is_refused_and_an_order_may_be_cut_short(world: World) -> None:
    await node(world)
    order = await give(world, steps=cut(0.2), duration_s=7_200)
    late = [{"cut": 0.2}, {"offset_s": 3_600, "cut": 0.3}]
    async with grid(world) as api:
        url = f"/v1/grid/orders/{order['id']}"
        answers = [
            await api.patch(url, json=change)
            for change in (
                {"steps": late, "duration_s": 3_600},
                {"steps": late},
                {"duration_s": 1_800},
                {"steps": late},
            )
        ]
        kept = (await api.get(url)).json()
    assert [each.status_code for each in answers] == [422, 200, 200, 422]
    assert "begins after 3600 s, but the order is over after 1800 s" in answers[-1].text
    assert [step["offset_s"] for step in kept["steps"]] == [0, 3_600], "it is as it was"


async def test_the_same_key_is_the_same_order(world: World) -> None:
    await node(world)
    body = {"duration_s": 600, "steps": cut(0.2)}
    async with grid(world) as api:
        first, second = [
            await api.post("/v1/grid/orders", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2)
        ]
        other = await api.post("/v1/grid/orders", json={**body, "duration_s": 900}, headers={"Idempotency-Key": "k"})
    assert [each.status_code for each in (first, second, other)] == [201, 200, 422]
    assert first.json()["id"] == second.json()["id"]
    assert other.json()["code"] == "idempotency_key_reused"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"duration_s": 600, "steps": [{}]}, "/steps/0"),
        ({"duration_s": 600, "steps": [{"cut": 0.2, "to_w": 5}]}, "/steps/0"),
        ({"duration_s": 600, "steps": [{"cut": 1.2}]}, "/steps/0/cut"),
        ({"duration_s": 600, "steps": [{"offset_s": 60, "cut": 0.2}]}, ""),
        ({"duration_s": 600, "steps": [{"cut": 0.2}, {"cut": 0.3}]}, ""),
        ({"duration_s": 600, "steps": [{"cut": 0.2}, {"offset_s": 600, "cut": 0.3}]}, ""),
        ({"steps": [{"cut": 0.2}]}, "/duration_s"),
        ({"duration_s": 600, "steps": [{"cut": 0.2}], "zone": "X"}, "/zone"),
        ({"duration_s": 600, "steps": [{"cut": 0.2}], "start_at": "2026-01-01T00:00:00Z"}, "/start_at"),
    ],
)
async def test_a_bad_order_changes_nothing(world: World, body: dict[str, Any], pointer: str) -> None:
    await node(world)
    async with grid(world) as api:
        answer = await api.post("/v1/grid/orders", json=body)
    assert answer.status_code == 422
    assert [each["pointer"] for each in answer.json()["errors"]] == [pointer]
    assert await world.fetch("SELECT 1 FROM grid_orders") == []


async def test_a_key_of_a_utility_reaches_the_orders_that_it_gave(world: World) -> None:
    await node(world)
    other = await give(world, steps=cut(0.1))
    async with grid(world, Role.GRID, "utility") as api:
        mine = (await api.post("/v1/grid/orders", json={"duration_s": 600, "steps": cut(0.2)})).json()
        listed = (await api.get("/v1/grid/orders")).json()["items"]
        url = f"/v1/grid/orders/{other['id']}"
        strange = [await api.get(url), await api.patch(url, json={"duration_s": 900}), await api.delete(url)]
        report = await api.get(f"/v1/grid/orders/{mine['id']}/report")
        gone = await api.delete(f"/v1/grid/orders/{mine['id']}")
    assert [each["id"] for each in listed] == [mine["id"]]
    assert [each.status_code for each in (*strange, report, gone)] == [404, 404, 404, 403, 200]
    assert (await world.fetch("SELECT withdrawn_at FROM grid_orders WHERE id = $1", other["id"]))[0][0] is None
    assert not any(
        Role.GRID.may(method, needed) for method in ("GET", "POST") for needed in Role if needed != Role.GRID
    )


@pytest.mark.parametrize(
    ("needed", "whom"), [(Role.USER, "a user"), (Role.OPERATOR, "an operator"), (Role.ADMIN, "an admin")]
)
def test_who_may_do_what_a_utility_may_not_is_said(needed: Role, whom: str) -> None:
    assert forbidden(Role.GRID, needed).detail == f"Only {whom} may do this."


async def test_users_give_no_orders(world: World) -> None:
    async with grid(world, Role.USER) as api:
        answer = await api.post("/v1/grid/orders", json={"duration_s": 600, "steps": cut(0.2)})
    assert answer.status_code == 403
