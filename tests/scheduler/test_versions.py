"""A plan commits only on the version of the state that it was made from: also one that starts and stops nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.contracts.identity import Identity, Role
from services.core.cycle.plan import Plan
from services.core.cycle.snapshot import Trigger
from services.scheduler.planning.apply import Applied, Decided, StalePlanError, apply
from services.scheduler.planning.snapshot import load
from services.scheduler.service import SchedulerService
from tests.scheduler.world import World

PORTS = (29_500, 30_000)
OPERATOR = Identity(tenant_id="default", key_id="key", role=Role.OPERATOR)


async def remembers(world: World, memory: dict[str, Any], trigger: Trigger = Trigger.PASSIVE) -> Decided:
    """Return a plan of the present version that changes nothing but the policy's memory."""
    await world.scheduler.prepare()
    outlooks = await world.scheduler._carbon.outlooks([], 0)
    snapshot = (await load(world.database, trigger, outlooks, world.settings)).snapshot
    return Decided(snapshot, "fifo", Plan(snapshot_version=snapshot.version, actions=()), memory, 0.0)


async def state(world: World) -> tuple[Any, ...]:
    (row,) = await world.fetch("SELECT version, memory, last_active_at IS NULL FROM scheduler_state")
    return tuple(row)


async def test_of_two_memories_from_one_version_the_second_is_stale(world: World) -> None:
    first, second = await remembers(world, {"queue": 1}), await remembers(world, {"queue": 2}, Trigger.ACTIVE)

    applied = await apply(world.database, first, PORTS)
    with pytest.raises(StalePlanError):
        await apply(world.database, second, PORTS)

    assert await state(world) == (1, {"queue": 1}, True), "nothing of the second is written, nor its active round"
    assert (applied.round, applied.changes) == (1, 0)
    assert await world.fetch("SELECT round FROM plans") == []


async def test_of_two_memories_that_come_together_one_is_written(world: World) -> None:
    plans = [await remembers(world, {"queue": number}) for number in range(2)]

    outcomes = await asyncio.gather(*(apply(world.database, each, PORTS) for each in plans), return_exceptions=True)

    assert sorted(type(each).__name__ for each in outcomes) == ["Applied", "StalePlanError"]
    written = next(number for number, each in enumerate(outcomes) if isinstance(each, Applied))
    assert (await state(world))[:2] == (1, {"queue": written})


async def test_a_plan_of_the_policy_before_leaves_no_memory_to_the_next(world: World) -> None:
    late = await remembers(world, {"queue": 1})
    await SchedulerService(world.database).set_policy("las", {}, OPERATOR)

    with pytest.raises(StalePlanError):
        await apply(world.database, late, PORTS)

    assert (await state(world))[:2] == (1, {})


async def test_an_operators_wish_for_a_node_makes_the_plan_of_before_stale(world: World) -> None:
    await world.node("n1")
    late = await remembers(world, {"queue": 1})
    await SchedulerService(world.database).pin("n1", True, OPERATOR)

    with pytest.raises(StalePlanError):
        await apply(world.database, late, PORTS)

    assert (await state(world))[:2] == (1, {})


async def test_the_same_policy_with_other_parameters_goes_on_from_what_it_remembers(world: World) -> None:
    await apply(world.database, await remembers(world, {"queue": 1}), PORTS)
    service = SchedulerService(world.database)

    await service.set_policy("fifo", {"backfill": False}, OPERATOR)
    kept = (await state(world))[1]
    await service.set_policy("las", {}, OPERATOR)

    assert kept == {"queue": 1}
    assert (await state(world))[1] == {}


async def test_an_active_round_is_recorded_though_it_does_nothing(world: World) -> None:
    await apply(world.database, await remembers(world, {}, Trigger.ACTIVE), PORTS)

    assert [tuple(row) for row in await world.fetch("SELECT round, trigger, starts FROM plans")] == [(1, "active", 0)]
    assert (await state(world))[2] is False
