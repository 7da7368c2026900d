"""Arrays and dependencies while schedulers are killed: limits hold, order holds, and nothing is forgotten."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.admission.repository.submissions import SubmissionRepository
from services.admission.submissions import Draft, read_submission, resolve
from services.contracts.jobs import SubmissionEntry
from tests.integration.plant import Plant, a_plant, kill
from tests.support.control_plane import eventually

TASKS, LIMIT = 40, 4

MOST_AT_ONCE = """
SELECT max(running) AS most FROM (
    SELECT sum(change) OVER (ORDER BY at, change) AS running FROM (
        SELECT a.started_at AS at, 1 AS change FROM allocations a JOIN jobs j ON j.id = a.job_id WHERE array_id = $1
        UNION ALL
        SELECT a.ended_at, -1 FROM allocations a JOIN jobs j ON j.id = a.job_id WHERE array_id = $1) changes) sums
"""


@pytest.fixture
async def plant(postgres_url: str, redis_url: str) -> AsyncIterator[Plant]:
    async with a_plant(postgres_url, redis_url) as made:
        await made.start("telemetry")
        await made.ask("INSERT INTO tenants (id, limits) VALUES ('t', '{\"max_active_jobs\": 1000}') RETURNING id")
        yield made


async def submit(plant: Plant, name: str, **spec: Any) -> str:
    """Submit as admission does; ids name dependencies."""
    body = json.dumps({"name": name, "command": ["true"], "processes": "per_node", **spec})
    entry = SubmissionEntry(tenant_id="t", key_id="k", idempotency_key=None, batch=False, body=body)
    draft = read_submission(entry)
    assert isinstance(draft, Draft)
    words = [word for _, word in draft.jobs[0].spec.after.references()] if draft.jobs[0].spec.after else []
    resolve(draft, {str(word): [str(word)] for word in words})
    repository = SubmissionRepository(plant.database_url)
    (answer,) = await repository.commit([draft])
    await repository.close()
    assert answer.status == 201, answer.body
    return str(json.loads(answer.body)["id"])


async def test_an_array_and_what_depends_on_it_survive_the_death_of_schedulers(plant: Plant) -> None:
    scheduler = await plant.start("scheduler")
    array = await submit(plant, "sweep", array=f"0-{TASKS - 1}%{LIMIT}")
    then = await submit(plant, "evaluate", after={"ok": array})
    never = await submit(plant, "clean-up", after={"not_ok": then})
    after_never = await submit(plant, "report", after={"not_ok": never})

    async def succeeded(count: int) -> bool:
        return (await plant.states()).get("succeeded", 0) >= count

    async with plant.agents(8):
        for count in (5, 20, TASKS):
            await eventually(lambda count=count: succeeded(count), within_s=120)
            kill(scheduler)
            scheduler = await plant.start("scheduler")
        await eventually(lambda: succeeded(TASKS + 2), within_s=60)

    rows = await plant.ask("SELECT id, state, reason, detail, started_at, ended_at FROM jobs WHERE array_id IS NULL")
    jobs = {row["id"]: row for row in rows}
    (last_task,) = await plant.ask("SELECT max(ended_at) AS at FROM jobs WHERE array_id = $1", array)
    assert (await plant.ask(MOST_AT_ONCE, array))[0]["most"] == LIMIT
    assert jobs[then]["started_at"] >= last_task["at"]
    assert (jobs[never]["state"], jobs[never]["reason"]) == ("cancelled", "dependency_failed")
    assert then in jobs[never]["detail"]
    assert jobs[after_never]["state"] == "succeeded"
    assert plant.twins.seen == []
    assert await plant.broken_rules() == []
