"""Submitting: what is accepted, replayed and refused, and that a refusal changes nothing."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.admission.repository.submissions import SubmissionRepository
from services.admission.submissions import Draft, read_submission
from services.contracts.jobs import Job, SubmissionAnswer, SubmittedBatch, SubmittedJob
from services.core.domain.jobs import JobState
from tests.admission.conftest import admission_on
from tests.admission.installation import SPEC, Admission, an_entry


def _code(answer: SubmissionAnswer) -> str:
    return str(json.loads(answer.body)["code"])


def _pointers(answer: SubmissionAnswer) -> list[str]:
    return [error["pointer"] for error in json.loads(answer.body)["errors"]]


async def test_an_accepted_job_is_there_with_its_event(admission: Admission) -> None:
    (answer,) = await admission.submit_all(an_entry({"labels": {"a": "b"}, "project": "vision"}))
    made = SubmittedJob.model_validate_json(answer.body)
    assert (answer.status, answer.location, made.state) == (201, f"/v1/jobs/{made.id}", JobState.QUEUED)
    found = Job.model_validate_json((await admission.ask("GET", f"/v1/jobs/{made.id}")).content)
    assert (found.submitted_at, found.project, found.spec.labels) == (made.submitted_at, "vision", {"a": "b"})
    assert await admission.count("job_events", f"job_id = '{made.id}' AND type = 'job.submitted'") == 1


async def test_a_fault_over_what_one_submission_names_is_not_that_of_the_others(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = admission.app.state.submissions._references
    check = references.check

    async def checked(draft: Draft) -> Any:
        if draft.jobs[0].spec.name == "odd":
            raise LookupError
        return await check(draft)

    monkeypatch.setattr(references, "check", checked)
    odd, sound = await admission.submit_all(an_entry({"name": "odd"}), an_entry({"name": "sound"}))
    assert (odd.status, _code(odd), sound.status) == (500, "internal", 201)


async def test_a_job_may_begin_on_hold(admission: Admission) -> None:
    job_id = await admission.submit({"hold": True})
    found = Job.model_validate_json((await admission.ask("GET", f"/v1/jobs/{job_id}")).content)
    assert (found.state, found.reason) == (JobState.HELD, "held")


async def test_a_batch_is_answered_in_its_order(admission: Admission) -> None:
    (answer,) = await admission.submit_all(an_entry([SPEC | {"name": f"job-{i}"} for i in range(20)]))
    made = SubmittedBatch.model_validate_json(answer.body).jobs
    assert [job.name for job in made] == [f"job-{i}" for i in range(20)]
    assert sorted(job.id for job in made) == [job.id for job in made]


async def test_a_batch_is_all_or_none(admission: Admission) -> None:
    before = await admission.count("jobs")
    (answer,) = await admission.submit_all(an_entry([SPEC, SPEC | {"gpus": {"min": 0}}, SPEC]))
    assert (answer.status, _pointers(answer)) == (422, ["/jobs/1/gpus/min"])
    assert await admission.count("jobs") == before


async def test_the_same_key_and_body_are_answered_the_same(admission: Admission) -> None:
    (first,) = await admission.submit_all(an_entry({"hold": True}, key="same"))
    await admission.ask("POST", f"{first.location}/release")
    (again,) = await admission.submit_all(an_entry({"hold": True}, key="same"))
    assert not first.replayed
    assert again == first.model_copy(update={"replayed": True})
    assert await admission.count("jobs", f"id = '{json.loads(first.body)['id']}'") == 1


async def test_a_batch_is_replayed_whole(admission: Admission) -> None:
    entry = an_entry([SPEC | {"name": f"again-{i}"} for i in range(30)], key="batch")
    (first,), (again,) = await admission.submit_all(entry), await admission.submit_all(entry)
    assert again == first.model_copy(update={"replayed": True})


async def test_a_tenants_jobs_and_arrays_are_numbered_without_gaps_whoever_submits(
    admission: Admission, database_url: str
) -> None:
    mine, other = (
        await admission.make_tenant("numbered", max_active_jobs=400),
        await admission.make_tenant("others-too"),
    )
    second = SubmissionRepository(database_url)  # another process, which locks the same tenants
    entries = [
        entry
        for at in range(30)
        for entry in (
            an_entry([SPEC, SPEC | {"array": "0-2"}, SPEC], tenant=mine, key=f"batch-{at}"),
            an_entry({"gpus": {"min": 0}}, tenant=mine),
            an_entry({"array": "0-400"}, tenant=mine),  # over its quota: takes no number
            an_entry(tenant=other),
        )
    ]

    async def beside() -> list[SubmissionAnswer]:
        drafts = [draft for _ in range(20) if isinstance(draft := read_submission(an_entry(tenant=mine)), Draft)]
        return [answer for draft in drafts for answer in await second.commit([draft])]

    try:
        *groups, apart = await asyncio.gather(*(admission.submit_all(entry) for entry in entries), beside())
    finally:
        await second.close()
    answers = [answer for group in groups for answer in group]
    made = [SubmittedBatch.model_validate_json(each.body).jobs for each in answers[::4]]
    singles = [SubmittedJob.model_validate_json(each.body) for each in apart]

    jobs = [job for batch in made for job in batch] + singles
    assert sorted(job.number or 0 for job in jobs) == list(range(1, 111))
    assert all([job.number for job in batch] == [*range(low := batch[0].number or 0, low + 3)] for batch in made)
    assert sorted(json.loads(each.body)["number"] for each in answers[3::4]) == list(range(1, 31))
    stored = "SELECT id, number FROM jobs WHERE tenant_id = $1 AND array_id IS NULL UNION SELECT id, number FROM job_arrays WHERE tenant_id = $1"  # noqa: E501
    rows = await admission.database.fetch(stored, mine)
    assert {row["id"]: row["number"] for row in rows} == {job.id: job.number for job in jobs}
    (again,) = await admission.submit_all(entries[0])
    assert again == answers[0].model_copy(update={"replayed": True})


async def test_a_job_and_an_array_are_found_by_number_and_tasks_have_that_of_their_array(admission: Admission) -> None:
    tenant = await admission.make_tenant("found-by-number")
    job, array = await admission.submit(tenant=tenant), await admission.submit({"array": "4-5"}, tenant=tenant)

    async def found(path: str) -> list[Any]:
        return (await admission.ask("GET", path, tenant=tenant)).json()["items"]

    assert [each["id"] for each in await found("/v1/jobs?number=1")] == [job]
    assert [each["id"] for each in await found("/v1/arrays?number=2")] == [array]
    assert await found("/v1/jobs?number=2") == await found("/v1/arrays?number=1") == []
    assert [(each["number"], each["array_index"]) for each in await found(f"/v1/jobs?array={array}")] == [
        (2, 5),
        (2, 4),
    ]


@pytest.mark.parametrize("other", [{"name": "other"}, [SPEC]])
async def test_a_key_stands_for_one_body(admission: Admission, other: Any) -> None:
    key = f"one-body-{type(other).__name__}"
    await admission.submit_all(an_entry(key=key))
    before = await admission.count("jobs")
    (answer,) = await admission.submit_all(an_entry(other, key=key))
    assert (answer.status, _code(answer), _pointers(answer)) == (422, "idempotency_key_reused", ["#Idempotency-Key"])
    assert await admission.count("jobs") == before


async def test_keys_of_tenants_are_their_own(admission: Admission) -> None:
    other = await admission.make_tenant("other-keys")
    (mine,) = await admission.submit_all(an_entry(key="ours"))
    (theirs,) = await admission.submit_all(an_entry(key="ours", tenant=other))
    assert mine.location != theirs.location
    assert not theirs.replayed


async def test_duplicates_in_one_commit_become_one_job(admission: Admission) -> None:
    entries = [an_entry(key="twins") for _ in range(50)] + [an_entry({"name": "other"}, key="twins")]
    answers = await admission.submit_all(*entries)
    assert {answer.location for answer in answers[:50]} == {answers[0].location}
    assert [answer.replayed for answer in answers[:50]] == [False] + [True] * 49
    assert answers[50].status == 422


async def test_concurrent_duplicates_become_one_job(admission: Admission) -> None:
    found = await asyncio.gather(*(admission.submit_all(an_entry(key="race")) for _ in range(200)))
    answers = [answer for group in found for answer in group]
    assert {answer.status for answer in answers} == {201}
    assert len({answer.location for answer in answers}) == 1
    assert sum(not answer.replayed for answer in answers) == 1


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ("{", 400, "body_not_json", ""),
        ("", 400, "body_not_json", ""),
        ("[" * 100_000, 400, "body_not_json", ""),
        ('{"name": "a", "command": ["\\ud800"]}', 400, "body_not_json", ""),
        ("[]", 422, "invalid_request", ""),
        ("null", 422, "invalid_request", ""),
        ('{"name": "a"}', 422, "invalid_request", ""),
        ('{"name": "a b", "command": ["x"]}', 422, "invalid_request", "/name"),
        ('{"name": "a", "command": ["x"], "nmae": 1}', 422, "invalid_request", "/nmae"),
        ('{"name": "a", "command": ["\\u0000"]}', 422, "invalid_request", "/command/0"),
        ('{"name": "a", "command": ["x"], "priority": 1e999}', 422, "invalid_request", "/priority"),
        ('{"name": "a", "command": ["x"], "gpus": {"min": "1"}}', 422, "invalid_request", "/gpus/min"),
        ('{"name": "a", "command": ["x"], "gpus": {"min": 4, "max": 2}}', 422, "invalid_request", "/gpus"),
        ('{"name": "a", "command": ["x"], "labels": {"a/b": 1}}', 422, "invalid_request", "/labels/a~1b"),
        ('{"name": "a", "command": ["x"], "deadline": 0}', 422, "invalid_request", "/deadline"),
        ('{"name": "a", "command": ["x"], "deadline": "1e9"}', 422, "invalid_request", "/deadline"),
        ('{"name": "a", "command": ["x"], "deadline": "0001-01-01T00:00:00+23:59"}', 422, None, "/deadline"),
        (
            '{"name": "a", "command": ["x"], "progress": {"source": "log", "pattern": "a{99999999999}"}}',
            *(422, "invalid_request", "/progress"),
        ),
        (
            '{"name": "a", "command": ["x"], "progress": {"source": "log", "pattern": "\\u0000(?P<done>.)"}}',
            *(422, "invalid_request", "/progress/pattern"),
        ),
    ],
)
async def test_a_bad_body_gets_one_problem(
    admission: Admission, body: str, status: int, code: str | None, pointer: str
) -> None:
    before = await admission.count("jobs")
    good, bad, also_good = await admission.submit_all(an_entry(), an_entry(body), an_entry())
    assert (bad.status, _pointers(bad)[0]) == (status, pointer)
    assert code in (None, _code(bad))
    assert (good.status, also_good.status) == (201, 201)
    assert await admission.count("jobs") == before + 2


async def test_a_gang_beyond_every_node_is_impossible(admission: Admission) -> None:
    assert await admission.submit({"gpus": {"min": 999}})  # no node is known yet: nothing can be said
    await admission.add_node("node-1", "A100", "A100")
    await admission.add_node("node-2", "H100", "H100", "H100", memory_gib=80)
    try:
        cases = [
            ({"gpus": {"min": 4}}, "/gpus/min"),
            ({"gpus": {"min": 3, "model": "A100"}}, "/gpus/min"),
            ({"gpus": {"min": 3, "memory_gib": 80}}, None),
            ({"gpus": {"memory_gib": 81}}, "/gpus/memory_gib"),
            ({"gpus": {"model": "V100"}}, "/gpus/model"),
            ([SPEC, SPEC | {"gpus": {"min": 9}}], "/jobs/1/gpus/min"),
        ]
        answers = await admission.submit_all(*(an_entry(spec) for spec, _ in cases))
        for answer, (_, pointer) in zip(answers, cases, strict=True):
            assert answer.status == (422 if pointer else 201), answer.body
            assert pointer is None or (_code(answer), _pointers(answer)) == ("gang_impossible", [pointer])
        await admission.add_node("node-3", "V100")  # a node counts from the moment it is there
        assert await admission.submit({"gpus": {"model": "V100"}})
    finally:
        await admission.database.execute("DELETE FROM nodes")


async def test_a_tenant_that_is_gone_may_not_submit(admission: Admission) -> None:
    (answer,) = await admission.submit_all(an_entry(tenant="nobody"))
    assert (answer.status, _code(answer)) == (403, "forbidden")


async def test_only_pools_start_service_instances(admission: Admission) -> None:
    terms = {"service": {"zone": "US-CAL-CISO", "node_labels": {"pool": "llm"}}}
    one, many, allowed = await admission.submit_all(
        an_entry(terms), an_entry([SPEC, SPEC | terms]), an_entry(terms, service=True)
    )

    assert (one.status, _code(one), _pointers(one)) == (422, "invalid_request", ["/service"])
    assert "only pools can start service instances" in json.loads(one.body)["detail"]
    assert (many.status, _pointers(many)) == (422, ["/jobs/1/service"])
    assert allowed.status == 201
    assert await admission.count("jobs", "spec ? 'service'") == 1
    found = Job.model_validate_json((await admission.ask("GET", str(allowed.location))).content)
    assert found.spec.model_dump(exclude_none=True)["service"] == terms["service"]


@pytest.mark.parametrize(
    "spec", [{"service": {}, "gpus": {"min": 1, "max": 2}}, {"service": {"zone": "not a zone"}}, {"service": {"at": 1}}]
)
async def test_a_service_instance_has_one_size_and_known_terms(admission: Admission, spec: dict[str, Any]) -> None:
    before = await admission.count("jobs")
    (answer,) = await admission.submit_all(an_entry(spec, service=True))
    assert (answer.status, _code(answer)) == (422, "invalid_request")
    assert await admission.count("jobs") == before


async def test_nothing_is_accepted_while_the_disk_of_the_database_is_nearly_full(
    database_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_blocks=1_000, f_bavail=1_000, f_frsize=1 << 20, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    async with admission_on(database_url, redis_url, tmp_path, database_dir=tmp_path) as admission:
        await admission.add_node("n", "A100")
        await admission.submit()
        for free, status in ((99, 503), (110, 503), (125, 201)):
            disk.f_bavail = free
            (answer,) = await admission.submit_all(an_entry())
            assert answer.status == status, "once full, there has to be clearly room again"
        disk.f_bavail = 99
        (answer,) = await admission.submit_all(an_entry())
        assert "The database's disk is nearly full: 99 MiB are free, and 100 MiB are to stay free." in answer.body
        ready = await admission.http.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "degraded"), "which `wattshift status` shows"
