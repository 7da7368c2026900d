"""When a fleet is planned, and for how many requests."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from services.contracts.apps import FleetPlanState, FleetPlanTrigger
from services.contracts.carbon import OutlookPoint
from services.kit.carbon import Carbon
from services.serving.carbon import Baselines
from services.serving.fleets.state import rate_per_s
from services.serving.fleets.triggers import Basis, LastPlan, Present, Service, trigger_of
from services.serving.repository.fleets import STORED_BASIS

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
        (replace(NOW, retry_s=2_001.0, basis=replace(BASIS, revisions={"": 1, "a": 9})), FleetPlanTrigger.PARAMETER),
        (replace(NOW, basis=replace(BASIS, ordered=True)), "grid_order"),
        (replace(NOW, basis=replace(BASIS, ordered=True), now_s=1_001.0), "grid_order"),
        (replace(NOW, basis=replace(BASIS, ordered=True), retry_s=2_001.0), None),
    ],
)
def test_a_fleet_is_planned_because_of(present: Present, found: str | None) -> None:
    assert trigger_of(LAST, present) == found


def test_a_fleet_goes_back_after_an_order_once_it_may_plan_again() -> None:
    under_an_order = replace(LAST, basis=replace(BASIS, ordered=True))
    assert (
        STORED_BASIS.validate_python(STORED_BASIS.dump_python(under_an_order.basis, mode="json"))
        == under_an_order.basis
    )
    assert trigger_of(under_an_order, replace(NOW, basis=under_an_order.basis)) is None
    assert trigger_of(under_an_order, replace(NOW, now_s=1_059.0)) is None
    assert trigger_of(under_an_order, NOW) == "grid_order"


def test_the_first_plan_waits_for_nothing_and_a_failed_one_is_tried_again() -> None:
    assert trigger_of(None, replace(NOW, gco2_per_kwh=None)) == "first"
    failed = replace(LAST, state=FleetPlanState.FAILED, trigger=FleetPlanTrigger.SLA)
    assert trigger_of(failed, NOW) == "sla"


def windows_of(changes: list[tuple[float, int]], reported_s: float, now_s: float) -> dict[int, int]:
    """Return what routers reported in the minute before now, of traffic that changes to so many requests/s at times."""
    arrivals: dict[int, int] = {}
    for tenth in range(round(10 * (now_s - 60)), round(10 * reported_s) // 50 * 50):
        rate = next((rate for at_s, rate in reversed(changes) if at_s <= tenth / 10), 0)
        arrivals[tenth // 50] = arrivals.get(tenth // 50, 0) + rate
    return {window: count // 10 for window, count in arrivals.items()}


@pytest.mark.parametrize("ago_s", range(1, 90, 3))
@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("delay_s", [0, 3, 9])
def test_traffic_that_begins_or_grows_is_not_taken_for_less_than_it_is(ago_s: int, before: int, delay_s: int) -> None:
    now_s = 10_001.0
    arrivals = windows_of([(0, before), (now_s - ago_s, 20)], now_s - delay_s, now_s)
    rate = rate_per_s(30.0, arrivals, now_s)
    if before == 0:
        assert rate in (30.0, 20.0), "its own estimate at first, or what comes: nothing between"
        assert rate == 20 or ago_s < 35 + delay_s
    else:
        assert rate == 20 if ago_s > 25 + delay_s else 5 <= rate <= 20


def test_an_estimate_that_is_exceeded_does_not_count() -> None:
    for ago_s in range(11, 31):
        arrivals = windows_of([(10_001 - ago_s, 20)], 10_001.0, 10_001.0)
        assert rate_per_s(5.0, arrivals, 10_001.0) == 20


def test_traffic_that_ends_is_no_longer_planned_for() -> None:
    arrivals = windows_of([(0, 20), (10_000, 0)], 10_050.0, 10_050.0)
    assert rate_per_s(30.0, arrivals, 10_050.0) < 10
    assert rate_per_s(30.0, {}, 10_050.0) == 30.0
    silent = windows_of([(0, 20)], 10_000.0, 10_000.0)  # and then no router reports any more
    assert rate_per_s(30.0, silent, 10_010.0) == 20
    assert rate_per_s(30.0, silent, 10_050.0) < 10


async def test_a_zone_whose_grid_cannot_be_believed_keeps_no_other_fleet_from_its_baseline() -> None:
    start_at = datetime(2026, 1, 1, tzinfo=UTC)
    steps = [OutlookPoint(start_at=start_at, end_at=start_at + timedelta(hours=1), gco2_per_kwh=200, kind="measured")]

    class Grids(Carbon):
        def __init__(self) -> None: ...

        async def outlook(self, zone: str, **_: object) -> Any:
            points = steps if zone == "GB" else steps * 2  # two values for one hour
            return SimpleNamespace(now=start_at + timedelta(hours=2), points=points)

    assert await Baselines(Grids()).of([("XX", None), ("GB", None)]) == {("GB", None): 200.0}
