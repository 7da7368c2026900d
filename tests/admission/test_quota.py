"""Quotas are exact across processes, and need no counting while they are far from being reached."""

import asyncio
import json
from pathlib import Path

from services.admission.repository.accounts import RECOUNT_EVERY_S
from services.admission.repository.submissions import SubmissionRepository
from services.admission.submissions import Draft, read_submission
from services.contracts.jobs import SubmissionAnswer, SubmissionEntry
from tests.admission.conftest import admission_on
from tests.admission.installation import SPEC, Admission, an_entry


def _draft(entry: SubmissionEntry) -> Draft:
    draft = read_submission(entry)
    assert isinstance(draft, Draft)
    return draft


def _code(answer: SubmissionAnswer) -> str:
    return str(json.loads(answer.body)["code"])


async def test_a_tenant_gets_exactly_its_quota(admission: Admission) -> None:
    tenant = await admission.make_tenant("exact", max_active_jobs=10)
    found = await asyncio.gather(*(admission.submit_all(*[an_entry(tenant=tenant)] * 5) for _ in range(40)))
    answers = [answer for group in found for answer in group]
    assert sorted({answer.status for answer in answers}) == [201, 403]
    assert {_code(answer) for answer in answers if answer.status == 403} == {"quota_exceeded"}
    assert await admission.count("jobs", f"tenant_id = '{tenant}'") == 10


async def test_two_processes_share_one_quota(admission: Admission, database_url: str) -> None:
    tenant = await admission.make_tenant("shared", max_active_jobs=100)
    repositories = [SubmissionRepository(database_url) for _ in range(3)]

    async def submit_many(repository: SubmissionRepository) -> None:
        for _ in range(30):
            await repository.commit([_draft(an_entry(tenant=tenant)) for _ in range(3)])

    try:
        await asyncio.gather(*(submit_many(repository) for repository in repositories))
    finally:
        for repository in repositories:
            await repository.close()
    assert await admission.count("jobs", f"tenant_id = '{tenant}'") == 100


async def test_a_batch_needs_room_for_all_of_it(admission: Admission) -> None:
    tenant = await admission.make_tenant("batches", max_active_jobs=5)
    large, small = await admission.submit_all(an_entry([SPEC] * 6, tenant=tenant), an_entry([SPEC] * 5, tenant=tenant))
    assert (large.status, small.status) == (403, 201)


async def test_room_comes_back_when_jobs_end(admission: Admission) -> None:
    tenant = await admission.make_tenant("returns", max_active_jobs=1)
    job_id = await admission.submit(tenant=tenant)
    assert [answer.status for answer in await admission.submit_all(an_entry(tenant=tenant))] == [403]
    assert (await admission.ask("POST", f"/v1/jobs/{job_id}/cancel", tenant=tenant)).status_code == 200
    answers: list[SubmissionAnswer] = []
    async with asyncio.timeout(RECOUNT_EVERY_S + 5):
        while not any(answer.status == 201 for answer in answers):
            answers = await admission.submit_all(an_entry(tenant=tenant))


async def test_a_replay_needs_no_room(admission: Admission) -> None:
    tenant = await admission.make_tenant("replays", max_active_jobs=1)
    first, again = await admission.submit_all(*[an_entry(tenant=tenant, key="once")] * 2)
    assert (first.status, again.status, again.replayed) == (201, 201, True)


async def test_a_limit_that_changes_holds_from_the_next_commit_on(admission: Admission) -> None:
    tenant = await admission.make_tenant("changes", max_active_jobs=1)
    await admission.submit(tenant=tenant)
    change = {"limits": {"max_active_jobs": 2}}
    assert (await admission.ask("PATCH", f"/v1/tenants/{tenant}", role="admin", json=change)).status_code == 200
    assert await admission.submit(tenant=tenant)
    assert (await admission.submit_all(an_entry(tenant=tenant)))[0].status == 403


async def test_a_quota_is_known_after_a_restart(admission: Admission, redis_url: str, tmp_path: Path) -> None:
    tenant = await admission.make_tenant("restarts", max_active_jobs=3)
    await admission.submit_all(*[an_entry(tenant=tenant)] * 2)
    async with admission_on(admission.database_url, redis_url, tmp_path) as restarted:
        answers = await restarted.submit_all(*[an_entry(tenant=tenant)] * 2)
    assert [answer.status for answer in answers] == [201, 403]
