"""Requests in the ledger: they divide the lines of their servers' jobs, and the rest is nobody's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from services.contracts.identity import Identity, Role
from services.contracts.reports import RequestReport
from services.contracts.routing import RequestUsage, UsageReport
from services.telemetry.repository.requests import fold_requests
from tests.support.control_plane import service_headers
from tests.support.ledger import fold_now
from tests.telemetry.conftest import Plane

HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
DAY_S = 86_400.0


@pytest.fixture(autouse=True)
async def _empty(plane: Plane) -> None:
    async with plane.database.connection() as connection:
        await connection.execute("TRUNCATE request_usages")


async def spend(plane: Plane, job: str, at: datetime, *, seconds: float = 600, energy_j: float = 3_600_000) -> None:
    """Add a ledger line of a server's job, at 1 gCO2 for each 3.6 kJ."""
    async with plane.database.connection() as connection:
        await connection.execute(
            "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, "
            "gpu_energy_j, cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, "
            "intensity_estimated, pue, carbon_gco2) VALUES ('n', $1, $2, $1, $1, $3, $4, 1, $5, 0, 0, 'counter', 'DE', "
            "'average_direct', 1000, false, 1, $6)",
            *(job, int(at.timestamp()), at, at + timedelta(seconds=seconds), energy_j, energy_j / 3_600),
        )


def a_usage(job: str = "job_1", **more: Any) -> RequestUsage:
    usage = {"job_id": job, "tenant_id": "acme", "key_id": "key_1", "model": "llama", "request_class": "SS"}
    amounts = {"requests": 2, "input_tokens": 10, "output_tokens": 20, "share_s": 60.0}
    return RequestUsage.model_validate({**usage, **amounts, "energy_j": 5.0, "carbon_gco2": 7.0, **more})


async def report(plane: Plane, at: datetime, *usages: RequestUsage, router: str = "r1") -> None:
    document = UsageReport(router=router, start_at=at, usages=list(usages)).model_dump_json()
    answer = await plane.http.post(
        "/internal/request-usage", content=document, headers={**service_headers(), "content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text


async def summed(plane: Plane, by: str = "key", *, tenant: str = "ops", role: Role = Role.OPERATOR) -> RequestReport:
    headers = service_headers(Identity(tenant_id=tenant, role=role, key_id="key"))
    answer = await plane.http.get(f"/v1/reports/requests?group_by={by}", headers=headers)
    assert answer.status_code == 200, answer.text
    return RequestReport.model_validate_json(answer.content)


async def test_a_servers_energy_is_divided_by_shares_of_its_time_and_the_rest_is_nobodys(plane: Plane) -> None:
    await spend(plane, "job_1", HOUR)
    await report(plane, HOUR, a_usage(share_s=60), a_usage(key_id="key_2", share_s=240))

    found = await summed(plane)

    assert {line.group: line.energy_j for line in found.lines} == {"key_1": 360_000, "key_2": 1_440_000}
    assert {line.group: line.carbon_gco2 for line in found.lines} == {"key_1": 100, "key_2": 400}
    assert found.servers is not None
    assert found.servers.energy_j == 3_600_000
    assert found.servers.unattributed_energy_j == pytest.approx(1_800_000)
    assert found.servers.unattributed_carbon_gco2 == pytest.approx(500)


async def test_requests_of_estimated_tokens_are_counted_and_stay_when_days_are_folded(plane: Plane) -> None:
    await report(plane, HOUR, a_usage(requests=5, estimated_requests=3), a_usage(key_id="key_2"))
    await report(plane, HOUR, a_usage(requests=1, estimated_requests=1), router="r2")

    for _ in range(2):
        found = await summed(plane)
        assert [(line.group, line.requests, line.estimated_requests) for line in found.lines] == [
            *(("key_1", 6, 4), ("key_2", 2, 0))
        ]
        await fold_requests(plane.database, -2 * DAY_S)


async def test_shares_beyond_the_time_of_the_lines_divide_no_more_than_there_is(plane: Plane) -> None:
    await spend(plane, "job_1", HOUR)
    await report(plane, HOUR, a_usage(share_s=900))
    await report(plane, HOUR, a_usage(key_id="key_2", share_s=900), router="r2")

    found = await summed(plane)

    assert {line.group: line.energy_j for line in found.lines} == {"key_1": 1_800_000, "key_2": 1_800_000}
    assert found.servers is not None
    assert found.servers.unattributed_energy_j == pytest.approx(0)


async def test_an_hours_energy_goes_to_that_hours_requests(plane: Plane) -> None:
    await spend(plane, "job_1", HOUR, energy_j=7_200)
    await spend(plane, "job_1", HOUR + timedelta(hours=1), energy_j=3_600)
    await report(plane, HOUR, a_usage(share_s=600))
    await report(plane, HOUR + timedelta(hours=1), a_usage(key_id="key_2", share_s=600))

    assert {line.group: line.energy_j for line in (await summed(plane)).lines} == {"key_1": 7_200, "key_2": 3_600}


async def test_a_window_that_is_reported_again_counts_once(plane: Plane) -> None:
    for requests in (1, 5):
        await report(plane, HOUR, a_usage(requests=requests))

    assert [line.requests for line in (await summed(plane)).lines] == [5]


async def test_servers_outside_the_ledger_are_shown_beside_it_by_estimate(plane: Plane) -> None:
    await report(plane, HOUR, a_usage("endpoint:lab"))

    found = await summed(plane)

    (line,) = found.lines
    assert (line.energy_j, line.outside_energy_j, line.outside_carbon_gco2) == (0, 5, 7)
    assert found.servers is not None
    assert found.servers.energy_j == 0


async def test_tenants_see_their_own_requests_only(plane: Plane) -> None:
    await spend(plane, "job_1", HOUR)
    await report(plane, HOUR, a_usage(), a_usage(tenant_id="umbra", key_id="key_2"))

    found = await summed(plane, tenant="umbra", role=Role.USER)

    assert [line.group for line in found.lines] == ["key_2"]
    assert found.servers is None
    assert [line.energy_j for line in found.lines] == [360_000]


async def test_old_days_are_combined_without_changing_a_sum(plane: Plane) -> None:
    day = HOUR.replace(hour=0) - timedelta(days=3)
    for hour in (1, 5):
        at = day + timedelta(hours=hour)
        await spend(plane, "job_1", at)
        await report(plane, at, a_usage(share_s=300), a_usage(key_id="key_2", share_s=300))
    before = await summed(plane)

    await fold_now(plane.database, DAY_S)
    await fold_requests(plane.database, DAY_S)
    await fold_requests(plane.database, DAY_S)

    after = await summed(plane)
    assert sum(line.requests for line in after.lines) == sum(line.requests for line in before.lines) == 8
    assert after.servers is not None
    assert after.servers.energy_j == 7_200_000
    total = sum(line.energy_j for line in after.lines) + after.servers.unattributed_energy_j
    assert total == pytest.approx(after.servers.energy_j)
    async with plane.database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM request_usages") == 2
