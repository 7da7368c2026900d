"""Why jobs wait is written down again only where it says something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast, get_type_hints

from services.core.cycle.plan import Hold
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.scheduler.planning.apply import Said
from services.scheduler.repository.snapshots import JobRow

ROUND, GREENER = Reason.WAITING_FOR_ROUND, Reason.GREENER_HOURS


def a_row(job_id: str, reason: str | None, expected_start_s: float | None = None) -> JobRow:
    fields: dict[str, Any] = dict.fromkeys(JobRow.__annotations__)
    numbers = {name: 0 for name, kind in get_type_hints(JobRow).items() if kind in (int, float, bool)}
    found = {**fields, **numbers, "id": job_id, "reason": reason, "expected_start_s": expected_start_s}
    return JobRow(**found)


def new(rows: list[JobRow], *holds: Hold) -> list[tuple[str, str, float | None]]:
    found = Said.of(cast("Any", SimpleNamespace(jobs=rows, away=()))).new(holds, {})
    return [(each.job_id, each.reason, each.expected_start_at and each.expected_start_at.timestamp()) for each in found]


def hold(job_id: str, reason: Reason, expected_start_s: float | None = None) -> Hold:
    return Hold(JobId(job_id), reason, expected_start_s)


def test_the_same_reason_is_not_written_again_and_another_one_is() -> None:
    rows = [a_row("a", "waiting_for_round"), a_row("b", "waiting_for_round"), a_row("c", None)]
    holds = hold("a", ROUND), hold("b", Reason.FAIR_SHARE), hold("c", ROUND), hold("unknown", ROUND)
    assert new(rows, *holds) == [
        ("b", "fair_share", None),
        ("c", "waiting_for_round", None),
        ("unknown", "waiting_for_round", None),
    ]


def test_another_time_is_written_and_the_same_second_is_not() -> None:
    rows = [a_row(each, "greener_hours", 1_000.0) for each in "abcd"]
    holds = hold("a", GREENER, 1_000.4), hold("b", GREENER, 1_001.0), hold("c", GREENER), hold("d", ROUND, 1_000.0)
    assert new(rows, *holds) == [
        ("b", "greener_hours", 1_001.0),
        ("c", "greener_hours", None),
        ("d", "waiting_for_round", 1_000.0),
    ]
    assert new([a_row("a", "greener_hours")], hold("a", GREENER, 5.0)) == [("a", "greener_hours", 5.0)]
