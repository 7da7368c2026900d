"""Arrays and dependencies live: who is not started yet, why, and who never is."""

import pytest

from services.contracts.commands import StartGang
from tests.scheduler.world import World


async def _why(world: World, job_id: str) -> tuple[str, str | None, str | None]:
    (row,) = await world.fetch("SELECT state, reason, detail FROM jobs WHERE id = $1", job_id)
    return row["state"], row["reason"], row["detail"]


async def test_no_more_tasks_run_than_the_array_allows(world: World) -> None:
    await world.node("n", gpus=8)
    _, tasks = await world.array(5, limit=2)
    await world.scheduler.turn()
    assert [(await _why(world, task))[:2] for task in tasks] == [
        *[("starting", "in_order")] * 2,
        *[("queued", "array_limit")] * 3,
    ]
    assert (await _why(world, tasks[2]))[2] == "At most 2 tasks of its array may run at once."

    await world.report(await world.allocation(tasks[0]), "running")
    await world.scheduler.turn()
    await world.exits(tasks[0])
    await world.scheduler.turn()

    states = [await world.state(task) for task in tasks]
    assert states == ["succeeded", "starting", "starting", "queued", "queued"]


async def test_a_task_is_told_which_one_it_is_and_its_node_no_field_it_does_not_know(world: World) -> None:
    await world.node("n")
    array_id, _ = await world.array(2, environment={"OWN": "1"})
    await world.scheduler.turn()
    commands = [command for _, command in await world.outbox() if isinstance(command, StartGang)]
    assert [command.spec.environment for command in commands] == [
        {
            "OWN": "1",
            "WATTSHIFT_ARRAY_ID": array_id,
            "WATTSHIFT_ARRAY_INDEX": str(index),
            "WATTSHIFT_ARRAY_COUNT": "2",
            "WATTSHIFT_ARRAY_FIRST": "0",
            "WATTSHIFT_ARRAY_LAST": "1",
        }
        for index in range(2)
    ]
    rows = await world.fetch("SELECT payload -> 'spec' AS spec FROM outbox")
    assert not any({"array", "after"} & set(row["spec"]) for row in rows)


async def test_a_repeated_start_has_the_same_variables(world: World) -> None:
    await world.node("n")
    array_id, tasks = await world.array(1)
    await world.scheduler.turn()
    await world.fetch("DELETE FROM outbox")
    await world.fetch("UPDATE allocations SET started_at = now() - interval '1 minute'")
    await world.scheduler.turn()
    (command,) = [command for _, command in await world.outbox() if isinstance(command, StartGang)]
    assert (command.job_id, command.spec.environment["WATTSHIFT_ARRAY_ID"]) == (tasks[0], array_id)


@pytest.mark.parametrize(
    ("condition", "exit_code", "starts"),
    [("ok", 0, True), ("ok", 1, False), ("any", 0, True), ("any", 1, True), ("not_ok", 0, False), ("not_ok", 1, True)],
)
async def test_a_job_starts_only_when_its_dependency_is_met(
    world: World, condition: str, exit_code: int, starts: bool
) -> None:
    await world.node("n")
    first = await world.running()
    then = await world.job()
    await world.after(then, first, condition)
    await world.scheduler.turn()
    state, reason, detail = await _why(world, then)
    assert (state, reason) == ("queued", "dependency")
    assert first in (detail or "")

    await world.exits(first, exit_code)

    state, reason, detail = await _why(world, then)
    assert (state, reason) == (("starting", "in_order") if starts else ("cancelled", "dependency_failed"))
    assert starts or (first in (detail or "") and (await world.events(then))[-1] == "cancelled")


async def test_a_failed_dependency_cancels_what_waits_through_a_chain_and_lets_the_rest_start(world: World) -> None:
    await world.node("n")
    first = await world.running()
    second, third, fourth = [await world.job() for _ in range(3)]
    _, tasks = await world.array(2)
    await world.after(second, first, "ok")
    await world.after(third, second, "ok")
    await world.after(fourth, third, "not_ok")
    (array_id,) = {row["array_id"] for row in await world.fetch("SELECT array_id FROM jobs WHERE array_id <> ''")}
    await world.after(array_id, second, "ok")
    await world.fetch("UPDATE jobs SET state = 'held' WHERE id = $1", third)
    await world.exits(first, 1)
    assert [await world.state(job_id) for job_id in (second, third, fourth, *tasks)] == [
        *("cancelled", "cancelled", "starting", "cancelled", "cancelled")
    ]


async def test_an_end_that_no_scheduler_looked_at_is_found_by_the_next(world: World) -> None:
    await world.node("n")
    first, second, third = [await world.job() for _ in range(3)]
    await world.after(second, first, "ok")
    await world.after(third, first, "not_ok")
    await world.fetch("UPDATE jobs SET state = 'cancelled', ended_at = now() WHERE id = $1", first)
    await world.scheduler.turn()
    assert [await world.state(job_id) for job_id in (second, third)] == ["cancelled", "starting"]


async def test_a_dependency_on_an_array_waits_for_all_its_tasks(world: World) -> None:
    await world.node("n")
    array_id, tasks = await world.array(2)
    then = await world.job()
    await world.after(then, array_id, "ok")
    await world.scheduler.turn()
    for task in tasks:
        assert await world.state(then) == "queued"
        await world.report(await world.allocation(task), "running")
        await world.scheduler.turn()
        await world.exits(task)
    assert await world.state(then) == "starting"
