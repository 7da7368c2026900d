"""A month of work on two nodes, entered through the ledger as agents report it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import httpx

from services.cli.reports.figures import Report
from services.cli.reports.report_page import OTHERS
from tests.support.control_plane import OPERATOR, accept_job, allocate, end_allocation, service_headers, usage
from tests.telemetry.conftest import Plane

START_S = datetime(2026, 10, 1, tzinfo=UTC).timestamp()
HOUR_S = 3_600.0
DAY_S = 24 * HOUR_S
MONTH = {"start": "2026-10-01T00:00:00+00:00", "end": "2026-11-01T00:00:00+00:00"}
KWH_J = 3.6e6
NODES = (("node-berlin-1", "DE", "A100"), ("node-fremont-1", "US-CAL-CISO", "H100"))
WORK = ((1.0, 6.0, 2.4), (9.0, 17.0, 6.1), (19.0, 23.0, 1.7))
"""From hour to hour of a day, and the GPU energy in kWh."""


def intensity(hour: int) -> float:
    """Return gCO2/kWh in an hour of the month: cleaner at noon, and cleaner in the second half."""
    return 380 - 140 * math.sin(math.pi * ((hour % 24) / 24)) - (60 if hour > 372 else 0)


async def populate(plane: Plane, projects: list[str], *, days: int = 31) -> None:
    """Let jobs of these projects in turn run on both nodes, three a day, with idle hours between them."""
    plane.carbon.steps = [
        (START_S + hour * HOUR_S, START_S + (hour + 1) * HOUR_S, intensity(hour), "measured") for hour in range(744)
    ]
    number = 0
    for node_id, zone, model in NODES:
        agent = await plane.agent(node_id, zone=zone, model=model, gpus=4)
        for day in range(days):
            at_s = START_S + day * DAY_S
            intervals: list[dict[str, Any]] = []
            for first, last, kwh in WORK if day % 7 < 5 else WORK[:1]:
                labels = {"user": f"user-{number % 5}"}
                work = {"total": 10, "unit": "epochs"} if number % 3 else None
                job_id = await accept_job(
                    plane.database,
                    name=f"train-{number}",
                    project=projects[number % len(projects)],
                    labels=labels,
                    **({} if work is None else {"work": work}),
                )
                gang = await allocate(plane.database, job_id, {node_id: [0, 1, 2]})
                begin_s, end_s = at_s + first * HOUR_S, at_s + last * HOUR_S
                middle_s = (begin_s + end_s) / 2
                for start_s, stop_s in ((begin_s, middle_s), (middle_s, end_s)):
                    job = usage(gang, kwh / 2 * KWH_J, gpus=3, cpu_energy_j=kwh / 20 * KWH_J, done=10.0)
                    rest = usage(None, 0.05 * kwh * KWH_J, gpus=1)
                    intervals.append(agent.interval(start_s, stop_s, job, rest))
                await end_allocation(plane.database, gang)
                async with plane.database.connection() as connection:
                    await connection.execute(
                        "UPDATE jobs SET state = 'succeeded', ended_at = now() WHERE id = $1", job_id
                    )
                number += 1
            answer = await agent.report(*intervals)
            assert answer.status_code == 200, answer.text


async def report_of_the_month(http: httpx.AsyncClient) -> Report:
    """Return what the page is made of, as the command line would read it through a gateway."""
    params = {"group_by": "job", "also": list(OTHERS), "limit": 10_000, **MONTH}
    answer = await http.get("/v1/reports/footprint", params=params, headers=service_headers(OPERATOR))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["next_cursor"] is None
    return found
