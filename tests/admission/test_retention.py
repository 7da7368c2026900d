"""What admission forgets, and what it must not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.retention import Kept, forget
from services.db.engine import create_engine
from tests.admission.conftest import admission_on
from tests.admission.installation import SPEC, Admission, an_entry
from tests.support.servers import fresh_database

KEPT = Kept(jobs=90, keys=30, audit=730)


@pytest.fixture
async def own(postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Admission]:
    """Admission on a database of its own."""
    async with admission_on(fresh_database(postgres_url), redis_url, tmp_path) as found:
        await found.add_node("n", "A100", "A100")
        yield found


@pytest.fixture
async def engine(own: Admission) -> AsyncIterator[AsyncEngine]:
    made = create_engine(own.database_url, application_name="test")
    yield made
    await made.dispose()


async def run(own: Admission, query: str, *arguments: Any) -> list[Any]:
    connection = await asyncpg.connect(own.database_url)
    try:
        return await connection.fetch(query, *arguments)
    finally:
        await connection.close()


async def end(own: Admission, job: str, days: float) -> None:
    """Let a job have run, and have ended that many days ago."""
    ago = "now() - make_interval(days => 1) * $2::float8"
    await run(own, f"UPDATE jobs SET state = 'succeeded', ended_at = {ago} WHERE id = $1", job, days)
    await run(
        own,
        "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, ended_at, end_reason) "
        "VALUES ($1 || '.1', $1, 1, 'ended', 1, '[]', 1, now(), 'finished')",
        job,
    )
    await run(own, "INSERT INTO rank_ends (allocation_id, node_id) VALUES ($1 || '.1', 'n')", job)
    await run(own, "INSERT INTO rank_statuses (allocation_id, node_id, state) VALUES ($1 || '.1', 'n', 'exited')", job)
    await run(own, "INSERT INTO job_progress (job_id, done) VALUES ($1, 7)", job)


async def left(own: Admission) -> set[str]:
    return {row["id"] for row in await run(own, "SELECT id FROM jobs")}


async def test_a_job_that_ended_long_ago_leaves_one_small_row(own: Admission, engine: AsyncEngine) -> None:
    spec = {"name": "old", "command": ["true"], "labels": {"user": "ada"}, "work": {"total": 9, "unit": "steps"}}
    old, recent = await own.submit(spec), await own.submit()
    runs = await own.submit()
    await end(own, old, 91)
    await end(own, recent, 89)

    assert await forget(engine, KEPT) == 1
    assert await forget(engine, KEPT) == 0

    assert await left(own) == {recent, runs}
    for table in ("allocations", "job_events", "job_progress"):
        assert not await run(own, f"SELECT FROM {table} WHERE job_id = $1", old)
    for table in ("rank_ends", "rank_statuses"):
        assert not await run(own, f"SELECT FROM {table} WHERE allocation_id = $1", f"{old}.1")
    (kept,) = await run(own, "SELECT id, name, state, user_label, work_unit, work_done FROM past_jobs")
    assert tuple(kept) == (old, "old", "succeeded", "ada", "steps", 7)
    assert (await own.ask("GET", f"/v1/jobs/{old}")).status_code == 404
    assert (await own.ask("GET", f"/v1/jobs/{recent}")).status_code == 200


async def test_what_is_still_needed_stays(own: Admission, engine: AsyncEngine) -> None:
    needed, waits = await own.submit(), await own.submit()
    await run(own, "INSERT INTO job_dependencies VALUES ($1, $2, 'ok')", waits, needed)
    first, second = await own.submit(), await own.submit()
    await run(
        own,
        "INSERT INTO job_arrays (id, tenant_id, name, project, labels, spec, tasks, first_index, last_index, "
        "submitted_at) VALUES ('array_1', 'default', 'sweep', 'default', '{}', '{}', 2, 0, 1, "
        "now() - interval '1 year')",
    )
    await run(own, "UPDATE jobs SET array_id = 'array_1' WHERE id IN ($1, $2)", first, second)
    for job in (needed, first):
        await end(own, job, 400)

    assert await forget(engine, KEPT) == 0

    await end(own, waits, 91)
    await end(own, second, 91)
    assert await forget(engine, KEPT) == 4
    assert await left(own) == set()
    assert not await run(own, "SELECT FROM job_arrays")
    assert not await run(own, "SELECT FROM job_dependencies")
    assert {row["array_name"] for row in await run(own, "SELECT array_name FROM past_jobs")} == {None, "sweep"}


async def test_keys_and_audit_rows_go_when_they_are_old(own: Admission, engine: AsyncEngine) -> None:
    for key in ("old", "new"):
        await own.submit_all(an_entry(key=key))
    await run(own, "UPDATE submissions SET created_at = now() - interval '31 days' WHERE idempotency_key = 'old'")
    await run(
        own,
        "INSERT INTO audit_log (tenant_id, key_id, action, target, at) VALUES ('', '', 'a', '', "
        "now() - interval '731 days'), ('', '', 'b', '', now() - interval '729 days')",
    )
    await forget(engine, KEPT._replace(jobs=0))
    assert [row[0] for row in await run(own, "SELECT idempotency_key FROM submissions")] == ["new"]
    assert [row[0] for row in await run(own, "SELECT action FROM audit_log WHERE target = ''")] == ["b"]


async def test_a_repeated_submission_stays_the_same_when_its_jobs_are_forgotten(
    own: Admission, engine: AsyncEngine
) -> None:
    entries = [an_entry(key="one"), an_entry({"array": "0-1"}, key="array"), an_entry([SPEC, SPEC], key="batch")]
    first = await own.submit_all(*entries)
    for job in [row["id"] for row in await run(own, "SELECT id FROM jobs")]:
        await end(own, job, 91)
    assert await forget(engine, KEPT._replace(keys=0)) == 5

    again = await own.submit_all(*entries)

    assert [(each.status, each.replayed) for each in again] == [(201, True)] * 3
    for before, after in zip(first, again, strict=True):
        assert after.location == before.location
        kept = ("id", "name", "submitted_at")
        was, now = (each.get("jobs", [each]) for each in map(json.loads, (before.body, after.body)))
        assert [[job[name] for name in kept] for job in now] == [[job[name] for name in kept] for job in was]
    assert not await run(own, "SELECT FROM jobs"), "nothing runs a second time"
