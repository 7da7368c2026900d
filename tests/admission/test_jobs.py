"""Looking at jobs: one, a page of them, those that match, and never those of others."""

import json
from datetime import datetime
from typing import Any

import pytest

from services.contracts.jobs import Job
from tests.admission.installation import Admission, an_entry


@pytest.fixture(scope="module")
async def listed(admission: Admission) -> list[str]:
    """Ids of seven jobs of tenant `lists`, oldest first; the sixth runs and the seventh is on hold."""
    tenant = await admission.make_tenant("lists")
    specs: list[dict[str, Any]] = [
        {"name": f"job-{i}", "project": "even" if i % 2 == 0 else "odd", "labels": {"n": str(i), "all": "yes=no"}}
        for i in range(6)
    ]
    specs.append({"name": "Held_100", "hold": True})
    ids = [await admission.submit(spec, tenant=tenant) for spec in specs]
    await admission.start(ids[5])
    return ids


async def _ids(admission: Admission, **params: Any) -> list[str]:
    answer = await admission.ask("GET", "/v1/jobs", tenant="lists", params=params)
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["items"]]


async def test_newest_first(admission: Admission, listed: list[str]) -> None:
    assert await _ids(admission) == listed[::-1]


async def test_pages_join_without_gap_or_overlap(admission: Admission, listed: list[str]) -> None:
    found: list[str] = []
    cursor: str | None = None
    pages = 0
    while pages == 0 or cursor:
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await admission.ask("GET", "/v1/jobs", tenant="lists", params=params)).json()
        found += [item["id"] for item in page["items"]]
        cursor = page["next_cursor"]
        pages += 1
        await admission.submit({"name": "newer"}, tenant="lists")  # a newer job moves no page
    assert (found, pages) == (listed[::-1], 3)
    await admission.database.execute("DELETE FROM jobs WHERE name = 'newer'")


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"state": "running"}, [5]),
        ({"state": ["running", "held"]}, [6, 5]),
        ({"project": "odd"}, [5, 3, 1]),
        ({"name": "job-2"}, [2]),
        ({"label": "n=3"}, [3]),
        ({"label": ["n=3", "all=yes=no"]}, [3]),
        ({"label": ["n=3", "n=4"]}, []),
        ({"q": "OB-"}, [5, 4, 3, 2, 1, 0]),
        ({"q": "d_1"}, [6]),
        ({"q": "%"}, []),
        ({"q": "_"}, [6]),
        ({"submitted_before": "2000-01-01T00:00:00Z"}, []),
        ({"submitted_after": "2000-01-01T00:00:00Z", "project": "odd"}, [5, 3, 1]),
    ],
)
async def test_filters(admission: Admission, listed: list[str], params: dict[str, Any], expected: list[int]) -> None:
    assert await _ids(admission, **params) == [listed[i] for i in expected]


@pytest.mark.parametrize(
    ("params", "pointer"),
    [
        ({"limit": 0}, "?limit"),
        ({"limit": 501}, "?limit"),
        ({"limit": "x"}, "?limit"),
        ({"state": "runing"}, "?state/0"),
        ({"label": "n"}, "?label/0"),
        ({"name": "a\0"}, "?name"),
        ({"q": "\0"}, "?q"),
        ({"stat": "running"}, "?stat"),
        ({"fields": "id,nope"}, "?fields"),
        ({"submitted_after": "yesterday"}, "?submitted_after"),
        ({"submitted_after": "2026-01-01T00:00:00"}, "?submitted_after"),
        ({"cursor": "AAAA"}, "?cursor"),
        ({"cursor": "%"}, "?cursor"),
    ],
)
async def test_a_bad_question_is_pointed_out(admission: Admission, params: dict[str, Any], pointer: str) -> None:
    answer = await admission.ask("GET", "/v1/jobs", params=params)
    assert answer.status_code == 422
    assert answer.json()["code"] == ("invalid_cursor" if params.get("cursor") == "AAAA" else "invalid_request")
    assert answer.json()["errors"][0]["pointer"] == pointer


async def test_a_job_says_by_when_it_will_be_killed(admission: Admission) -> None:
    async def seconds_after(job_id: str, column: str) -> float | None:
        at = (await admission.ask("GET", f"/v1/jobs/{job_id}")).json()["stop_at"]
        since = await admission.database.fetchval(f"SELECT {column} FROM allocations WHERE job_id = $1", job_id)
        return at and (datetime.fromisoformat(at) - since).total_seconds()

    async def change(job_id: str, what: str, table: str = "allocations", key: str = "job_id") -> None:
        await admission.database.execute(f"UPDATE {table} SET {what} WHERE {key} = $1", job_id)

    free = await admission.submit({"grace_s": 200})
    limited = await admission.submit({"grace_s": 200, "time_limit_s": 500})
    for job_id, limit in ((free, None), (limited, 700)):
        assert (await admission.ask("GET", f"/v1/jobs/{job_id}")).json()["stop_at"] is None
        await admission.start(job_id)
        await change(job_id, "running_at = now()")
        assert await seconds_after(job_id, "running_at") == limit
        await change(job_id, "stop_requested_at = running_at + interval '400 s'")
        assert await seconds_after(job_id, "stop_requested_at") == 200
    await change(limited, "stop_requested_at = running_at + interval '600 s'")
    assert await seconds_after(limited, "running_at") == 700, "its limit comes first"
    await change(limited, "engine = 'slurm'", "jobs", "id")
    assert await seconds_after(limited, "running_at") is None
    await change(free, "state = 'ended'")
    assert await seconds_after(free, "running_at") is None


async def test_a_list_has_the_fields_that_were_asked_for(admission: Admission) -> None:
    for number in range(3):
        await admission.submit({"name": f"slim-{number}", "command": ["true"], "environment": {"A": "b" * 2_000}})
    whole = (await admission.ask("GET", "/v1/jobs", params={"limit": 2})).json()
    slim = await admission.ask("GET", "/v1/jobs", params={"limit": 2, "fields": "id,name,state"})

    assert slim.json()["items"] == [{field: job[field] for field in ("id", "name", "state")} for job in whole["items"]]
    assert slim.json()["next_cursor"] == whole["next_cursor"] is not None
    assert len(slim.content) < 500
    arrays = await admission.ask("GET", "/v1/arrays", params={"fields": ["id", "tasks"]})
    assert all(row.keys() == {"id", "tasks"} for row in arrays.json()["items"])


async def test_a_job_is_told_with_its_gang_progress_and_footprint(admission: Admission) -> None:
    job_id = await admission.submit({"work": {"total": 90, "unit": "epochs"}})
    await admission.start(job_id)
    await admission.database.execute("INSERT INTO job_progress (job_id, done) VALUES ($1, 45)", job_id)
    await admission.database.execute("INSERT INTO job_footprints VALUES ($1, 100, 80, 5, 0.5, 60)", job_id)
    job = Job.model_validate_json((await admission.ask("GET", f"/v1/jobs/{job_id}")).content)
    assert (job.gpus, job.generation) == (2, 1)
    assert [(share.node_id, share.devices) for share in job.placement] == [("node-1", [0, 1])]
    assert job.progress is not None
    assert (job.progress.done, job.progress.total, job.progress.unit) == (45, 90, "epochs")
    assert (job.footprint.energy_j, job.footprint.carbon_gco2) == (100, 0.5)
    await admission.end(job_id)
    job = Job.model_validate_json((await admission.ask("GET", f"/v1/jobs/{job_id}")).content)
    assert (job.state, job.gpus, job.placement) == ("succeeded", 0, [])


async def test_an_unchanged_job_is_not_sent_twice(admission: Admission) -> None:
    job_id = await admission.submit()
    first = await admission.ask("GET", f"/v1/jobs/{job_id}")
    etag = {"if-none-match": f'W/"x", {first.headers["etag"]}'}
    assert (await admission.ask("GET", f"/v1/jobs/{job_id}", headers=etag)).status_code == 304
    await admission.ask("POST", f"/v1/jobs/{job_id}/hold")
    assert (await admission.ask("GET", f"/v1/jobs/{job_id}", headers=etag)).status_code == 200


@pytest.mark.parametrize("path", ["", "/cancel", "/hold", "/release", "/events", "/logs"])
async def test_anothers_job_does_not_exist(admission: Admission, path: str) -> None:
    await admission.database.execute("INSERT INTO tenants (id, limits) VALUES ('spy', '{}') ON CONFLICT DO NOTHING")
    job_id = await admission.submit()
    method = "POST" if path in ("/cancel", "/hold", "/release") else "GET"
    answers = [
        await admission.ask(method, f"/v1/jobs/{some_id}{path}", tenant="spy")
        for some_id in (job_id, "job_00000000000000000000000000", "job_x", "x" * 3000, "a%00b")
    ]
    assert {(answer.status_code, answer.json()["code"]) for answer in answers} == {(404, "not_found")}
    assert len({answer.json()["detail"] for answer in answers}) == 1


async def test_an_operator_sees_everybodys(admission: Admission, listed: list[str]) -> None:
    everybody = await admission.ask("GET", "/v1/jobs", role="operator", params={"limit": 500})
    assert set(listed) < {item["id"] for item in everybody.json()["items"]}
    one = await admission.ask("GET", "/v1/jobs", role="operator", params={"tenant": "lists"})
    assert [item["id"] for item in one.json()["items"]] == listed[::-1]
    refused = await admission.ask("GET", "/v1/jobs", params={"tenant": "lists"})
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


async def test_jobs_that_have_not_ended_are_counted(admission: Admission, listed: list[str]) -> None:
    mine = (await admission.ask("GET", "/v1/jobs:counts", tenant="lists")).json()
    assert mine == {"queued": 5, "held": 1, "starting": 0, "running": 1, "preempting": 0, "gpus": 2} | {
        "waiting": mine["waiting"]
    }
    assert sum(mine["waiting"].values()) == 6, "those that wait, by reason"
    await admission.make_tenant("idle")
    nobodys = (await admission.ask("GET", "/v1/jobs:counts", tenant="idle")).json()
    assert (nobodys["queued"], nobodys["gpus"], nobodys["waiting"]) == (0, 0, {})
    everybodys = (await admission.ask("GET", "/v1/jobs:counts", role="operator")).json()
    assert everybodys["queued"] >= mine["queued"]


async def test_a_stored_spec_is_read_back_as_it_was_meant(admission: Admission) -> None:
    spec = {"name": "whole", "command": ["a", ""], "environment": {"A": "ü\n"}, "gpus": {"min": 2, "max": 6, "step": 2}}
    (answer,) = await admission.submit_all(an_entry(json.dumps(spec)))
    job_id = json.loads(answer.body)["id"]
    seen = (await admission.ask("GET", f"/v1/jobs/{job_id}")).json()["spec"]
    assert {name: seen[name] for name in ("command", "environment")} == {k: spec[k] for k in ("command", "environment")}
    known = {"min": 2, "max": 6, "step": 2, "asked": None}
    assert seen["gpus"] == {**known, "model": None, "memory_gib": None, "zone": None, "slice": None} | dict.fromkeys(
        ("within", "near")
    )
