"""Forecasts: the provider's as far as it reaches, then the learned one, then persistence."""

import math
from collections.abc import Sequence
from dataclasses import replace

from carbon_service.curve import Kind, Step, clipped, filled, joined
from carbon_service.providers.protocol import Feed, ForecastIssue, Point


def persistence(points: Sequence[Point], start_s: float, end_s: float, feed: Feed) -> list[Step]:
    """Return "the same hour of the last known day" over ``[start_s, end_s)``; nothing if nothing is known.

    Every day ahead repeats the last 24 measured hours of the grid. If less than a day is known, its missing hours take
    the last value.

    Args:
        points: Measured points in chronological order; with two days of them, gaps in the last day can be filled.
        start_s: Where the forecast begins, not before the last measured interval ends.
        feed: How long a step and a day of this grid last.
    """
    if not points:
        return []
    day_s, known_until_s = feed.day_s, points[-1].end_s
    pattern = filled(points, known_until_s - day_s, known_until_s, feed)
    if (begins_s := pattern[0].start_s) > known_until_s - day_s:
        lacking = Step(known_until_s - day_s, begins_s, points[-1].gco2_per_kwh, Kind.PERSISTENCE)
        pattern.insert(0, lacking)
    steps: list[Step] = []
    first, last = math.floor((start_s - known_until_s) / day_s) + 1, math.ceil((end_s - known_until_s) / day_s)
    for days in range(max(1, first), last + 1):
        shift_s = days * day_s
        steps += [
            Step(round(step.start_s + shift_s, 6), round(step.end_s + shift_s, 6), step.gco2_per_kwh, Kind.PERSISTENCE)
            for step in pattern
        ]
    return clipped(joined(steps), start_s, end_s)


def ahead(
    points: Sequence[Point],
    issue: ForecastIssue | None,
    start_s: float,
    end_s: float,
    feed: Feed,
    learned: Sequence[Step] = (),
) -> list[Step]:
    """Return the provider's forecast over ``[start_s, end_s)``, the learned one where there is none, else persistence.

    The steps are contiguous and begin at ``start_s``, unless nothing was ever measured and the forecasts begin later.
    """
    own = _over(persistence(points, start_s, end_s, feed), learned, start_s, end_s)
    if issue is None:
        return own
    given = [Step(p.start_s, p.end_s, p.gco2_per_kwh, Kind.PROVIDER, fetched_s=p.fetched_s) for p in issue.points]
    return _over(own, given, start_s, end_s)


def _over(own: Sequence[Step], given: Sequence[Step], start_s: float, end_s: float) -> list[Step]:
    """Return the given steps over ``[start_s, end_s)``, with our own steps in their gaps."""
    steps: list[Step] = []
    reached_s = start_s
    for step in clipped(given, start_s, end_s):
        if step.end_s <= reached_s:
            continue
        steps += clipped(own, reached_s, step.start_s)
        steps.append(replace(step, start_s=max(step.start_s, reached_s)))
        reached_s = step.end_s
    return joined(steps + clipped(own, reached_s, end_s))


def merged(
    points: Sequence[Point],
    issue: ForecastIssue | None,
    feed: Feed,
    now_s: float,
    start_s: float,
    end_s: float,
    learned: Sequence[Step] = (),
) -> list[Step]:
    """Return history, present and forecast over ``[start_s, end_s)`` as one contiguous curve.

    Measured values hold until the next one is due; after that a value is stale and the forecast is used. The forecast
    must not have been made later than ``now_s``, and measured points may not begin after ``now_s``.
    """
    if not points:
        return ahead(points, issue, start_s, end_s, feed, learned)
    last = points[-1]
    known_until_s = last.end_s
    held_until_s = known_until_s
    if known_until_s <= now_s:
        held_until_s = max(known_until_s, min(last.start_s + feed.max_age_s, now_s + feed.step_s))
    past = filled(points, start_s, min(known_until_s, end_s), feed)
    if held_until_s > known_until_s:
        held = Step(known_until_s, held_until_s, last.gco2_per_kwh, Kind.HELD, fetched_s=last.fetched_s)
        past += clipped([held], start_s, end_s)
    return joined(past + ahead(points, issue, max(held_until_s, start_s), end_s, feed, learned))


def is_stale(points: Sequence[Point], feed: Feed, now_s: float) -> bool:
    """Return whether the newest measured value is past its maximum age; True if there is none."""
    return not points or now_s - points[-1].start_s > max(feed.max_age_s, points[-1].end_s - points[-1].start_s)
