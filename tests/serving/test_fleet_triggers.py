"""When a fleet is planned."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from services.contracts.apps import FleetPlanState, FleetPlanTrigger
from services.serving.fleets.triggers import Basis, LastPlan, Present, Service, trigger_of

BASIS = Basis({"": 1, "photos": 1}, [("n0", 0), ("n0", 1)])
LAST = LastPlan(FleetPlanTrigger.INTENSITY, FleetPlanState.APPLIED, BASIS, 200.0, datetime.fromtimestamp(1_000, UTC))
SERVED = Service(answered=100, p95_ms=90.0, accuracy_pct=80.0, sla_p95_ms=100.0, floor_pct=79.0)
NOW = Present(2_000.0, BASIS, 200.0, {"photos": SERVED}, min_interval_s=60.0)


def served(**changes: object) -> Present:
    return replace(NOW, served={"photos": replace(SERVED, **changes)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("present", "found"),
    [
        (NOW, None),
        (replace(NOW, gco2_per_kwh=210.0), None),
        (replace(NOW, gco2_per_kwh=210.1), "intensity"),
        (replace(NOW, gco2_per_kwh=189.0), "intensity"),
        (replace(NOW, gco2_per_kwh=None), None),
        (served(p95_ms=100.1), "sla"),
        (served(p95_ms=100.1, answered=19), None),
        (served(p95_ms=None, answered=0, accuracy_pct=None), None),
        (served(accuracy_pct=78.9), "accuracy"),
        (served(accuracy_pct=78.9, floor_pct=None), None),
        (replace(NOW, basis=Basis({"": 1, "photos": 2}, BASIS.gpus)), "parameter"),
        (replace(NOW, basis=Basis({"": 1}, BASIS.gpus)), "parameter"),
        (replace(NOW, basis=Basis({"": 2, "photos": 2}, BASIS.gpus[:1])), "gpus"),
        (replace(NOW, now_s=1_059.0, gco2_per_kwh=400.0), None),
        (replace(NOW, retry_s=2_001.0, gco2_per_kwh=400.0), None),
    ],
)
def test_a_fleet_is_planned_because_of(present: Present, found: str | None) -> None:
    assert trigger_of(LAST, present) == found


def test_the_first_plan_waits_for_nothing_and_a_failed_one_is_tried_again() -> None:
    assert trigger_of(None, replace(NOW, gco2_per_kwh=None)) == "first"
    failed = replace(LAST, state=FleetPlanState.FAILED, trigger=FleetPlanTrigger.SLA)
    assert trigger_of(failed, NOW) == "sla"
