"""Control values by marginal return: the second half of Algorithm 1.

Every gang starts at the control value (a clock or a power limit) that does its work for the least energy. The gang with
the largest marginal return takes the next value, until every gang is at its fastest or no step fits below the power
limit; a step that would exceed it is not taken, and the gangs whose steps still fit go on. A value is never chosen if
another gives the same speed for less power.

The most efficient values may together exceed the limit. In Algorithm 1 that cannot happen, as it has just given out
GPUs for them, but it can in a round if the limit has fallen or stopping gangs still draw power. Then values fall: at
each step the one that slows its gang least per watt.

Lines 29 and 30 as printed update priority_G and QueueD; by the text they should be priority_F and QueueF.

Source: PowerFlow section 5.2, eq. 21, Algorithm 1 lines 21-30.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints


def allocate_controls(speed: Floats, power_w: Floats, limit_w: float, work_s: Floats | None = None) -> Ints:
    """Return the control value of each gang: (n_gangs,) index into the tables' second axis.

    If even the lowest control values together exceed the limit, those are returned.

    Args:
        speed: (n_gangs, n_values) work per second at each control value, 0 where the gang has no such value; at least
            one is above 0.
        power_w: (n_gangs, n_values) draw of the whole gang, watts.
        limit_w: What the gangs may draw together, watts.
        work_s: (n_gangs,) seconds of work left at speed 1, for a return in time saved per watt (``marginal`` is
            ``power``); None for eq. 21 as printed, which does not use it.
    """
    if not len(speed):
        return np.empty(0, dtype=np.int64)
    ladders = ladders_of(speed, power_w)
    at: list[int] = ladders.start.tolist()
    rows = np.arange(len(speed))
    drawn_w = float(ladders.power_w[rows, ladders.start].sum())
    if drawn_w > limit_w:
        _lower(ladders, at, drawn_w, limit_w)
    else:
        _raise(ladders, at, drawn_w, limit_w, work_s)
    return ladders.value[rows, at]


@dataclass(frozen=True)
class Ladders:
    """The control values worth choosing, one row per gang: each faster than the last and drawing more."""

    value: Ints  #: (n_gangs, n_values) indices into the tables, packed to the left
    time_s: Floats  #: (n_gangs, n_values) time per work; inf beyond the last
    power_w: Floats  #: (n_gangs, n_values) draw; inf beyond the last
    length: Ints  #: (n_gangs,) how many values there are
    start: Ints  #: (n_gangs,) the most efficient of them


def ladders_of(speed: Floats, power_w: Floats) -> Ladders:
    """Return the control values worth choosing; arguments as for ``allocate_controls``."""
    draw_w = np.where(speed > 0, power_w, np.inf)
    by_draw = np.lexsort((-speed, draw_w), axis=1)
    sorted_speed = np.take_along_axis(speed, by_draw, axis=1)
    fastest = np.maximum.accumulate(sorted_speed, axis=1)
    faster = sorted_speed > np.concatenate((np.zeros((len(speed), 1)), fastest[:, :-1]), axis=1)
    packed = np.argsort(~faster, axis=1, kind="stable")
    value = np.take_along_axis(by_draw, packed, axis=1)
    length: Ints = np.count_nonzero(faster, axis=1)
    places: Ints = np.arange(speed.shape[1], dtype=np.int64)
    beyond: Bools = places >= length[:, None]
    chosen = np.where(beyond, 1.0, np.take_along_axis(speed, value, axis=1))
    time_s = np.where(beyond, np.inf, 1.0 / chosen)
    draws = np.where(beyond, np.inf, np.take_along_axis(power_w, value, axis=1))
    energy = np.multiply(time_s, draws, out=np.full(time_s.shape, np.inf), where=~beyond)
    return Ladders(value, time_s, draws, length, energy.argmin(axis=1))


def _raise(ladders: Ladders, at: list[int], drawn_w: float, limit_w: float, work_s: Floats | None) -> None:
    """Take steps up, largest marginal return first (eq. 21), as long as they fit within the limit."""
    with np.errstate(invalid="ignore"):  # inf - inf beyond the last control value, which is never looked at
        gain, step_w = -np.diff(ladders.time_s, axis=1), np.diff(ladders.power_w, axis=1)
        cost = np.diff(ladders.time_s * ladders.power_w, axis=1)
        if work_s is not None:
            gain, cost = gain * work_s[:, None], step_w
        returns: list[list[float]] = np.where(cost > 0, -gain / np.where(cost > 0, cost, 1.0), -np.inf).tolist()
        more_w: list[list[float]] = step_w.tolist()
    last: list[int] = (ladders.length - 1).tolist()
    heap = [(returns[gang][at[gang]], gang) for gang in range(len(at)) if at[gang] < last[gang]]
    heapify(heap)
    while heap:
        _, gang = heappop(heap)
        if drawn_w + more_w[gang][at[gang]] > limit_w:
            continue
        drawn_w += more_w[gang][at[gang]]
        at[gang] += 1
        if at[gang] < last[gang]:
            heappush(heap, (returns[gang][at[gang]], gang))


def _lower(ladders: Ladders, at: list[int], drawn_w: float, limit_w: float) -> None:
    """Take steps down, least loss of speed per watt first, until the limit holds or nothing is left to lower."""
    with np.errstate(invalid="ignore"):
        less_w = np.diff(ladders.power_w, axis=1)
        losses: list[list[float]] = (-np.diff(ladders.time_s, axis=1) / less_w).tolist()
    saved_w: list[list[float]] = less_w.tolist()
    heap = [(losses[gang][at[gang] - 1], gang) for gang in range(len(at)) if at[gang]]
    heapify(heap)
    while heap and drawn_w > limit_w:
        _, gang = heappop(heap)
        at[gang] -= 1
        drawn_w -= saved_w[gang][at[gang]]
        if at[gang]:
            heappush(heap, (losses[gang][at[gang] - 1], gang))
