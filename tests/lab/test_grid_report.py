"""A report of a grid's order, and a second program that finds the same figures in an export of the ledger."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lab.grid_report import lines_of, problems, seconds
from services.contracts.grid import NO_LIMIT_W, GridOrder, GridOrderState, GridStep
from services.core.domain.orders import curve_of
from services.scheduler.grid.reports import reported
from services.scheduler.repository.orders import LineRow

START = datetime(2026, 3, 1, 18, tzinfo=UTC)
WATTS = {"a": (700.0, 400.0), "b": (650.0, 650.0), "": (90.0, 120.0)}
STEPS = [GridStep(cut=0.2), GridStep(offset_s=1_000, to_w=1_100.0)]


def rows() -> list[LineRow]:
    """Lines of 70 s of three owners on two nodes, which fit into no five minutes."""
    found: list[LineRow] = []
    for job, (before_w, during_w) in WATTS.items():
        for at in range(-600, 5_400, 70):
            watts = before_w if at < 0 else during_w if at < 1_800 else 1.03 * before_w
            since_s = START.timestamp() + at
            found.append(LineRow(job or None, since_s, since_s + 70, 70 * watts, "n2" if job == "b" else "n1"))
    return found


def exported(path: Path, lines: list[LineRow]) -> Path:
    head = "node_id,job_id,start_at,end_at,gpu_energy_j,cpu_energy_j,static_energy_j"
    body = [
        f"{row.node_id},{row.job_id or ''},{datetime.fromtimestamp(row.start_s, UTC).isoformat()},"
        f"{datetime.fromtimestamp(row.end_s, UTC).isoformat()},{row.energy_j / 2!r},"
        f"{row.energy_j / 4!r},{row.energy_j / 4!r}"
        for row in lines
    ]
    path.write_text("\n".join([head, *body, "# seal end,x"]) + "\n")
    return path


def report(
    lines: list[LineRow], held_s: float = 1_800, steps: list[GridStep] = STEPS, given_s: float = 0
) -> dict[str, Any]:
    base_w = sum(before_w for before_w, _ in WATTS.values())
    order = GridOrder(
        id="grid_1",
        name="",
        source="api",
        zone=None,
        state=GridOrderState.ENDED,
        announced_at=START,
        start_at=START,
        end_at=START + timedelta(seconds=held_s),
        notice_s=0,
        steps=steps,
        baseline_w=base_w,
        baseline_at=START,
        limit_w=None,
        withdrawn_at=None,
        revision=1,
    )
    curve = tuple((step.offset_s, step.limit_w(base_w)) for step in steps)
    limits = curve_of(START.timestamp(), START.timestamp() + held_s, curve, base_w)
    found = reported(order, limits, lines, START + timedelta(seconds=given_s), [])
    assert found is not None
    return json.loads(found.model_dump_json())


def test_both_programs_find_the_same_figures(tmp_path: Path) -> None:
    found = report(rows())
    assert found["delivered_w"] == pytest.approx(1_440 - 1_170, rel=0.02)
    assert found["above_most"] > 0.05
    assert found["rebound"] == pytest.approx(0.03, abs=0.005)
    assert problems(found, lines_of(exported(tmp_path / "lines.csv", rows()))) == []


@pytest.mark.parametrize(
    "steps",
    [
        [GridStep(to_w=0.0)],
        [GridStep(cut=1.0), GridStep(offset_s=900, to_w=NO_LIMIT_W)],
        [GridStep(to_w=NO_LIMIT_W), GridStep(offset_s=700, to_w=1_000.0)],
        STEPS,
    ],
)
@pytest.mark.parametrize("given_s", [0, 300, 450])
def test_what_was_not_met_is_said_whatever_the_limit(tmp_path: Path, steps: list[GridStep], given_s: float) -> None:
    found = report(rows(), steps=steps, given_s=given_s)
    assert found["above_most"] > 0.05
    assert 0 <= found["ordered_w"] <= found["baseline_w"]
    for part, total in (("before_w", "baseline_w"), ("during_w", "mean_w")):
        assert sum(job[part] for job in found["jobs"]) == pytest.approx(found[total])
    assert problems(found, lines_of(exported(tmp_path / "lines.csv", rows()))) == []


@pytest.mark.parametrize(
    ("lost", "unheard"),
    [
        ((0, 0), 0.0),
        ((900, 9_000), 0.25),  # one of two nodes is silent in the second half
        ((450, 900), 0.125),  # and for a quarter in the middle
        ((-900, 900), 0.0),  # a node that joins
    ],
)
def test_what_a_silent_node_drew_is_not_passed_off_as_delivered(
    tmp_path: Path, lost: tuple[int, int], unheard: float
) -> None:
    first_s, last_s = (START.timestamp() + each for each in lost)
    known = [row for row in rows() if row.node_id != "n2" or not first_s <= row.start_s < last_s]
    found = report(known)
    assert found["unheard"] == pytest.approx(unheard, abs=0.02)
    differing = problems(found, lines_of(exported(tmp_path / "lines.csv", known)))
    assert differing == ([] if lost[0] >= 0 else ["baseline_w"]), "the order's baseline is that of both nodes"
    assert "unheard" in problems({**found, "unheard": unheard + 0.1}, lines_of(tmp_path / "lines.csv"))


def test_a_line_that_says_something_else_shows(tmp_path: Path) -> None:
    changed = rows()
    at = next(index for index, row in enumerate(changed) if row.job_id == "a" and row.start_s > START.timestamp())
    changed[at] = changed[at]._replace(energy_j=changed[at].energy_j * 0.9)
    found = problems(report(rows()), lines_of(exported(tmp_path / "lines.csv", changed)))
    assert {"mean_w", "delivered_w", "during_w of a"} <= set(found)
    assert "baseline_w" not in found


@pytest.mark.parametrize("since_s", [600, 300, 200])
def test_the_parts_of_a_baseline_come_to_it_however_young_the_cluster_is(tmp_path: Path, since_s: int) -> None:
    young = [row for row in rows() if row.start_s >= START.timestamp() - since_s]
    found = report(young)
    assert sum(job["before_w"] for job in found["jobs"]) == pytest.approx(found["baseline_w"])
    assert {job["job_id"] or "": job["before_w"] for job in found["jobs"]} == pytest.approx(
        {job: before_w for job, (before_w, _) in WATTS.items()}
    )
    assert problems(found, lines_of(exported(tmp_path / "lines.csv", young))) == []


@pytest.mark.parametrize(("held_s", "exceeded"), [(240, 0.0449), (59, None)])
def test_an_order_of_less_than_five_minutes_is_judged_as_a_whole(
    tmp_path: Path, held_s: float, exceeded: float | None
) -> None:
    found = report(rows(), held_s=held_s)
    assert found["above_most"] == (exceeded if exceeded is None else pytest.approx(exceeded, abs=1e-3))
    assert problems(found, lines_of(exported(tmp_path / "lines.csv", rows()))) == []


@st.composite
def orders(draw: st.DrawFn) -> tuple[float, list[GridStep]]:
    """Return how long an order is, and its steps, of which some limit nothing."""
    held_s = draw(st.integers(60, 3_000))
    offsets = sorted(draw(st.sets(st.integers(1, held_s), max_size=4)) | {0})
    watts = [draw(st.sampled_from([0.0, 700.0, 1_000.0, 1_160.0, NO_LIMIT_W])) for _ in offsets]
    return held_s, [GridStep(offset_s=at, to_w=each) for at, each in zip(offsets, watts, strict=True)]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=orders(), given_s=st.integers(0, 1_000), silent_s=st.sampled_from([0, 30, 120, 150, 300]))
def test_every_minute_under_a_limit_is_judged_and_no_other(
    tmp_path: Path, order: tuple[float, list[GridStep]], given_s: int, silent_s: int
) -> None:
    """1,170 W are drawn throughout, above every limit; the newest lines of one node are not booked yet."""
    held_s, steps = order
    assume(given_s < held_s)
    lines = [
        LineRow(
            *("a", START.timestamp() + since_s, START.timestamp() + since_s + 30),
            30 * (720 if since_s < 0 else 585),
            name,
        )
        for name, newest_s in (("n1", 3_600), ("n2", 3_600 - silent_s))
        for since_s in range(-600, newest_s, 30)
    ]
    found = report(lines, held_s, steps, given_s)

    edges = [*(step.offset_s for step in steps), held_s]
    limited: list[list[float]] = []
    for step, last_s in zip(steps, edges[1:], strict=True):
        if step.to_w != NO_LIMIT_W and max(step.offset_s, given_s) < last_s:
            first_s = max(step.offset_s, given_s)
            if limited and limited[-1][1] == first_s:
                limited[-1][1] = last_s
            else:
                limited.append([first_s, last_s])
    if any(last_s - first_s >= 60 for first_s, last_s in limited):
        assert found["above_most"] > 0.008, "more was drawn than any of its limits allowed"
    else:
        assert found["above_most"] is None
    counted_s = seconds(found["counted_until"]) - START.timestamp()
    assert counted_s == min(3_600 - silent_s if silent_s <= 120 else 3_600, held_s + min(held_s, 3_600))
    assert problems(found, lines_of(exported(tmp_path / "lines.csv", lines))) == []
    assert problems({**found, "counted_until": "2026-03-02T00:00:00Z"}, lines_of(tmp_path / "lines.csv"))


def test_the_report_of_an_order_in_force_counts_no_node_as_silent_that_is_about_to_book(tmp_path: Path) -> None:
    known = [row for row in rows() if row.start_s < START.timestamp() + (900 if row.node_id == "n1" else 820)]
    found = report(known)
    assert (found["unheard"], found["until"]) == (0.0, found["counted_until"])
    assert seconds(found["until"]) == max(row.end_s for row in known if row.node_id == "n2")
    assert problems(found, lines_of(exported(tmp_path / "lines.csv", rows()))) == [], "lines that came in later"
