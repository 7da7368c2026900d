"""Batches of live jobs: chosen with the user's consent, stored with the gang, and commanded as stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.contracts.commands import StartGang
from services.core.cycle.snapshot import Trigger
from services.core.domain.controls import ControlKind
from services.scheduler.learning.learned import learn
from services.scheduler.planning.snapshot import load
from services.scheduler.repository.profiles import PointRow
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database

pytestmark = pytest.mark.usefixtures("the_lab")

PERMITTED: dict[str, Any] = {
    "batch": {"min": 64, "max": 4_096},
    "work": {"total": 1e6, "unit": "samples"},
    "family": "vision",
}


@pytest.fixture
async def world(postgres_url: str, redis_url: str) -> AsyncIterator[World]:
    async with a_world(fresh_database(postgres_url), redis_url, policy="pollux") as made:
        yield made


async def noise(world: World, job: str, noise_scale: float) -> None:
    query = "INSERT INTO job_progress (job_id, done, noise_scale) VALUES ($1, 1, $2) RETURNING 1"
    await world.fetch(query, job, noise_scale)


async def batch_of(world: World, job: str) -> int | None:
    (row,) = await world.fetch("SELECT batch_size FROM allocations WHERE id = $1", await world.allocation(job))
    return row["batch_size"]


async def start_of(world: World, job: str) -> StartGang:
    gang = await world.allocation(job)
    for _, command in await world.outbox():
        if isinstance(command, StartGang) and command.allocation_id == gang:
            return command
    raise AssertionError(f"no start of {gang}")


async def test_the_batch_is_stored_with_the_gang_and_commanded(world: World) -> None:
    await world.node("n1", 4)
    permits, keeps = await world.job(2, **PERMITTED), await world.job(2, global_batch=256)
    await noise(world, permits, 1e6)
    await world.scheduler.turn()

    chosen = await batch_of(world, permits)
    assert chosen is not None
    assert 64 < chosen <= 4_096, "with much noise a larger batch pays"
    assert chosen % 2 == 0
    start = await start_of(world, permits)
    assert (start.batch_size, start.base_batch, start.spec.batch) == (chosen, 64, None)
    (event,) = await world.fetch("SELECT data FROM job_events WHERE job_id = $1 AND type = 'job.starting'", permits)
    assert event["data"]["batch_size"] == chosen
    assert await batch_of(world, keeps) is None
    assert (await start_of(world, keeps)).batch_size is None


async def test_a_policy_that_does_not_tune_gives_the_users_own(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy="fifo") as world:
        await world.node("n1", 4)
        first, other = await world.job(1, **PERMITTED), await world.job(1, **PERMITTED, global_batch=128)
        await world.scheduler.turn()

        assert [await batch_of(world, job) for job in (first, other)] == [64, 128]


async def test_without_nodes_such_a_job_waits_like_any_other(world: World) -> None:
    job = await world.job(1, **PERMITTED)
    await world.scheduler.turn()
    assert await world.state(job) == "queued"
    await world.node("n1", 1)
    await world.scheduler.turn()
    assert await batch_of(world, job) is not None


async def test_a_wider_gang_gets_another_batch(world: World) -> None:
    await world.node("n1", 1)
    job = await world.running(1, maximum=4, **PERMITTED)
    await noise(world, job, 1e4)
    narrow = await batch_of(world, job)
    await world.ask(job, "hold")
    await world.exits(job, ended_by="stop")
    await world.node("n2", 4)
    await world.fetch("UPDATE nodes SET draining = true WHERE id = 'n1' RETURNING 1")
    await world.fetch("UPDATE scheduler_state SET last_active_at = NULL RETURNING 1")  # the next round is active
    await world.fetch("UPDATE jobs SET state = 'queued', hold_requested = false WHERE id = $1 RETURNING 1", job)
    await world.scheduler.turn()

    wide = await batch_of(world, job)
    assert narrow is not None
    assert wide is not None
    assert (await start_of(world, job)).world_size == 4
    assert wide > narrow
    assert (await start_of(world, job)).batch_size == wide


async def test_what_others_of_the_kind_reported_counts_for_one_that_has_not(world: World) -> None:
    await world.node("n1", 4)
    reports, silent, alone = [await world.job(1, **PERMITTED) for _ in range(3)]
    for job in (reports, silent):
        await world.fetch('UPDATE jobs SET labels = \'{"kind": "resnet"}\' WHERE id = $1 RETURNING 1', job)
    await noise(world, reports, 1e6)
    await world.scheduler.prepare()
    outlooks = await world.scheduler._carbon.outlooks([], 0)
    snapshot = (await load(world.database, Trigger.PASSIVE, outlooks, world.settings)).snapshot
    row = {job: int(snapshot.jobs.goodput_curve[snapshot.jobs.index[job]]) for job in (reports, silent, alone)}

    assert row[reports] == row[silent] != row[alone]
    assert snapshot.goodput_batches[row[silent], 0, 0] > snapshot.goodput_batches[row[alone], 0, 0]


def test_measured_steps_of_tuned_gangs_are_steps_of_their_batch() -> None:
    """A step takes 20 ms and 1 ms per sample of a GPU; the job reports seconds per sample."""

    def point(gpus: int, batch: int, limit_w: float) -> PointRow:
        step_s = 0.020 + 0.001 * batch / gpus
        return PointRow(gpus, 1, batch / gpus, limit_w, step_s / batch, 250.0, "vision", base_batch=64)

    points = [point(gpus, batch, 400.0) for gpus, batch in ((1, 64), (2, 256), (4, 1_024), (4, 256), (1, 128))]
    found = learn(points, "A100", ControlKind.POWER_LIMIT, 8).by_batch
    assert found is not None
    alone = dict(zip(found["batch"], found["step_s"][found["gpus"].index(1)], strict=True))
    assert alone[512.0] / alone[64.0] == pytest.approx(0.532 / 0.084, rel=0.15)
    assert learn([row._replace(base_batch=None) for row in points], "A100", ControlKind.POWER_LIMIT, 8).by_batch is None
