"""The interval beside a figure is that of its lines, wherever the figure is shown."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.accounting.uncertainty import Cell, half_widths
from services.kit.ids import utc_now
from tests.support.control_plane import OPERATOR, USER, accept_job, allocate, service_headers, usage
from tests.support.ledger import fold_now
from tests.telemetry.conftest import Plane
from tests.telemetry.test_lines import export, rows_of

HOUR_S = 3_600.0


async def ask(plane: Plane, path: str, identity: Any = OPERATOR, **params: Any) -> dict[str, Any]:
    answer = await plane.http.get(path, params=params, headers=service_headers(identity))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def a_ledger(plane: Plane) -> list[str]:
    """Let three jobs of two projects run on two nodes in two zones, metered and modelled, priced by both kinds."""
    agents = [await plane.agent(f"n{at}", zone=f"{plane.zone}-{at}", gpus=4) for at in range(2)]
    jobs = [await accept_job(plane.database, project=project) for project in ("red", "red", "blue")]
    shares = ({"n0": [0]}, {"n0": [1], "n1": [1]}, {"n1": [2]})
    gangs = [await allocate(plane.database, job, share) for job, share in zip(jobs, shares, strict=True)]
    now = utc_now().timestamp() - 4 * 86_400
    plane.carbon.steps = [(now - 1e6, now - 2 * HOUR_S, 100, "measured"), (now - 2 * HOUR_S, now + 8e6, 300, "held")]
    for at, agent in enumerate(agents):
        held = [gang for gang, share in zip(gangs, shares, strict=True) if agent.node_id in share]
        for number in range(4):
            begins = now - (4 - number) * HOUR_S
            used = [usage(gang, 1e6 * (1 + at + number), cpu_energy_j=3e5, static_energy_j=1e5) for gang in held]
            idle = usage(None, 2e5, source="modelled", gpus=4)
            await agent.report(agent.interval(begins, begins + HOUR_S / 2, *used, idle))
    return jobs


def of_rows(rows: list[dict[str, str]]) -> Any:
    def cell(row: dict[str, str]) -> Cell:
        carbon, guessed = float(row["carbon_gco2"]), row["intensity_estimated"] or row["estimated"]
        amounts = float(row["energy_j"]), float(row["estimated_energy_j"]), carbon
        return Cell(row["node_id"], row["zone"], *amounts, carbon if guessed == "true" else 0.0)

    found = half_widths(map(cell, rows))
    assert min(found) > 0
    return pytest.approx(found._asdict(), rel=5e-3)


async def test_every_figure_has_the_interval_of_its_lines(plane: Plane) -> None:
    jobs = await a_ledger(plane)
    for is_folded in (False, True):
        if is_folded:
            assert await fold_now(plane.database, 2 * 86_400) >= 1
        rows = rows_of(await export(plane))
        assert {row["intensity_estimated"] for row in rows} == ({""} if is_folded else {"true", "false"})
        whole = await ask(plane, "/v1/reports/footprint", group_by="job", also=["project", "zone"])
        assert whole["total_accounts"]["half_width"] == of_rows(rows)
        assert whole["idle_accounts"]["half_width"] == of_rows([row for row in rows if not row["job_id"]])
        tables = [("job", whole["lines"]), *((each["group_by"], each["lines"]) for each in whole["also"])]
        for group, lines in tables:
            column = "job_id" if group == "job" else group
            for line in lines:
                own = [row for row in rows if row["job_id"] and row[column] == line["group"]]
                assert line["accounts"]["half_width"] == of_rows(own), (group, line["group"])
        for job in jobs:
            own = await ask(plane, f"/v1/jobs/{job}/footprint")
            assert own["half_width"] == of_rows([row for row in rows if row["job_id"] == job])
        mine = await ask(plane, "/v1/reports/footprint", USER)
        assert mine["total_accounts"]["half_width"] == of_rows([row for row in rows if row["job_id"]])
