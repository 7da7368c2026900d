"""How the intensity of an interval is read from measured history and from an outlook."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import cast

import pytest
from pydantic import ValidationError

from services.contracts.carbon import IntensityHistory, IntensityOutlook, IntensityPoint, OutlookPoint, curve_of
from services.core.domain.carbon import Signal
from services.kit.carbon import Carbon
from services.telemetry.intensity import Intensity, IntensitySource, KnownCurve, Origin, origins_of
from services.telemetry.settings import TelemetrySettings
from tests.support.carbon import FakeCarbon


def at(time_s: float) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)


def a_point(start_s: float, end_s: float, value: float, *, is_estimated: bool = False) -> IntensityPoint:
    return IntensityPoint(start_at=at(start_s), end_at=at(end_s), gco2_per_kwh=value, is_estimated=is_estimated)


def an_outlook_point(start_s: float, end_s: float, value: float, kind: str) -> OutlookPoint:
    return OutlookPoint.model_validate(
        {"start_at": at(start_s), "end_at": at(end_s), "gco2_per_kwh": value, "kind": kind}
    )


def test_only_measured_steps_of_an_outlook_are_known() -> None:
    kinds = ["measured", "held", "provider", "learned", "persistence"]
    curve = curve_of([an_outlook_point(10 * i, 10 * i + 10, float(i), kind) for i, kind in enumerate(kinds)])

    assert curve.estimated.tolist() == [False, True, True, True, True]
    assert curve.end_s == 50


def test_energy_from_before_the_curve_is_priced_by_its_first_value_as_an_estimate() -> None:
    """Half of the interval lies before the curve: the first value counts for it with its full weight."""
    known = KnownCurve(curve_of([a_point(0, 10, 100), a_point(10, 20, 400)]), Signal.MARGINAL, 20.0)

    assert known.during(-10, 20) == Intensity((20 * 100 + 10 * 400) / 30, Signal.MARGINAL, estimated=True)
    assert known.during(10, 30) == Intensity(400, Signal.MARGINAL, estimated=True)
    assert known.during(5, 15) == Intensity(250, Signal.MARGINAL, estimated=False)
    assert known.during(15, 15) == Intensity(400, Signal.MARGINAL, estimated=False)


def test_an_intensity_names_the_least_certain_value_in_it_and_the_newest_fetch() -> None:
    points = [
        an_outlook_point(0, 10, 100.0, "measured").model_copy(update={"fetched_at": at(12)}),
        an_outlook_point(10, 20, 300.0, "measured").model_copy(update={"fetched_at": at(22), "is_estimated": True}),
        an_outlook_point(20, 30, 500.0, "provider").model_copy(update={"fetched_at": at(5)}),
    ]
    known = KnownCurve(curve_of(points), Signal.MARGINAL, 20.0, origins_of("uk", points))

    assert known.during(0, 10).origin == Origin("uk", "measured", at(12))  # what begins at its end is no part of it
    assert known.during(5, 15).origin == Origin("uk", "estimated", at(22))
    assert known.during(15, 25).origin == Origin("uk", "provider", at(22))
    assert known.during(20, 20).origin == Origin("uk", "provider", at(5))


def test_a_gap_of_the_history_is_no_measured_value() -> None:
    points = [a_point(0, 10, 100), a_point(30, 40, 400), a_point(40, 50, 70, is_estimated=True)]
    history = IntensityHistory(zone="Z", signal=Signal.MARGINAL, provider="uk", points=points)
    known = KnownCurve(history.as_domain().curve, Signal.MARGINAL, 50.0, origins_of("uk", points))

    found = [known.during(at_s, at_s + 5) for at_s in (0, 15, 30, 40)]

    assert [each.origin.kind for each in found] == ["measured", "estimated", "measured", "estimated"]
    assert [(each.gco2_per_kwh, each.estimated) for each in found] == [
        (100, False),
        (100, True),
        (400, False),
        (70, True),
    ]


class MarginalByDefault(FakeCarbon):
    """A carbon service whose own signal is marginal, and that has an average one for who asks for it."""

    async def outlook_of(self, zone: str, *, signal: Signal | None = None, **_: object) -> IntensityOutlook:
        self.asked += 1
        self.signal = signal or Signal.MARGINAL
        self.flat(900.0 if self.signal is Signal.MARGINAL else 300.0)
        return self.outlook(zone)


async def test_a_marginal_signal_is_no_basis_of_accounts() -> None:
    service = MarginalByDefault()

    async def nothing(zone: str) -> Intensity | None:
        return None

    source = IntensitySource(cast(Carbon, SimpleNamespace(outlook=service.outlook_of)), nothing, refresh_s=0.0)
    for _ in range(2):
        found = await source.during("Z", 10.0, 3e9)
        assert (found.gco2_per_kwh, found.signal) == (300.0, Signal.AVERAGE_DIRECT)
    assert service.asked == 3, "it is asked for the average at once from then on"
    with pytest.raises(ValidationError, match="no basis of accounts"):
        TelemetrySettings(signal=Signal.MARGINAL, **{"WATTSHIFT_NODE_JOIN_TOKEN": "t" * 20})  # type: ignore[arg-type]
