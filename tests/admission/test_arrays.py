"""Arrays: one submission of many tasks, read, cancelled, held and released as one; and dependencies by name."""

import json
from typing import Any

import pytest
from sqlalchemy import event

from services.admission.jobs import Arrays
from services.admission.submissions import MOST_TASK_BYTES
from services.contracts.jobs import Job, JobArray, SubmissionAnswer, SubmittedJob
from services.core.domain.jobs import JobState
from services.db.engine import create_engine
from tests.admission.installation import SPEC, Admission, an_entry


async def _submit(admission: Admission, array: str, tenant: str = "default", **spec: Any) -> str:
    return await admission.submit({"array": array, **spec}, tenant=tenant)


async def _get(admission: Admission, array_id: str, **options: Any) -> JobArray:
    answer = await admission.ask("GET", f"/v1/arrays/{array_id}", **options)
    assert answer.status_code == 200, answer.text
    return JobArray.model_validate_json(answer.content)


async def _tasks(admission: Admission, array_id: str, **options: Any) -> list[Job]:
    answer = await admission.ask("GET", f"/v1/jobs?array={array_id}&limit=500", **options)
    return [Job.model_validate(item) for item in answer.json()["items"]][::-1]


def _errors(answer: SubmissionAnswer) -> list[tuple[str, str]]:
    assert answer.status == 422, answer.body
    return [(error["pointer"], error["detail"]) for error in json.loads(answer.body)["errors"]]


async def test_one_submission_makes_a_task_for_each_index(admission: Admission) -> None:
    (answer,) = await admission.submit_all(an_entry({"name": "sweep", "array": "1,3,5-9:2%2", "labels": {"a": "b"}}))
    made = SubmittedJob.model_validate_json(answer.body)
    assert (answer.status, answer.location, made.count) == (201, f"/v1/arrays/{made.id}", 5)

    array, tasks = await _get(admission, made.id), await _tasks(admission, made.id)

    assert (array.count, array.first, array.last, array.max_running, array.state) == (5, 1, 9, 2, JobState.QUEUED)
    assert array.tasks.queued == 5
    assert [task.name for task in tasks] == [f"sweep.{index}" for index in (1, 3, 5, 7, 9)]
    assert [task.array_index for task in tasks] == [1, 3, 5, 7, 9]
    assert {(task.array_id, task.spec.name, task.spec.array, task.spec.labels["a"]) for task in tasks} == {
        (made.id, "sweep", None, "b")
    }
    assert await admission.count("job_events", f"job_id = '{tasks[2].id}' AND type = 'job.submitted'") == 1


async def test_what_a_job_waits_for_is_named_by_number_unless_that_is_a_name(admission: Admission) -> None:
    tenant = await admission.make_tenant("numbers-after")
    first = await admission.submit(tenant=tenant)
    array = await _submit(admission, "0-2", tenant)
    job = await admission.submit({"after": {"ok": ["#1", "2"], "any": "#2.1"}}, tenant=tenant)
    named = await admission.submit({"name": "1"}, tenant=tenant)
    other = await admission.submit({"after": {"ok": "1", "any": "#1"}}, tenant=tenant)

    async def after(job_id: str) -> dict[str, Any]:
        return (await admission.ask("GET", f"/v1/jobs/{job_id}", tenant=tenant)).json()["spec"]["after"]

    tasks = await _tasks(admission, array, tenant=tenant)
    assert await after(job) == {"ok": [first, array], "any": [tasks[1].id], "not_ok": None}
    assert await after(other) == {"ok": [named], "any": [first], "not_ok": None}
    for word in ("#9", "9", "#2.7", "#1.0"):
        (answer,) = await admission.submit_all(an_entry({"after": {"ok": word}}, tenant=tenant))
        assert _errors(answer) == [
            ("/after/ok", f"there is no job {word!r}: none has that name or number, or an id that begins with it")
        ]


async def test_ten_thousand_tasks_have_ids_of_their_own(admission: Admission) -> None:
    tenant = await admission.make_tenant("wide")
    answers = await admission.submit_all(
        an_entry([SPEC | {"name": "a", "array": "0-4999"}, SPEC | {"name": "b", "array": "0-4999"}], tenant=tenant)
    )
    assert answers[0].status == 201, answers[0].body
    assert await admission.count("(SELECT DISTINCT id FROM jobs WHERE tenant_id = 'wide')") == 10_000
    ordered = "SELECT bool_and(at = array_index) FROM (SELECT array_index, row_number() OVER (PARTITION BY array_id ORDER BY id) - 1 AS at FROM jobs WHERE tenant_id = 'wide') t"  # noqa: E501
    assert await admission.database.fetchval(ordered)


@pytest.mark.parametrize("batch", [False, True])
async def test_the_tasks_of_a_submission_store_no_more_than_the_longest_script_needs(
    admission: Admission, batch: bool
) -> None:
    def submitted(array: str) -> Any:
        script = {"array": array, "command": ["sh", "-c", "x" * 32_000]}
        return an_entry([SPEC | script, SPEC | script | {"array": "0"}] if batch else SPEC | script, tenant=tenant)

    tenant = await admission.make_tenant(f"heavy-{batch}")
    accepted, refused = await admission.submit_all(submitted("0-99"), submitted("0-9998"))
    assert accepted.status == 201, accepted.body
    ((pointer, said),) = _errors(refused)
    assert pointer == ("/jobs" if batch else "/array")
    assert said.endswith(f"a submission may store {MOST_TASK_BYTES:,} of them")
    assert await admission.count("jobs", f"tenant_id = '{tenant}'") == 100 + batch


async def test_the_same_key_gives_the_same_array(admission: Admission) -> None:
    (first,) = await admission.submit_all(an_entry({"array": "0-3"}, key="array"))
    (again,) = await admission.submit_all(an_entry({"array": "0-3"}, key="array"))
    assert again == first.model_copy(update={"replayed": True})
    assert await admission.count("jobs", f"array_id = '{json.loads(first.body)['id']}'") == 4


@pytest.mark.parametrize(
    ("spec", "pointer", "said"),
    [
        ({"array": "9-3"}, "/array", "empty"),
        ({"array": "1,1"}, "/array", "names an index twice"),
        ({"array": "0-10000"}, "/array", "more than 10,000 tasks"),
        ({"array": "0-3%0"}, "/array", "at least 1"),
        ({"array": "all"}, "/array", "is no array"),
        ({"array": "0-9999", "name": "n" * 60}, "", "name is too long"),
        ({"after": {"ok": "job_00000000000000000000000000"}}, "/after/ok", "there is no job"),
        ({"after": {"any": 0}}, "/after/any", "no job at position 0"),
        ({"name": "alone-itself", "after": {"ok": "alone-itself"}}, "/after/ok", "is the job itself"),
    ],
)
async def test_what_is_wrong_is_named_and_stores_nothing(
    admission: Admission, spec: dict[str, Any], pointer: str, said: str
) -> None:
    before = await admission.count("jobs")
    (answer,) = await admission.submit_all(an_entry(spec))
    found = _errors(answer)
    assert found[0][0] == pointer
    assert said in found[0][1]
    assert await admission.count("jobs") == before


async def test_every_task_counts_for_the_quota(admission: Admission) -> None:
    tenant = await admission.make_tenant("narrow", max_active_jobs=5)
    (answer,) = await admission.submit_all(an_entry({"array": "0-5"}, tenant=tenant))
    assert json.loads(answer.body)["code"] == "quota_exceeded"
    assert await admission.count("job_arrays", "tenant_id = 'narrow'") == 0
    await _submit(admission, "0-4", tenant=tenant)


async def test_cancel_acts_on_all_tasks_and_leaves_those_that_ended(admission: Admission) -> None:
    array_id = await _submit(admission, "0-3")
    tasks = await _tasks(admission, array_id)
    await admission.start(tasks[0].id)
    await admission.start(tasks[1].id)
    await admission.end(tasks[1].id)

    answer = await admission.ask("POST", f"/v1/arrays/{array_id}/cancel")
    array = JobArray.model_validate_json(answer.content)

    assert (array.tasks.running, array.tasks.succeeded, array.tasks.cancelled) == (1, 1, 2)
    assert array.state is JobState.RUNNING
    assert await admission.count("jobs", f"id = '{tasks[0].id}' AND cancel_requested") == 1
    assert await admission.count("job_events", f"job_id = '{tasks[2].id}' AND type = 'job.cancelled'") == 1
    events = await admission.count("job_events")
    assert (await admission.ask("POST", f"/v1/arrays/{array_id}/cancel")).status_code == 200
    assert await admission.count("job_events") == events
    await admission.end(tasks[0].id, "cancelled")
    ended = await _get(admission, array_id)
    assert (ended.state, ended.ended_at is not None) == (JobState.CANCELLED, True)
    assert (await admission.ask("POST", f"/v1/arrays/{array_id}/hold")).status_code == 409


async def test_hold_and_release_act_on_all_tasks(admission: Admission) -> None:
    array_id = await _submit(admission, "0-3", hold=True)
    assert (await _get(admission, array_id)).waiting == {"held": 4}
    released = JobArray.model_validate_json((await admission.ask("POST", f"/v1/arrays/{array_id}/release")).content)
    assert (released.state, released.tasks.queued) == (JobState.QUEUED, 4)
    held = JobArray.model_validate_json((await admission.ask("POST", f"/v1/arrays/{array_id}/hold")).content)
    assert held.tasks.held == 4


async def test_an_array_of_others_is_as_if_it_did_not_exist(admission: Admission) -> None:
    tenant = await admission.make_tenant("strangers")
    array_id = await _submit(admission, "0-1")
    for method, path in (("GET", ""), ("POST", "/cancel")):
        assert (await admission.ask(method, f"/v1/arrays/{array_id}{path}", tenant=tenant)).status_code == 404
    (answer,) = await admission.submit_all(an_entry({"after": {"ok": array_id}}, tenant=tenant))
    assert "there is no job" in _errors(answer)[0][1]
    listed = await admission.ask("GET", "/v1/arrays", tenant=tenant)
    assert listed.json()["items"] == []


async def test_arrays_are_listed_by_filters_and_their_tasks_can_be_left_out(admission: Admission) -> None:
    tenant = await admission.make_tenant("lister")
    first = await _submit(admission, "0-1", tenant=tenant, name="one", labels={"a": "b"}, project="p")
    second = await _submit(admission, "0-1", tenant=tenant, name="two", hold=True)
    single = await admission.submit({"name": "single"}, tenant=tenant)

    async def ids(path: str) -> list[str]:
        answer = await admission.ask("GET", path, tenant=tenant)
        assert answer.status_code == 200, answer.text
        return [item["id"] for item in answer.json()["items"]]

    assert await ids("/v1/arrays") == [second, first]
    assert await ids("/v1/arrays?name=one") == await ids("/v1/arrays?label=a=b") == [first]
    for listed in ("arrays?", "jobs?tasks=true&"):  # of labels, all must hold, those of one key, too
        assert len(await ids(f"/v1/{listed}label=a=b&label=a=b")) == len(await ids(f"/v1/{listed}label=a=b")) > 0
        assert await ids(f"/v1/{listed}label=a=c&label=a=b") == await ids(f"/v1/{listed}label=a=b&label=a=c") == []
    assert await ids("/v1/arrays?project=p&state=queued") == [first]
    assert await ids("/v1/arrays?state=held") == await ids(f"/v1/arrays?id_prefix={second[:30]}") == [second]
    assert await ids("/v1/arrays?submitted_before=2020-01-01T00:00:00Z") == []
    assert await ids("/v1/jobs?tasks=false") == [single]
    page = (await admission.ask("GET", "/v1/arrays?limit=1", tenant=tenant)).json()
    assert await ids(f"/v1/arrays?limit=1&cursor={page['next_cursor']}") == [first]


async def test_names_and_beginnings_become_ids(admission: Admission) -> None:
    tenant = await admission.make_tenant("chains")
    prep = await admission.submit({"name": "prep"}, tenant=tenant)
    sweep = await _submit(admission, "0-1", tenant=tenant, name="sweep")
    job_id = await admission.submit(
        {"after": {"ok": ["prep", sweep], "any": prep[4:], "not_ok": "sweep.1"}}, tenant=tenant
    )

    job = Job.model_validate_json((await admission.ask("GET", f"/v1/jobs/{job_id}", tenant=tenant)).content)

    task = (await _tasks(admission, sweep, tenant=tenant))[1].id
    assert job.spec.after
    assert job.spec.after.model_dump() == {"ok": [prep, sweep], "any": [prep], "not_ok": [task]}
    assert await admission.count("job_dependencies", f"dependent_id = '{job_id}'") == 4
    assert await admission.count("jobs", f"id = '{job_id}' AND gated") == 1


async def test_a_submission_that_names_thousands_holds_up_no_other(admission: Admission) -> None:
    """All that are submitted together are answered together: each word must not cost a question to the database."""
    tenant = await admission.make_tenant("crawlers")
    words = {f"w{number}" for number in range(1_000)} | {f"#{number}" for number in range(100, 1_000)}
    asked: list[str] = []
    engine = create_engine(admission.database_url)
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    sweep = await _submit(admission, "0-1", tenant=tenant, name="sweep")
    task = (await _tasks(admission, sweep, tenant=tenant))[1].id
    meant = {"sweep": [sweep], "sweep.1": [task], "#1.1": [task], sweep: [sweep], task[:30]: [task]}
    found = await Arrays(engine, lambda: None).find(tenant, None, words | meant.keys())
    await engine.dispose()
    assert {word: ids for word, ids in found.items() if ids} == meant
    assert len(asked) <= 4


async def test_a_submission_names_only_so_many_others(admission: Admission) -> None:
    """Half a million dependencies fit into a body of two megabytes, and one commit stores those of all tenants."""
    tenant = await admission.make_tenant("weavers")
    specs = [SPEC | {"name": f"j{at}", "after": {"any": [*range(at)]} if at else None} for at in range(200)]
    (answer,) = await admission.submit_all(an_entry(specs, tenant=tenant))
    assert _errors(answer) == [("/jobs", "the jobs of one submission may wait for 10,000 others in all, not 19,900")]
    (answer,) = await admission.submit_all(an_entry(specs[:140], tenant=tenant))
    assert answer.status == 201


async def test_an_ambiguous_name_is_refused_with_the_ids(admission: Admission) -> None:
    tenant = await admission.make_tenant("twins")
    twins = [await admission.submit({"name": "twin"}, tenant=tenant) for _ in range(2)]
    (answer,) = await admission.submit_all(an_entry({"after": {"ok": "twin"}}, tenant=tenant))
    said = _errors(answer)[0][1]
    assert "ambiguous" in said
    assert all(job_id in said for job_id in twins)


async def test_a_dependency_is_on_the_only_one_of_a_name_that_has_not_ended(admission: Admission) -> None:
    tenant = await admission.make_tenant("reruns")
    ended = [await admission.submit({"name": "prep"}, tenant=tenant) for _ in range(5)]
    live = await _submit(admission, "0-1", tenant=tenant, name="prep")
    late = await admission.submit({"name": "prep"}, tenant=tenant)

    async def end(*ids: str) -> None:
        await admission.database.execute(
            "UPDATE jobs SET state = 'failed' WHERE id = ANY($1) OR array_id = ANY($1)", ids
        )

    async def needed() -> list[str]:
        (answer,) = await admission.submit_all(an_entry({"name": "then", "after": {"ok": "prep"}}, tenant=tenant))
        if answer.status != 201:
            return [_errors(answer)[0][1]]
        made = json.loads(answer.body)["id"]
        rows = await admission.database.fetch("SELECT needs_id FROM job_dependencies WHERE dependent_id = $1", made)
        return [row["needs_id"] for row in rows]

    await end(*ended)
    assert "ambiguous" in (await needed())[0]
    await end(late)
    assert await needed() == [live]
    await end(live)
    assert "ambiguous" in (await needed())[0]


async def test_jobs_of_a_batch_name_each_other_but_not_in_circles(admission: Admission) -> None:
    tenant = await admission.make_tenant("batches")
    await admission.submit({"name": "a"}, tenant=tenant)  # the batch's own job of the name comes first

    def batch(*afters: dict[str, Any]) -> Any:
        specs = [SPEC | {"name": name, "after": after} for name, after in zip("abc", afters, strict=True)]
        return an_entry(specs, tenant=tenant)

    (answer,) = await admission.submit_all(batch({}, {"ok": "a"}, {"any": [0, 1]}))
    first, second, third = [made["id"] for made in json.loads(answer.body)["jobs"]]
    rows = await admission.database.fetch(
        "SELECT dependent_id, needs_id FROM job_dependencies WHERE dependent_id = ANY($1)", [first, second, third]
    )
    assert {tuple(row) for row in rows} == {(second, first), (third, first), (third, second)}

    before = await admission.count("jobs")
    (answer,) = await admission.submit_all(batch({"ok": "c"}, {"any": "a"}, {"not_ok": 1}))
    assert _errors(answer) == [("/jobs/0/after", "these jobs wait for each other: a -> c -> b -> a")]
    (answer,) = await admission.submit_all(batch({"ok": 0}, {}, {}))
    assert _errors(answer) == [("/jobs/0/after", "these jobs wait for each other: a -> a")]
    assert await admission.count("jobs") == before


async def test_a_repeated_submission_is_answered_although_its_names_have_become_ambiguous(admission: Admission) -> None:
    tenant = await admission.make_tenant("repeats")
    await admission.submit({"name": "prep"}, tenant=tenant)
    (first,) = await admission.submit_all(an_entry({"after": {"ok": "prep"}}, key="again", tenant=tenant))
    await admission.submit({"name": "prep"}, tenant=tenant)
    (again,) = await admission.submit_all(an_entry({"after": {"ok": "prep"}}, key="again", tenant=tenant))
    assert again == first.model_copy(update={"replayed": True})


async def test_what_cannot_be_read_keeps_nothing_else_from_being_listed(admission: Admission) -> None:
    """Such as what a later release stored, before the installation went back to this one."""
    name = await admission.make_tenant("readers")
    jobs = [await admission.submit(tenant=name) for _ in range(3)]
    arrays = [await _submit(admission, "0-1", name) for _ in range(3)]
    hooks = [f"webhook_{number:026}" for number in range(2)]
    for hook, at in zip(hooks, ("job.ended", "of a later release"), strict=True):
        query = "INSERT INTO webhooks (id, tenant_id, url, events, secret_sha256) VALUES ($1, $2, 'https://a', $3, '')"
        await admission.database.execute(query, hook, name, [at])
    keys: list[str] = []
    for _ in range(2):
        key = await admission.ask("POST", "/v1/keys", role="admin", json={"tenant_id": name})
        keys.append(key.json()["id"])
    later = '{"of": "a later release", "env": 5, "max_gpus": [], "models": 5}'
    for query, at in (
        ("UPDATE jobs SET spec = $1 WHERE id = $2", jobs[1]),
        ("UPDATE jobs SET spec = $1 WHERE array_id = $2", arrays[1]),
        ("UPDATE job_arrays SET spec = $1 WHERE id = $2", arrays[1]),
        ("UPDATE api_keys SET limits = $1 WHERE id = $2", keys[1]),
        ("UPDATE tenants SET limits = $1 WHERE id = $2", await admission.make_tenant("unread")),
    ):
        await admission.database.execute(query, later, at)

    async def listed(path: str, role: str = "user") -> list[str]:
        found: list[str] = []
        cursor = ""
        while True:
            answer = await admission.ask("GET", f"{path}{cursor}", tenant=name, role=role)
            assert answer.status_code == 200, answer.text
            found += [item["id"] for item in answer.json()["items"]]
            if (following := answer.json().get("next_cursor")) is None:
                return found
            cursor = f"&cursor={following}"

    assert await listed("/v1/jobs?limit=1&tasks=false") == [jobs[2], jobs[0]]
    assert await listed("/v1/arrays?limit=1") == [arrays[2], arrays[0]]
    assert await listed("/v1/webhooks") == [hooks[0]]
    tenants, known = await listed("/v1/tenants?limit=2", "admin"), await listed("/v1/keys?limit=2", "admin")
    assert ("readers" in tenants, "unread" in tenants) == (True, False)
    assert (keys[0] in known, keys[1] in known) == (True, False)
