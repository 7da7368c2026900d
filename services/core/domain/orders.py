"""A grid operator's order: what a part of the cluster may draw at most, by time."""

import math
from dataclasses import dataclass

Curve = tuple[tuple[float, float], ...]
"""A step curve: (UTC seconds, watts), ascending, each in force until the next; no limit before the first."""

LEAD_S = 5.0  #: Falls of a limit are respected so much earlier: agents follow a command within a few seconds
STOPS_AHEAD_S = 120.0  #: Gangs are stopped so much earlier, the grace period in which they write a checkpoint
FALL_S = 600.0  #: Falls of a limit that follow one another sooner than this are foreseen as one
REBOUND = 0.05  #: How far the draw may exceed the baseline in the time after an order, as a share of it
RECOVERY_S = 3_600.0  #: That time, or the length of the order if it is shorter


@dataclass(frozen=True)
class PowerOrder:
    """An order as a round sees it; all draws are those of its scope, without service instances, watts.

    Attributes:
        limit_w, soon_w: The lowest limit from now until ``LEAD_S`` and until ``STOPS_AHEAD_S`` ahead; inf for none.
        falls_s, falls_w: When its limit next falls below ``soon_w``, UTC seconds, and to what; inf: never, or not
            before the cluster may prepare for it.
    """

    id: str
    zone: int  #: Index of its grid in ``Snapshot.outlooks``; -1 for the whole cluster
    limit_w: float
    soon_w: float
    changes_s: float  #: When one of the two changes next, UTC seconds; inf: never
    ends_s: float  #: When it ends, or the time after it, UTC seconds; inf: never, it is the cluster's own limit
    measured_w: float = math.nan  #: What the scope draws by its meters; NaN: unknown, or something has just changed
    ratio: float = 1.0  #: Measured over modelled draw, by the last rounds in which both were known
    falls_s: float = math.inf
    falls_w: float = math.inf
    other_w: float = 0.0
    """What else is drawn there, which nothing in the round can change: service instances, nodes asleep."""

    @property
    def limits(self) -> bool:
        """Whether it limits anything yet, or still."""
        return math.isfinite(self.soon_w)

    @property
    def bears(self) -> bool:
        """Whether it limits anything, or has been announced and will."""
        return self.limits or math.isfinite(self.falls_w)

    @property
    def stands(self) -> bool:
        """Whether it has no end."""
        return math.isinf(self.ends_s)


def curve_of(start_s: float, end_s: float, steps: Curve, baseline_w: float) -> Curve:
    """Return the limits that an order sets, and after it those that keep its rebound small.

    Args:
        start_s, end_s: When it begins and ends, UTC seconds.
        steps: (seconds since its start, watts), ascending from 0.
        baseline_w: What its scope would draw without it, watts.
    """
    recovers_s = min(end_s - start_s, RECOVERY_S)
    after = ((end_s, (1 + REBOUND) * baseline_w), (end_s + recovers_s, math.inf))
    return (*((start_s + offset_s, watts) for offset_s, watts in steps if start_s + offset_s < end_s), *after)


def joined(before: Curve, after: Curve, at_s: float) -> Curve:
    """Return the curve that is one until a time, when the other has begun, and that other from then on."""
    now_w = [watts for since_s, watts in after if since_s <= at_s][-1]
    return (*(step for step in before if step[0] < at_s), (at_s, now_w), *(step for step in after if step[0] > at_s))


def least_of(curve: Curve, begin_s: float, end_s: float) -> float:
    """Return the lowest limit of a curve over ``begin_s <= t <= end_s``, watts; inf if none is in force."""
    least = math.inf
    for at, (since_s, watts) in enumerate(curve):
        until_s = curve[at + 1][0] if at + 1 < len(curve) else math.inf
        if since_s <= end_s and until_s > begin_s:
            least = min(least, watts)
    return least


def standing(limit_w: float, *, other_w: float, measured_w: float) -> PowerOrder:
    """Return what a cluster may draw at any time, as an order; arguments as for ``order_at``."""
    left_w = limit_w - other_w
    return PowerOrder("limit", -1, left_w, left_w, math.inf, math.inf, measured_w, other_w=other_w)


def order_at(
    order_id: str, zone: int, curve: Curve, now_s: float, *, other_w: float = 0.0, measured_w: float = math.nan
) -> PowerOrder:
    """Return an order as a round at ``now_s`` sees it."""
    leads = (0.0, LEAD_S, STOPS_AHEAD_S)
    changes = [at_s - lead_s for at_s, _ in curve for lead_s in leads if at_s - lead_s > now_s]
    soon_w = least_of(curve, now_s, now_s + STOPS_AHEAD_S)
    falls_s = min((at_s for at_s, watts in curve if at_s > now_s + STOPS_AHEAD_S and watts < soon_w), default=math.inf)
    return PowerOrder(
        order_id,
        zone,
        least_of(curve, now_s, now_s + LEAD_S) - other_w,
        soon_w - other_w,
        min(changes, default=math.inf),
        next((at_s for at_s, _ in curve[-2:] if at_s > now_s), curve[-1][0]),
        measured_w,
        falls_s=falls_s,
        falls_w=least_of(curve, falls_s, falls_s + FALL_S) - other_w if falls_s < math.inf else math.inf,
        other_w=other_w,
    )
