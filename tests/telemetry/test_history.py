"""Past jobs as they ran: what is listed, to whom, page by page."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.identity import Identity, Role
from tests.support.control_plane import OPERATOR, USER, accept_job, allocate, service_headers
from tests.telemetry.conftest import Plane

OTHER = Identity(tenant_id="other", role=Role.USER, key_id="key-o")


async def listed(plane: Plane, who: Identity = OPERATOR, **query: Any) -> dict[str, Any]:
    answer = await plane.http.get("/v1/reports/history", headers=service_headers(who), params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def ran(plane: Plane, *gangs: tuple[int, int], tenant: str = "t", submitted: str = "2026-11-01") -> str:
    """Leave a job that ran as these gangs of (GPUs, seconds), one after the other, from an hour after midnight."""
    job_id = await accept_job(plane.database, tenant=tenant)
    async with plane.database.connection() as connection:
        at = f"'{submitted}T01:00Z'::timestamptz"
        for number, (gpus, seconds) in enumerate(gangs, start=1):
            gang = await allocate(plane.database, job_id, {}, generation=number)
            await connection.execute(
                f"UPDATE allocations SET gpus = {gpus}, started_at = {at}, state = 'ended', "
                f"ended_at = {at} + interval '{seconds} s' WHERE id = $1",
                gang,
            )
        await connection.execute(
            f"UPDATE jobs SET state = 'succeeded', submitted_at = '{submitted}T00:00Z', started_at = {at}, "
            f"ended_at = {at} + interval '2 h' WHERE id = $1",
            job_id,
        )
    return job_id


async def test_a_job_is_listed_as_it_ran(plane: Plane) -> None:
    job_id = await ran(plane, (1, 100), (4, 50))
    waiting = await accept_job(plane.database)

    first, second = (await listed(plane))["items"]

    assert first["job_id"] == job_id
    assert (first["gpus"], first["run_s"], first["gpu_s"]) == (4, 150, 300)
    assert (first["submitted_at"], first["ended_at"]) == ("2026-11-01T00:00:00Z", "2026-11-01T03:00:00Z")
    assert (second["job_id"], second["started_at"], second["run_s"], second["gpus"]) == (waiting, None, None, None)


async def test_a_standing_service_is_no_past_job(plane: Plane) -> None:
    job_id, standing = await ran(plane, (1, 100)), await ran(plane, (2, 100))
    async with plane.database.connection() as connection:
        await connection.execute(
            """UPDATE jobs SET spec = spec || '{"service": {"node_labels": {}}}' WHERE id = $1""", standing
        )

    assert [job["job_id"] for job in (await listed(plane))["items"]] == [job_id]


async def test_a_period_is_read_page_by_page(plane: Plane) -> None:
    made = [await ran(plane, (1, 10), submitted=f"2026-11-0{day}") for day in range(1, 6)]

    first = await listed(plane, start="2026-11-02T00:00:00Z", end="2026-11-05T00:00:00Z", limit=2)
    second = await listed(plane, start="2026-11-02T00:00:00Z", limit=2, cursor=first["next_cursor"])

    assert [job["job_id"] for job in first["items"]] == made[1:3]
    assert [job["job_id"] for job in second["items"]] == made[3:]
    assert second["next_cursor"] is None


async def test_a_tenant_sees_its_own(plane: Plane) -> None:
    mine, theirs = await ran(plane, (1, 10)), await ran(plane, (1, 10), tenant="other")

    assert [job["job_id"] for job in (await listed(plane, USER))["items"]] == [mine]
    assert [job["job_id"] for job in (await listed(plane, OTHER))["items"]] == [theirs]
    refused = await plane.http.get("/v1/reports/history", headers=service_headers(OTHER), params={"tenant": "t"})
    assert refused.status_code == 403
    assert [job["job_id"] for job in (await listed(plane, tenant="t"))["items"]] == [mine]
    assert len((await listed(plane))["items"]) == 2


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ({"start": "2026-11-02T00:00:00Z", "end": "2026-11-01T00:00:00Z"}, "?start"),
        ({"cursor": "%%"}, "?cursor"),
        ({"limit": 1001}, "?limit"),
        ({"start": "yesterday"}, "?start"),
    ],
)
async def test_a_question_that_makes_no_sense(plane: Plane, query: dict[str, Any], pointer: str) -> None:
    answer = await plane.http.get("/v1/reports/history", headers=service_headers(OPERATOR), params=query)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


async def test_a_job_on_a_slice_names_it(plane: Plane) -> None:
    job_id, other = await ran(plane, (1, 100)), await ran(plane, (1, 100))
    async with plane.database.connection() as connection:
        await connection.execute("""UPDATE jobs SET spec = spec || '{"gpus": {"slice": "2g"}}' WHERE id = $1""", job_id)

    assert {job["job_id"]: job["slice"] for job in (await listed(plane))["items"]} == {job_id: "2g", other: None}
