"""The model of job lengths: trained by the hour on what has ended, once, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from optimizer_service.repository.lengths import read_history
from services.core.profiles.recurrence import GROUP_VERSION, job_group
from services.db.database import connect
from services.learning.length_table import LengthTable
from tests.optimizer.installation import installed
from tests.support.background import Installation
from tests.support.control_plane import eventually
from tests.support.lengths import past_jobs
from tests.support.servers import fresh_database

QUICK = {"OPTIMIZER_TRAIN_INTERVAL_S": "1", "OPTIMIZER_TRAIN_LOOK_S": "0.2"}


@pytest.fixture
async def connection(postgres_url: str) -> AsyncIterator[Any]:
    made = await connect(fresh_database(postgres_url), application_name="test")
    yield made
    await made.close()


@pytest.fixture(scope="module")
async def optimizer(postgres_url: str, redis_url: str) -> AsyncIterator[Installation]:
    """An installation that trains every second in which jobs have ended; its worker is killed."""
    servers = {"DATABASE_URL": fresh_database(postgres_url), "REDIS_URL": redis_url}
    async with installed(**servers, **QUICK) as installation:
        yield installation


async def models(optimizer: Installation) -> list[Any]:
    async with optimizer.database() as database:
        return await database.fetch("SELECT * FROM length_models ORDER BY trained_at")


async def trainings(optimizer: Installation, state: str) -> list[Any]:
    async with optimizer.database() as database:
        return await database.fetch("SELECT * FROM length_trainings WHERE state = $1 ORDER BY submitted_at", state)


async def test_history_is_what_succeeded_of_training_in_the_order_of_its_ends(
    connection: Any, postgres_url: str
) -> None:
    await past_jobs(connection, 6, 2)
    await past_jobs(connection, 3, 2, state="failed", after=6)
    await past_jobs(connection, 2, 2, state="cancelled", after=9)
    await past_jobs(connection, 2, 2, after=11)
    await connection.execute(
        """UPDATE jobs SET spec = spec || '{"service": {}}' WHERE id > 'job_' || lpad('11', 26, '0')"""
    )
    url = f"{postgres_url.rpartition('/')[0]}/{await connection.fetchval('SELECT current_database()')}"

    history, ended_s = await read_history(url, datetime.now(UTC), 600_000)
    newest, _ = await read_history(url, datetime.now(UTC), 6)  # the two service instances count, but are left out

    groups = [job_group("acme", {"name": "a", "project": "p", "command": ["train", n]})[0] for n in (1, 0)]
    assert history.group.tolist() == groups * 3
    assert history.amount.tolist() == pytest.approx([202.0, 200.0] * 3), "two GPUs, once they ran"
    assert sorted(ended_s.tolist()) == ended_s.tolist()
    assert newest.group.tolist() == groups * 2
    versions = await connection.fetch("SELECT group_version FROM job_predictions WHERE predicted_at IS NULL")
    assert [row["group_version"] for row in versions] == [GROUP_VERSION] * 6


async def test_only_gangs_whose_work_was_kept_count(connection: Any, postgres_url: str) -> None:
    await past_jobs(connection, 1, 1)
    ends = [(30, "preempted"), (500, "node_lost"), (700, "failed"), (900, "out_of_memory")]
    for generation, (seconds, reason) in enumerate(ends, start=2):
        await connection.execute(
            "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, started_at, ended_at, "
            "end_reason) SELECT id || '.' || $1::int, id, $1, 'ended', 1, '[]', 0, now() - make_interval(secs => $2), "
            "now(), $3 FROM jobs",
            *(generation, float(seconds), reason),
        )
    url = f"{postgres_url.rpartition('/')[0]}/{await connection.fetchval('SELECT current_database()')}"

    history, _ = await read_history(url, datetime.now(UTC), 10)

    assert history.amount.tolist() == pytest.approx([200.0 + 30.0])


async def test_a_model_is_trained_when_enough_jobs_have_ended_and_replaced_by_a_better_one(
    optimizer: Installation,
) -> None:
    async with optimizer.database() as database:
        await past_jobs(database, 9, 3)
    await asyncio.sleep(1.0)
    assert await models(optimizer) == [], "nine are not enough"
    async with optimizer.database() as database:
        await past_jobs(database, 11, 3, after=9)

    async def trained(count: int) -> bool:
        return len(await trainings(optimizer, "succeeded")) >= count

    await eventually(lambda: trained(1), within_s=90)
    (first,) = await models(optimizer)
    async with optimizer.database() as database:
        await past_jobs(database, 20, 3, after=20, base_s=900.0)  # the groups have become longer
    await eventually(lambda: trained(2), within_s=90)
    first, second = await models(optimizer)

    table = LengthTable.from_bytes(first["content"])
    assert (first["jobs"], first["groups"], first["group_version"]) == (20, 3, GROUP_VERSION)
    assert sorted(table.quantiles[:, 1].tolist()) == pytest.approx([200.0, 202.0, 204.0])
    assert (first["is_active"], second["is_active"], second["jobs"]) == (False, True, 40)


async def test_a_worker_killed_under_a_training(optimizer: Installation) -> None:
    async with optimizer.database() as database:
        before = len(await models(optimizer))
        await past_jobs(database, 10_000, 5_000, after=1_000)

    async def under_way() -> bool:
        return bool(await trainings(optimizer, "running"))

    await eventually(under_way, within_s=90)
    (training,) = await trainings(optimizer, "running")
    os.kill(optimizer.pid("worker"), signal.SIGKILL)

    async def ended() -> bool:
        return training["id"] in {row["id"] for row in await trainings(optimizer, "succeeded")}

    await eventually(ended, within_s=90)
    made = (await models(optimizer))[before:]
    assert [row["id"] for row in made] == [training["id"]], "trained once, and none beside it"
    (row,) = [row for row in await trainings(optimizer, "succeeded") if row["id"] == training["id"]]
    assert row["attempts"] >= 2, "more where a busy machine lets a lease run out"
    assert sum(row["is_active"] for row in await models(optimizer)) == 1
