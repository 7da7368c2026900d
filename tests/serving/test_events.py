"""Between half hours pools are planned when something happens to them, and a plan that no longer fits is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, Role
from services.contracts.pools import PlannedInstances, PoolsResult, UnservedDemand
from services.contracts.serving import DemandForecast, PlanForecasts, PlanMode, PlanTrigger, PoolPlanResult
from services.core.domain.solving import Backend, SolveStatus
from services.kit.problems import ProblemError
from services.serving.repository.plans import plan_repository
from tests.serving.pools import a_spec, add_node, add_pool, add_traffic
from tests.serving.world import World, a_world

OPERATOR = Identity(tenant_id="ops", role=Role.OPERATOR, key_id="key_ops")
PLACES = [{"name": "west", "zone": "US-CAL-CISO"}, {"name": "east", "zone": "DE"}]


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    """Events count at once; one node of four GPUs in each of two zones."""
    async with a_world(database_url, plan_settle_s=0, plan_event_gap_s=0) as world:
        await world.database.execute(
            "TRUNCATE nodes, grid_orders, device_claims, allocations, jobs, pool_instances, pool_traffic CASCADE"
        )
        await add_node(world.database, "node-w", gpus=4)
        await add_node(world.database, "node-e", gpus=4, zone="DE")
        yield world


def an_answer(west: int = 4, east: int = 0, *, gpus: dict[str, int] | None = None, lacks: bool = False) -> Any:
    """Return a plan with so many small instances, made when there were four GPUs in each place, or ``gpus``."""
    four = {place: {"A100": 4} for place in ("west", "east")}
    known = four if gpus is None else {place: {"A100": count} for place, count in gpus.items()}
    planned = [
        PlannedInstances(location=place, request_class="all", mode="small", count=count, power_w=300)
        for place, count in (("west", west), ("east", east))
        if count
    ]
    demand = DemandForecast(method="test", is_assumed=False, history_s=0, peaks_qps={"all": [5.0] * 6})
    shortfall = [UnservedDemand(request_class="all", qps=1, reason="gpus")] if lacks else []
    return PoolPlanResult(
        forecasts=PlanForecasts(step_s=300, demand={"one": demand}, intensity={}, gpus=known, installed=four),
        plan=PoolsResult(
            status=SolveStatus.OPTIMAL,
            solver=Backend.HIGHS,
            partition="one",
            instances=planned,
            shortfall=shortfall,
        ),
    ).model_dump(mode="json")


async def planned(world: World, pool: str = "p", answer: Any = None, **spec: Any) -> str:
    await add_pool(world.database, pool, a_spec(places=PLACES, **spec))
    await world.look()
    return await world.answered(pool, answer or an_answer())


async def triggers(world: World, pool: str = "p") -> list[str]:
    return [plan["trigger"] for plan in await world.of(pool)]


async def take(world: World, node: str, *devices: int) -> None:
    """Have a job that may not be preempted hold devices."""
    await world.database.execute(
        "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state) "
        "VALUES ($1, 'acme', 'a', 'p', '{}', $2, 'running')",
        *(f"job-{node}", {"preemptible": False}),
    )
    await world.database.execute(
        "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
        "VALUES ($1 || '.1', $1, 1, 'running', 1, $2, 0)",
        *(f"job-{node}", [{"node_id": node, "devices": list(devices)}]),
    )
    for device in devices:
        await world.database.execute("INSERT INTO device_claims VALUES ($1, $2, $3)", node, device, f"job-{node}.1")


async def test_while_nothing_happens_a_pool_is_not_planned_again(world: World) -> None:
    await planned(world)
    await world.look()
    await world.look()
    assert await triggers(world) == ["clock"]


async def test_a_lost_node_has_the_pool_planned_at_once_and_its_return_again(world: World) -> None:
    await planned(world)
    await world.database.execute("UPDATE nodes SET state = 'lost' WHERE id = 'node-w'")
    await world.look()
    await world.look()
    assert await triggers(world) == ["clock", "node_lost"], "one plan, however often it is noticed"
    plan = (await world.of("p"))[-1]
    assert plan["slot_at"] < plan["from_at"] <= plan["submitted_at"], "it begins at once"
    moved = an_answer(0, 4, gpus={"west": 0, "east": 4})
    moved["forecasts"]["installed"]["west"] = {"A100": 0}
    await world.answered("p", moved)
    assert await world.in_force("p") == plan["id"]
    await world.look()
    assert len(await world.of("p")) == 2, "the plan knows"
    await world.database.execute("UPDATE nodes SET state = 'up' WHERE id = 'node-w'")
    await world.look()
    assert await triggers(world) == ["clock", "node_lost", "node_back"]


async def order(world: World, zone: str | None, *, from_s: float = 0.0) -> None:
    await world.database.execute(
        "INSERT INTO grid_orders (id, key_id, source, body_sha256, name, zone, start_at, end_at, notice_s, steps) "
        "VALUES ('grid_1', 'k', 'api', '', '', $1, now() + make_interval(secs => $2), 'infinity', 0, '[]')",
        *(zone, from_s),
    )


@pytest.mark.parametrize(("zone", "places"), [("DE", ["east"]), (None, ["east", "west"])])
async def test_an_order_of_the_grid_has_pools_planned_when_it_begins_and_when_it_ends(
    world: World, zone: str | None, places: list[str]
) -> None:
    await planned(world)
    await order(world, zone, from_s=600)
    await world.look()
    assert await triggers(world) == ["clock"], "it was announced"
    await world.database.execute("UPDATE grid_orders SET start_at = now() - interval '1 s'")
    await world.look()
    await world.look()
    assert await triggers(world) == ["clock", "grid_order"]
    known = an_answer()
    known["forecasts"]["ordered"] = places
    await world.answered("p", known)
    await world.look()
    assert len(await triggers(world)) == 2, "the plan knows"
    await world.database.execute("UPDATE grid_orders SET withdrawn_at = now()")
    await world.look()
    assert await triggers(world) == ["clock", "grid_order", "grid_order"]


async def test_an_order_elsewhere_is_no_event(world: World) -> None:
    await planned(world)
    await order(world, "FR")
    await world.look()
    assert await triggers(world) == ["clock"]


async def test_freed_gpus_are_planned_with_where_the_plan_lacks_some(world: World) -> None:
    short = an_answer(0, gpus={"west": 0, "east": 4}, lacks=True)
    await planned(world, "short", short)
    await planned(world, "content", an_answer(0, gpus={"west": 0, "east": 4}))
    await world.look()
    assert await triggers(world, "short") == ["clock", "gpus_freed"]
    assert await triggers(world, "content") == ["clock"]


async def test_instances_whose_gpus_others_took_are_planned_elsewhere(world: World) -> None:
    await planned(world)
    await take(world, "node-e", 0, 1)
    await world.look()
    assert await triggers(world) == ["clock"], "nothing is planned there"
    await take(world, "node-w", 0, 1)
    await world.look()
    assert await triggers(world) == ["clock", "shortfall"]


async def test_a_plan_whose_gpus_are_gone_is_not_applied_but_made_again(world: World) -> None:
    await add_pool(world.database, "p", a_spec(places=PLACES))
    await world.look()
    await take(world, "node-w", 0)
    refused = await world.answered("p", an_answer())
    assert await world.in_force("p") is None
    plan = (await world.of("p"))[0]
    assert (plan["id"], plan["outcome"], plan["failure"]) == (
        refused,
        "failed",
        {"code": "outdated", "detail": "Since the plan was made, west has lost GPUs that it needs."},
    )
    await world.look()
    assert await triggers(world) == ["clock", "shortfall"], "planned again without the pause after a failure"
    new = await world.answered("p", an_answer(3, 1, gpus={"west": 3, "east": 4}))
    assert await world.in_force("p") == new


async def test_a_proposal_whose_gpus_are_gone_is_refused_to_the_operator(world: World) -> None:
    proposal = await planned(world, mode=PlanMode.FIXED)
    await take(world, "node-w", 0)
    with pytest.raises(ProblemError, match=r"west has lost GPUs that it needs\. Plan the pool again\.") as refusal:
        await world.plans.apply(proposal, OPERATOR)
    assert refusal.value.problem_code == ProblemCode.CONFLICT
    assert await world.in_force("p") is None


async def test_of_two_plans_of_the_same_gpus_one_is_applied(world: World) -> None:
    for pool in ("a", "b"):
        await add_pool(world.database, pool, a_spec(places=PLACES))
    await world.look()
    for pool in ("a", "b"):
        await world.answer((await world.of(pool))[0]["id"], an_answer())
    await world.look()
    outcomes = [await world.outcomes(pool) for pool in ("a", "b")]
    assert outcomes == [[("succeeded", "applied")], [("succeeded", "failed"), ("queued", None)]]


@pytest.mark.parametrize(("per_window", "expected"), [(27, ["clock"]), (28, ["clock", "demand"])])
async def test_demand_above_what_was_planned_with_head_room(world: World, per_window: int, expected: list[str]) -> None:
    await planned(world)  # 5/s, with head-room 5.5/s: 27.5 in 5 s
    await add_traffic(world.database, "p", hours=0.02, per_window=per_window)
    await world.look()
    assert await triggers(world) == expected


@pytest.mark.parametrize(
    ("west", "objective", "expected"),
    [
        (120.0, "carbon", ["clock"]),
        (160.0, "carbon", ["clock", "intensity"]),
        (160.0, "energy", ["clock"]),
    ],
)
async def test_an_intensity_far_from_its_forecast(
    world: World, west: float, objective: str, expected: list[str]
) -> None:
    answer = an_answer()
    source = {"signal": "average_direct", "provider": "p", "method": "m", "generated_at": "2026-01-01T00:00:00Z"}
    answer["forecasts"]["intensity"] = {
        place["name"]: {**source, "zone": place["zone"], "is_stale": False, "gco2_per_kwh": [value] * 6}
        for place, value in zip(PLACES, (100.0, 140.0), strict=True)  # a quarter of their mean is 30
    }
    await planned(world, answer=answer, objective=objective)
    world.grid.gco2_per_kwh = {"US-CAL-CISO": west, "DE": 140.0}
    await world.look()
    assert await triggers(world) == expected


async def test_rescues_are_made_first(world: World) -> None:
    await planned(world, "calm")
    await planned(world, "hit", an_answer(0, 4))
    await world.plans.submit("calm", PlanTrigger.REQUEST, OPERATOR)
    await world.database.execute("UPDATE nodes SET state = 'lost' WHERE id = 'node-e'")
    await world.look()
    queued = await world.database.fetch("SELECT id, pool FROM pool_plans WHERE state = 'queued'")
    first = (await plan_repository(world.engine).queued(0))[0]
    assert {row["id"]: row["pool"] for row in queued}[first] == "hit"


async def test_events_in_quick_succession_are_one_plan(database_url: str) -> None:
    async with a_world(database_url, plan_settle_s=0, plan_event_gap_s=3_600) as world:
        await world.database.execute("TRUNCATE nodes, device_claims, pool_instances, pool_traffic CASCADE")
        for node in ("node-1", "node-2"):
            await add_node(world.database, node, gpus=2)
        await add_node(world.database, "node-e", gpus=4, zone="DE")
        await planned(world)
        await world.database.execute("UPDATE nodes SET state = 'lost' WHERE id = 'node-1'")
        await world.look()
        known = an_answer(2, 2, gpus={"west": 2, "east": 4})
        known["forecasts"]["installed"]["west"] = {"A100": 2}
        await world.answered("p", known)
        await world.database.execute("UPDATE nodes SET state = 'lost' WHERE id = 'node-2'")
        await world.look()
        assert await triggers(world) == ["clock", "node_lost"], "it waits"
        await world.database.execute(
            "UPDATE pool_plans SET submitted_at = submitted_at - interval '20 min' WHERE trigger = 'node_lost'"
        )
        await world.look()
        assert await triggers(world) == ["clock", "node_lost", "node_lost"]
