"""The ledger's sums by hour: they are those of its lines, whatever changes these, and reports read them."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from services.telemetry.repository.rules import breaches_of
from tests.support.control_plane import OPERATOR, USER, accept_job, allocate, service_headers, usage
from tests.support.ledger import fold_now
from tests.telemetry.conftest import Plane
from tests.telemetry.test_lines import a_busy_hour, export, rows_of

BEGAN = datetime(2026, 3, 30, 21, 17, 3, 250_000, tzinfo=UTC)
"""Three hours before the end of a month."""
AMOUNTS = ("energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s")


async def two_days(plane: Plane) -> list[str]:
    """Let jobs of two projects run on two nodes for two days of uneven intervals; return their ids."""
    draw = random.Random(7)
    jobs: list[str] = []
    for number in range(2):
        agent = await plane.agent(f"n{number}", zone=f"{plane.zone}-{number}", gpus=2)
        for project in ("red", "blue"):
            job_id = await accept_job(plane.database, project=project)
            gang = await allocate(plane.database, job_id, {agent.node_id: [len(jobs) % 2]})
            jobs.append(job_id)
            at_s, intervals = BEGAN.timestamp(), []
            while at_s < BEGAN.timestamp() + 2 * 86_400:
                length_s = draw.uniform(900, 9_000)
                job = usage(gang, draw.uniform(0, 1e6), cpu_energy_j=draw.uniform(0, 1e4))
                intervals.append(agent.interval(at_s, at_s + length_s, job, usage(None, draw.uniform(0, 1e5))))
                at_s += length_s
            answer = await agent.report(*intervals)
            assert answer.status_code == 200, answer.text
    return jobs


async def ask(plane: Plane, **params: Any) -> dict[str, Any]:
    answer = await plane.http.get("/v1/reports/footprint", params=params, headers=service_headers(OPERATOR))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def breaches(plane: Plane) -> list[str]:
    found = {rule.name: texts for rule, texts in await breaches_of(plane.database, 5)}
    return found["hours_match_ledger"]


def summed(rows: list[dict[str, str]], column: str) -> float:
    return float(sum(Decimal(row[column]) for row in rows))


async def test_any_period_is_summed_exactly_whether_or_not_it_begins_and_ends_on_the_hour(plane: Plane) -> None:
    await two_days(plane)
    rows = rows_of(await export(plane))
    draw = random.Random(3)
    hour = BEGAN.replace(minute=0, second=0, microsecond=0)
    marks = [None, hour, hour + timedelta(hours=5), *(datetime.fromisoformat(row["start_at"]) for row in rows[3:9])]
    marks += [BEGAN + timedelta(seconds=draw.uniform(0, 172_800)) for _ in range(6)]
    checked = 0
    for _ in range(40):
        start, end = draw.choice(marks), draw.choice(marks)
        if start and end and start > end:
            start, end = end, start
        inside = [
            row
            for row in rows
            if (start is None or datetime.fromisoformat(row["start_at"]) >= start)
            and (end is None or datetime.fromisoformat(row["start_at"]) < end)
        ]
        period = {"start": start and start.isoformat(), "end": end and end.isoformat()}
        report = await ask(plane, group_by="zone", **{name: at for name, at in period.items() if at})
        assert {name: report["total"][name] for name in AMOUNTS} == {name: summed(inside, name) for name in AMOUNTS}
        assert report["total_accounts"]["estimated_gco2"] == summed(inside, "estimated_gco2")
        checked += len(inside)
    assert checked > 1_000


async def test_every_table_of_a_period_has_the_same_totals(plane: Plane) -> None:
    await two_days(plane)
    groups = ("job", "user", "project", "tenant", "model", "zone", "node", "day", "week", "month")
    reports = [await ask(plane, group_by=group, end=datetime.now(UTC).isoformat()) for group in groups]
    assert all(report["total"] == reports[0]["total"] for report in reports)
    assert all(report["total_accounts"] == reports[0]["total_accounts"] for report in reports)
    assert reports[0]["total_accounts"]["baseline_gco2"] is not None


async def test_a_period_that_has_not_ended_ends_when_the_report_is_made(plane: Plane) -> None:
    before = datetime.now(UTC)
    report = await ask(plane, end="2100-01-01T00:00:00Z")
    assert before <= datetime.fromisoformat(report["end_at"]) <= datetime.now(UTC)
    assert (await ask(plane, end="2026-01-01T00:00:00Z"))["end_at"] == "2026-01-01T00:00:00Z"


async def test_two_dimensions_at_once(plane: Plane) -> None:
    await two_days(plane)
    rows = [row for row in rows_of(await export(plane)) if row["job_id"]]
    report = await ask(plane, group_by="project", then_by="month")
    found = {(line["group"], line["then_group"]): line for line in report["lines"]}

    assert (report["group_by"], report["then_by"]) == ("project", "month")
    assert [*found] == [(name, month) for name in ("blue", "red") for month in ("2026-03", "2026-04")]
    for (project, month), line in found.items():
        inside = [row for row in rows if row["project"] == project and row["start_at"].startswith(month)]
        assert line["footprint"] == {name: summed(inside, name) for name in AMOUNTS}
        assert line["accounts"]["facility_energy_j"] == summed(inside, "facility_energy_j")
        assert line["jobs"] == 2


async def test_pages_of_two_dimensions_leave_nothing_out(plane: Plane) -> None:
    await two_days(plane)
    whole = await ask(plane, group_by="project", then_by="day")
    pages, cursor = [], None
    while True:
        page = await ask(plane, group_by="project", then_by="day", limit=2, **({"cursor": cursor} if cursor else {}))
        pages += page["lines"]
        if (cursor := page["next_cursor"]) is None:
            break
    assert pages == whole["lines"]
    assert len(pages) == 6


async def test_pages_go_on_behind_a_user_whose_name_has_two_lines(plane: Plane) -> None:
    for tenant, user in (("t", "ada\n1"), ("u", "ada\n2")):
        await a_busy_hour(plane, tenant=tenant, labels={"user": user})
    first = await ask(plane, group_by="user", limit=1)
    second = await ask(plane, group_by="user", limit=1, cursor=first["next_cursor"])
    assert [line["group"] for page in (first, second) for line in page["lines"]] == ["ada\n1", "ada\n2"]
    assert second["next_cursor"] is None


async def test_sums_follow_lines_that_are_folded_changed_and_taken(plane: Plane) -> None:
    await two_days(plane)
    before = (await ask(plane))["total"]
    assert await breaches(plane) == []
    assert await fold_now(plane.database, 86_400.0) > 0
    assert await breaches(plane) == []
    assert (await ask(plane))["total"] == pytest.approx(before)
    async with plane.database.transaction() as connection:
        assert await connection.fetchval("SELECT count(*) FROM energy_usages") == 0
        await connection.execute("ALTER TABLE energy_days DISABLE TRIGGER ledger_keep")
        await connection.execute("UPDATE energy_days SET carbon_gco2 = 2 * carbon_gco2")
    assert await breaches(plane) == []
    async with plane.database.transaction() as connection:
        await connection.execute("DELETE FROM energy_days")
        assert await connection.fetchval("SELECT count(*) FROM energy_hours") == 0
        await connection.execute("ALTER TABLE energy_days ENABLE TRIGGER ledger_keep")


async def test_a_sum_that_is_not_that_of_its_lines_is_found(plane: Plane) -> None:
    (job, *_) = await two_days(plane)
    async with plane.database.connection() as connection:
        await connection.execute(
            "UPDATE energy_hours SET carbon_gco2 = carbon_gco2 + 1 WHERE job_id = $1 AND hour = "
            "(SELECT min(hour) FROM energy_hours WHERE job_id = $1)",
            job,
        )
    (found,) = await breaches(plane)
    assert found.startswith("n0, 2026-03-30 21:00: 6 lines of ")


async def test_a_tenant_is_summed_alone(plane: Plane) -> None:
    await two_days(plane)
    await accept_job(plane.database, tenant="other")
    answer = await plane.http.get("/v1/reports/footprint", headers=service_headers(USER))
    rows = [row for row in rows_of(await export(plane)) if row["tenant"] == "t"]
    assert answer.json()["total"] == {name: summed(rows, name) for name in AMOUNTS}
    assert answer.json()["idle"]["energy_j"] == 0.0


async def test_the_hours_of_a_period_are_listed_with_what_was_idle(plane: Plane) -> None:
    await two_days(plane)
    rows = rows_of(await export(plane))
    period = {"start": "2026-03-31T00:00:00Z", "end": "2026-04-01T00:00:00Z"}
    answer = await plane.http.get("/v1/reports/hours", params=period, headers=service_headers(OPERATOR))
    assert answer.status_code == 200, answer.text
    hours = answer.json()["items"]
    assert hours == sorted(hours, key=lambda each: each["start_at"])
    for hour in hours:
        inside = [row for row in rows if row["start_at"][:13] == hour["start_at"][:13]]
        idle = [row for row in inside if not row["job_id"]]
        assert hour["energy_j"] == summed(inside, "energy_j")
        assert hour["carbon_gco2"] == pytest.approx(summed(inside, "carbon_gco2"))
        assert hour["idle_energy_j"] == summed(idle, "energy_j")
        assert hour["idle_carbon_gco2"] == pytest.approx(summed(idle, "carbon_gco2"))
        lengths = {
            (row["node_id"], row["start_at"]): datetime.fromisoformat(row["end_at"])
            - datetime.fromisoformat(row["start_at"])
            for row in inside
        }
        by_node = [
            sum((length for (node, _), length in lengths.items() if node == each), timedelta()).total_seconds()
            for each in {node for node, _ in lengths}
        ]
        assert hour["covered_s"] == pytest.approx(max(by_node))
    assert {each["start_at"][:13] for each in hours} == {
        row["start_at"][:13] for row in rows if row["start_at"][:10] == "2026-03-31"
    }
    own = await plane.http.get("/v1/reports/hours", params=period, headers=service_headers(USER))
    theirs = own.json()["items"]
    assert [each["energy_j"] for each in theirs] == pytest.approx(
        [each["energy_j"] - each["idle_energy_j"] for each in hours if each["energy_j"] > each["idle_energy_j"]]
    )
    assert {each["idle_energy_j"] for each in theirs} == {None}
    refused = await plane.http.get(
        "/v1/reports/hours", params={**period, "end": "2026-08-01T00:00:00Z"}, headers=service_headers(OPERATOR)
    )
    assert (refused.status_code, refused.json()["detail"]) == (422, "The period is longer than 100 days.")
