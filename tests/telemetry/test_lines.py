"""Exports of the ledger's lines: what they hold, whose they are, and that they are the lines that reports sum."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from decimal import Decimal
from typing import Any

import pytest

from services.contracts.identity import Identity, Role
from services.contracts.reports import LedgerLine
from services.db.database import Database
from services.telemetry import line_export
from services.telemetry.line_export import AT_ONCE, LineExports
from services.telemetry.repository.line_export import Output, write_lines
from services.telemetry.repository.reports import Subject
from tests.support.control_plane import OPERATOR, USER, accept_job, allocate, eventually, service_headers, usage
from tests.telemetry.conftest import Plane

ALL = Subject(None, None, None, None)
FAR_FUTURE = "2100-01-01T00:00:00Z"


async def export(plane: Plane, who: Identity = OPERATOR, **params: Any) -> str:
    answer = await plane.http.get("/v1/reports/lines", params=params, headers=service_headers(who))
    assert answer.status_code == 200, answer.text
    return answer.text


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


async def a_busy_hour(plane: Plane, *, tenant: str = "t", **spec: Any) -> str:
    """Let a job run for an hour on a node of two GPUs, of which the other is idle; return its id."""
    agent = await plane.agent(f"node-{tenant}", gpus=2)
    job_id = await accept_job(plane.database, tenant=tenant, **spec)
    gang = await allocate(plane.database, job_id, {agent.node_id: [0]})
    intervals = [
        agent.interval(
            1e9 + 600 * number,
            1e9 + 600 * (number + 1),
            usage(gang, 0.1 + 1000 / (number + 3), cpu_energy_j=0.7 / (number + 1)),
            usage(None, 1 / 3, gpus=2, static_energy_j=0.1),
        )
        for number in range(6)
    ]
    answer = await agent.report(*intervals)
    assert answer.status_code == 200, answer.text
    return job_id


async def test_a_line_says_what_each_of_its_figures_follows_from(plane: Plane) -> None:
    job_id = await a_busy_hour(plane, labels={"user": "ada"})
    row = next(row for row in rows_of(await export(plane)) if row["job_id"])

    assert tuple(row) == tuple(LedgerLine.model_fields)
    line = LedgerLine.model_validate({name: value or None for name, value in row.items()})
    assert (line.node_id, line.model, line.devices, line.gpus) == ("node-t", "A100", "0", 1)
    assert (line.job_id, line.allocation_id, line.tenant, line.user) == (job_id, f"{job_id}.1", "t", "ada")
    assert (line.gpu_source, line.cpu_source, line.pue) == ("counter", "modelled", 1.0)
    assert (line.zone, line.provider, line.intensity_kind) == (plane.zone, "fake", "measured")
    assert line.intensity_gco2_per_kwh == 360.0
    assert line.release
    assert line.estimated_energy_j == line.cpu_energy_j
    assert line.gpu_s == 600.0


async def test_both_formats_have_the_same_values(plane: Plane) -> None:
    await a_busy_hour(plane)
    objects = [
        json.loads(line, parse_float=str, parse_int=str) for line in (await export(plane, format="jsonl")).splitlines()
    ]
    rows = rows_of(await export(plane))
    assert len(rows) == 12
    words = {None: "", True: "true", False: "false"}
    assert [{name: words.get(value, value) for name, value in each.items()} for each in objects] == rows


@pytest.mark.parametrize("who", [OPERATOR, USER])
async def test_the_amounts_of_a_report_are_the_sums_of_the_columns_to_the_last_digit(
    plane: Plane, who: Identity
) -> None:
    await a_busy_hour(plane)
    await a_busy_hour(plane, tenant="other")
    rows = rows_of(await export(plane, who))
    params = {"group_by": "day"}
    report = (await plane.http.get("/v1/reports/footprint", params=params, headers=service_headers(who))).json()

    def total(column: str) -> float:
        return float(sum(Decimal(row[column]) for row in rows))

    assert report["total"] == {name: total(name) for name in report["total"]}
    assert report["total_accounts"]["facility_energy_j"] == total("facility_energy_j")
    assert report["total_accounts"]["estimated_gco2"] == total("estimated_gco2")


async def test_a_tenant_and_a_project_see_their_own_lines_and_no_idle_energy(plane: Plane) -> None:
    mine = await a_busy_hour(plane, project="p1")
    await a_busy_hour(plane, tenant="other")

    assert {row["job_id"] for row in rows_of(await export(plane, USER))} == {mine}
    of_p2 = Identity(tenant_id="t", role=Role.USER, key_id="k", project="p2")
    assert rows_of(await export(plane, of_p2)) == []
    assert len({row["job_id"] for row in rows_of(await export(plane))}) == 3


async def test_the_lines_of_one_job_and_the_jobs_of_one_project_add_up_to_its_footprint(plane: Plane) -> None:
    mine, theirs = await a_busy_hour(plane, project="p"), await a_busy_hour(plane, tenant="other", project="q")
    rows = [json.loads(line) for line in (await export(plane, job=mine, format="jsonl")).splitlines()]
    report = await plane.http.get(
        "/v1/reports/footprint", params={"group_by": "job", "project": "p"}, headers=service_headers(OPERATOR)
    )
    (line,) = report.json()["lines"]

    assert {row["job_id"] for row in rows} == {mine}
    assert [row["start_at"] for row in rows] == sorted(row["start_at"] for row in rows)
    assert len(rows) == 6
    assert line["group"] == mine
    assert line["footprint"]["energy_j"] == pytest.approx(sum(row["energy_j"] for row in rows), rel=1e-12)
    total, idle = report.json()["total"], report.json()["idle"]
    assert (total, idle["energy_j"]) == (line["footprint"], 0.0)
    assert report.json()["metered_gpu_energy_j"] == total["gpu_energy_j"]
    assert rows_of(await export(plane, USER, job=theirs)) == []
    sealed = {"job": mine, "seals": True}
    refused = await plane.http.get("/v1/reports/lines", params=sealed, headers=service_headers(OPERATOR))
    assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "?job")
    for project, status in (("p", 200), ("q", 403)):
        of_p = USER.model_copy(update={"project": "p"})
        answer = await plane.http.get(
            "/v1/reports/footprint", params={"project": project}, headers=service_headers(of_p)
        )
        assert answer.status_code == status


async def test_a_period_takes_the_lines_that_begin_in_it(plane: Plane) -> None:
    await a_busy_hour(plane)
    rows = rows_of(await export(plane, start="2001-09-09T01:56:40Z", end="2001-09-09T02:06:40Z"))
    assert {row["start_at"] for row in rows} == {"2001-09-09T01:56:40+00:00"}
    assert rows_of(await export(plane, start=FAR_FUTURE)) == []
    assert await export(plane, start=FAR_FUTURE, format="jsonl") == ""
    refused = await plane.http.get(
        "/v1/reports/lines",
        params={"start": FAR_FUTURE, "end": "2000-01-01T00:00:00Z"},
        headers=service_headers(OPERATOR),
    )
    assert refused.status_code == 422


async def test_what_strangers_wrote_is_no_formula_and_no_command(plane: Plane) -> None:
    await a_busy_hour(plane, labels={"user": "=cmd|'/c calc'!A0\x1b[2J\u202e"})
    row = next(row for row in rows_of(await export(plane)) if row["job_id"])
    assert row["user"] == "'=cmd|'/c calc'!A0?[2J?"


async def many_lines(plane: Plane, count: int) -> None:
    await a_busy_hour(plane)
    async with plane.database.connection() as connection:
        await connection.execute(
            """INSERT INTO energy_usages SELECT l.* FROM generate_series(1, $1) n, LATERAL (
                SELECT (jsonb_populate_record(u, jsonb_build_object('sequence', 1000 + n))).*
                FROM energy_usages u LIMIT 1) l""",
            count,
        )


async def test_an_export_waits_for_its_reader(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL formats no more than its reader takes: the rest is not in this process."""
    await many_lines(plane, 40_000)
    written: list[int] = []

    async def write(database: Database, about: Subject, form: Any, output: Output, *_: Any) -> None:
        async def counted(piece: bytes) -> None:
            written.append(len(piece))
            await output(piece)

        await write_lines(database, about, form, counted)

    monkeypatch.setattr(line_export, "write_lines", write)
    pieces = await LineExports(plane.database).begin(ALL, "csv")
    first = await anext(pieces)
    for _ in range(1_000):
        await asyncio.sleep(0)
    before = sum(written)
    size = len(first) + sum([len(piece) async for piece in pieces])
    assert size == sum(written) > 10_000_000
    assert before < size / 5


async def no_connection_is_used(plane: Plane) -> bool:
    return plane.database.connections_now()[0] == 0


async def test_an_export_that_nobody_reads_any_more_gives_its_connection_back(plane: Plane) -> None:
    await many_lines(plane, 20_000)
    exports = LineExports(plane.database)
    for _ in range(3 * AT_ONCE):
        pieces = await exports.begin(ALL, "jsonl")
        assert json.loads((await anext(pieces)).split(b"\n")[0])["node_id"] == "node-t"
        await pieces.aclose()
    await eventually(lambda: no_connection_is_used(plane))


async def test_more_exports_than_may_be_at_once_are_refused(plane: Plane) -> None:
    await many_lines(plane, 20_000)
    exports = LineExports(plane.database)
    reading = [await exports.begin(ALL, "csv") for _ in range(AT_ONCE)]
    with pytest.raises(Exception, match="exports are being read"):
        await exports.begin(ALL, "csv")
    for pieces in reading:
        await pieces.aclose()
    assert [len(piece) > 0 async for piece in await exports.begin(ALL, "csv")]


async def test_the_slow_clients_of_one_tenant_leave_room_for_another(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(database: Database, about: Subject, form: Any, output: Output, *_: Any) -> None:
        while True:
            await output(b"a line\n")

    monkeypatch.setattr(line_export, "write_lines", write)
    exports = LineExports(plane.database)
    slow = await exports.begin(ALL._replace(tenant_id="slow"), "csv")
    with pytest.raises(Exception, match="one of your tenant's"):
        await exports.begin(ALL._replace(tenant_id="slow"), "csv")
    other = await exports.begin(ALL._replace(tenant_id="other"), "csv")
    with pytest.raises(Exception, match="exports are being read"):
        await exports.begin(ALL._replace(tenant_id="third"), "csv")

    monkeypatch.setattr(line_export, "PATIENCE_S", 0.0)
    monkeypatch.setattr(line_export, "LEAST_BYTES_PER_S", 1e12)
    third = await exports.begin(ALL._replace(tenant_id="third"), "csv")  # one of them lets it wait
    again = await exports.begin(ALL._replace(tenant_id="third"), "csv")  # a tenant's own goes before another's
    assert len(exports._under_way) == AT_ONCE
    with pytest.raises(TimeoutError):
        assert [piece async for piece in third]
    monkeypatch.setattr(line_export, "LEAST_BYTES_PER_S", 0.0)
    for pieces in (slow, other, again):
        await pieces.aclose()
    assert not exports._under_way


async def test_an_export_counts_no_longer_than_it_holds_a_connection(plane: Plane) -> None:
    exports = LineExports(plane.database)
    unread = [await exports.begin(ALL, "csv") for _ in range(AT_ONCE)]
    await eventually(lambda: no_connection_is_used(plane))
    more = await exports.begin(ALL, "csv")
    for pieces in (*unread, more):
        assert [piece async for piece in pieces]
