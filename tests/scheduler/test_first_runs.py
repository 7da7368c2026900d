"""Whom PowerFlow has measured, live: every job at every new size, or the first gang of a kind."""

from __future__ import annotations

import pytest

from services.contracts.identity import Role
from tests.scheduler.test_api import client
from tests.scheduler.test_device_controls import active_round
from tests.scheduler.test_measuring import LIMITS, settable, started, works
from tests.scheduler.world import World


async def powerflow(world: World, profiling: str) -> None:
    """Put the policy in force on a node of two GPUs."""
    await world.scheduler.turn()
    await settable(world, "n1")
    parameters = {"profiling": profiling, "control": "power_limit", "migration": False}
    async with client(world, Role.OPERATOR) as api:
        answer = await api.put("/v1/policies/active", json={"name": "powerflow", "parameters": parameters})
    assert answer.status_code == 200, answer.text


async def measured(world: World, gang: str, gpus: int) -> None:
    """Have the measurement of a gang go to its end."""
    for _ in LIMITS:
        await works(world, gang, {"n1": gpus})
        await world.scheduler.turn()
    assert (await measurements(world))[-1] == (gang.split(".")[0], gpus, "done")


async def measurements(world: World) -> list[tuple[str, int, str]]:
    rows = await world.fetch("SELECT job_id, gpus, state FROM setting_measurements ORDER BY began_at")
    return [(row["job_id"], row["gpus"], row["state"]) for row in rows]


async def comes_back(world: World, job: str, gpus: int) -> str:
    """Lose the node with the job's gang on it, and start the job again at a size."""
    await world.lease("n1", -60)
    await world.scheduler.turn()
    assert await world.state(job) == "queued"
    await world.fetch(
        "UPDATE jobs SET spec = jsonb_set(spec, '{gpus}', jsonb_build_object('min', $2::int, 'max', $2::int)) "
        "WHERE id = $1 RETURNING 1",
        job,
        gpus,
    )
    await world.fetch("UPDATE nodes SET state = 'up', lease_until = now() + interval '60 s' RETURNING 1")
    await active_round(world)
    gang = await world.allocation(job)
    await world.report(gang, "running")
    await world.scheduler.turn()
    return gang


async def test_every_job_is_measured_at_every_new_size(world: World) -> None:
    await powerflow(world, "each_job")
    job, gang = await started(world, 1)
    await measured(world, gang, 1)
    other, second = await started(world, 1)
    await measured(world, second, 1)
    await world.exits(other)

    wider = await comes_back(world, job, 2)
    await measured(world, wider, 2)
    await comes_back(world, job, 1)
    assert [each[:2] for each in await measurements(world)] == [(job, 1), (other, 1), (job, 2)]


async def test_of_an_unknown_kind_the_first_gang_is_measured(world: World) -> None:
    await powerflow(world, "unknown")
    job, gang = await started(world, 1)
    await measured(world, gang, 1)
    other, _ = await started(world, 1)
    assert [each[0] for each in await measurements(world)] == [job]
    await world.exits(other)

    stranger, _ = await started(world, 1, kind="bert")
    assert [each[0] for each in await measurements(world)] == [job, stranger]


@pytest.mark.parametrize("profiling", ["each_job", "unknown"])
async def test_a_measurement_that_a_lost_node_cut_short_is_made_again(world: World, profiling: str) -> None:
    await powerflow(world, profiling)
    job, gang = await started(world, 2)
    await works(world, gang, {"n1": 2}, marks=10)
    assert await measurements(world) == [(job, 2, "running")]

    again = await comes_back(world, job, 2)
    assert await measurements(world) == [(job, 2, "cut"), (job, 2, "running")]
    await measured(world, again, 2)
