"""What ``wattshift fleets`` and ``apps`` print of searches by measurement."""

from __future__ import annotations

from typing import Any

import pytest

from services.cli import output
from services.cli.client import Gateway
from services.cli.serving.apps import report
from services.cli.serving.fleets import WHY, plan_line, searched, show_search
from services.contracts.apps import FleetPlanTrigger


def figures(objective_pct: float, p95_ms: float) -> dict[str, float]:
    return {"objective_pct": objective_pct, "accuracy_pct": 84.5, "p95_ms": p95_ms, "energy_j_per_request": 21.0}


def an_evaluation(variant: str, **changes: Any) -> dict[str, Any]:
    application = {
        "name": "photos",
        "instances": [{"variant": variant, "slice": "2g", "count": 3}],
        "is_tried": True,
        "predicted": figures(2.0, 95.0),
        "measured": figures(1.5, 112.0),
        "answered": 120,
        "late": 7,
        "failed": 0,
    }
    times = {"begun_at": "2026-11-22T10:00:00Z", "measured_from": "2026-11-22T10:00:18Z"}
    return {**times, "detail": None, "applications": [application | changes]}


def a_plan(*evaluations: dict[str, Any], detail: str | None = None) -> dict[str, Any]:
    ended_at = "2026-11-22T10:02:41Z" if detail else None
    search = {
        "begun_at": "2026-11-22T10:00:00Z",
        "ended_at": ended_at,
        "detail": detail,
        "evaluations": list(evaluations),
    }
    chosen = [{"name": "photos", "instances": [{"variant": "b5", "slice": "2g", "count": 3}]}]
    return {"applications": chosen, "search": search}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.console, "width", 250)


def test_every_trigger_of_a_plan_has_words_also_one_of_a_later_release() -> None:
    assert WHY.keys() == set(FleetPlanTrigger)
    plan = {"state": "applied", "made_at": "2026-11-22T10:00:00Z", "trigger": "new_tariff", "gpu": None, "detail": None}
    assert "new tariff" in plan_line(plan)


def test_what_was_measured_stands_beside_what_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    show_search(a_plan(an_evaluation("b7"), an_evaluation("b5"), detail="It ended after 300 s."))
    said = capsys.readouterr().out
    assert "2 evaluations in 161 s. It ended after 300 s." in said
    for words in ("112 (95) ms", "1.5 (2.0) %", "84.50 %", "7 of 120", "18 s"):
        assert words in said
    (chosen,) = [line for line in said.splitlines() if "chosen" in line]
    assert "b5" in chosen


def test_what_could_not_be_measured_says_why_and_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {**an_evaluation("b5", measured=None), "detail": "photos had 3 answers within 60 s; 20 are needed."}
    show_search(a_plan(failed, detail="It ended."))
    said = capsys.readouterr().out
    assert "photos had 3 answers" in said
    assert "chosen" not in said
    assert "- (95) ms" in said


def test_a_search_that_has_just_begun_shows_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_search(a_plan())
    assert capsys.readouterr().out == "searched by measurement: 0 evaluations so far\n"
    show_search(None)
    assert (capsys.readouterr().out, searched(None)) == ("", "")


def test_a_report_sums_evaluations_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("accuracy_pct", "accuracy_loss_pct", "p95_ms", "sla_ok_share", "gco2_per_1000", "base_gco2_per_1000")
    found: dict[str, Any] = dict.fromkeys((*names, "carbon_saving_pct"))
    found |= {"requests": 240, "failed": 0, "energy_j": 10.0, "carbon_gco2": 1.0, "sla_p95_ms": 200.0, "mix": []}
    found["evaluations"] = {
        "evaluations": 5,
        "unmeasured": 1,
        "bringing_up_s": 32.0,
        "measuring_s": 50.0,
        "answered": 618,
        "late": 4,
        "failed": 0,
        "p95_error_pct": -11.04,
        "energy_error_pct": 4.7,
        "accuracy_error_pct": None,
    }
    monkeypatch.setattr(Gateway, "__init__", lambda _: None)
    monkeypatch.setattr(Gateway, "get", lambda *_, **__: found)
    report("photos")
    said = capsys.readouterr().out
    assert "5 measured for 50 s, 1 could not be measured; 32 s until instances were ready" in said
    assert "4 of 618 answers late, 0 failed" in said
    assert "p95 -11.0 %, energy +4.7 %" in said
