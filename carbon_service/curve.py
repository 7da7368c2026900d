"""One curve of contiguous steps from measured intervals with gaps. Pure: times are UTC seconds, values gCO2/kWh."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

import numpy as np

from carbon_service.providers.protocol import Feed, Point
from services.core.domain.carbon import CarbonCurve


class Kind(StrEnum):
    """How a step's value was obtained."""

    MEASURED = "measured"
    HELD = "held"
    PROVIDER = "provider"
    LEARNED = "learned"
    PERSISTENCE = "persistence"


@dataclass(frozen=True, slots=True)
class Step:
    """A value in force over ``[start_s, end_s)``; ``fetched_s`` is when it was fetched or learned, if it was."""

    start_s: float
    end_s: float
    gco2_per_kwh: float
    kind: Kind
    is_estimated: bool = True
    p10: float | None = None
    p90: float | None = None
    fetched_s: float | None = field(default=None, compare=False)


def clipped(steps: Iterable[Step], start_s: float, end_s: float) -> list[Step]:
    """Return the parts of the steps that lie in ``[start_s, end_s)``."""
    return [
        replace(step, start_s=max(step.start_s, start_s), end_s=min(step.end_s, end_s))
        for step in steps
        if step.end_s > start_s and step.start_s < end_s
    ]


def joined(steps: Sequence[Step]) -> list[Step]:
    """Return steps in chronological order without gaps from rounding: each ends exactly where the next begins."""
    ends = [following.start_s for _, following in pairwise(steps)] + [step.end_s for step in steps[-1:]]
    return [replace(step, end_s=end) for step, end in zip(steps, ends, strict=True) if end > step.start_s]


def value_at(points: Sequence[Point], time_s: float) -> float | None:
    """Return the value in force at ``time_s``; ``None`` in a gap."""
    index = bisect_right(points, time_s, key=lambda point: point.start_s) - 1
    return points[index].gco2_per_kwh if index >= 0 and time_s < points[index].end_s else None


def filled(points: Sequence[Point], start_s: float, end_s: float, feed: Feed) -> list[Step]:
    """Return the measured points over ``[start_s, end_s)`` with their gaps filled.

    A gap takes the values of the same hour one or two days before, else the last value before it; before the first
    point there is none, so the curve begins there.

    Args:
        points: Measured points in chronological order; those before ``start_s`` serve to fill gaps.
        feed: How long a step and a day of this grid last.
    """
    steps: list[Step] = []
    reached_s = start_s
    last: Point | None = None
    for point in points:
        if point.start_s >= end_s:
            break
        if last is not None and point.start_s > reached_s:
            steps += _bridge(points, reached_s, point.start_s, last.gco2_per_kwh, feed)
        if point.end_s > reached_s:
            begins_s, ends_s = max(point.start_s, reached_s), min(point.end_s, end_s)
            kind, estimated = Kind.MEASURED, point.is_estimated
            steps.append(Step(begins_s, ends_s, point.gco2_per_kwh, kind, estimated, fetched_s=point.fetched_s))
            reached_s = ends_s
        last = point
    if last is not None and reached_s < end_s:
        steps += _bridge(points, reached_s, end_s, last.gco2_per_kwh, feed)
    return joined(steps)


def _bridge(points: Sequence[Point], start_s: float, end_s: float, before: float, feed: Feed) -> list[Step]:
    """Return steps over a gap; ``before`` is the last value before it."""
    count = max(1, int(np.ceil((end_s - start_s) / feed.step_s - 1e-6)))
    steps: list[Step] = []
    for index in range(count):
        at_s = round(start_s + index * feed.step_s, 6)
        ends_s = end_s if index == count - 1 else round(at_s + feed.step_s, 6)
        middle_s = (at_s + ends_s) / 2
        earlier = (value_at(points, middle_s - days * feed.day_s) for days in (1, 2))
        value = next((found for found in earlier if found is not None), before)
        steps.append(Step(at_s, ends_s, value, Kind.HELD))
    return steps


def as_curve(steps: Sequence[Step]) -> CarbonCurve:
    """Return contiguous steps as the core's curve; ``DomainError`` if there are no steps."""
    return CarbonCurve(
        times_s=np.array([step.start_s for step in steps], dtype=np.float64),
        intensity_gco2_per_kwh=np.array([step.gco2_per_kwh for step in steps], dtype=np.float64),
        end_s=steps[-1].end_s if steps else 0.0,
        estimated=np.array([step.kind is not Kind.MEASURED or step.is_estimated for step in steps], dtype=np.bool_),
    )
