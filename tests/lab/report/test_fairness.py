"""Tables of experiments say how evenly tenants were served."""

from __future__ import annotations

from typing import Any

from lab.report.markdown import BASELINE, tables
from lab.report.tables import fairness
from tests.simulator.test_tenants import backlog, run


def test_tables_say_how_evenly_tenants_were_served_where_there_are_several() -> None:
    shared, single = backlog({"a": [1] * 80, "b": [1] * 20}), backlog({"a": [1] * 100})
    of_two, of_one = (run("fifo", workload) for workload in (shared, single))

    cells: list[dict[str, Any]] = [
        {
            "inputs": {
                "choice": {"label": label, "policy": "fifo", "params": {}, "options": {}},
                "trace": {"label": "backlog", "start": "2026-01-05", "days": 1, "jobs": "", "recipe": "", "format": ""},
                "zone": "XX",
                "signal": "direct",
                "seed": 1,
                "cluster": "2x4:A100",
                "options": {},
            },
            "summary": of_two.summary(),
            "sizes": [],
            "series": {},
            "notes": [],
        }
        for label in (BASELINE, "other")
    ]
    assert fairness(cells) == dict.fromkeys((BASELINE, "other"), of_two.jain)
    assert f"| other | {of_two.jain:.3f} |" in tables(cells, [], "means")
    alone = [{**cell, "summary": of_one.summary()} for cell in cells]
    assert "Jain" not in tables(alone, [], "means")
