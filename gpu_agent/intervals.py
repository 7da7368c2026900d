"""What gangs do under settings that are being measured: their work and energy between two reports of progress.

A slice is counted from a report of progress to a report of progress, so that it holds whole iterations done under the
setting; the iteration in which the setting came into force belongs to none. It is over at the first report after its
share of time. It lives in memory: an agent that starts anew begins the slice anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpu_agent.controls import Order
from gpu_agent.progress import Report
from services.contracts.nodes import MeasuredInterval

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    done: float | None
    energy_j: float


@dataclass(slots=True)
class _Interval:
    """``found`` is how things stood when the settings were found in force; marks are the first and the last since.

    ``done`` is the progress last heard of, mark or not.
    """

    found: _Mark
    now: _Mark
    done: float | None
    first: _Mark | None = None
    last: _Mark | None = None
    marks: int = 0
    over: bool = False
    local_batch: float | None = None


class Intervals:
    """The slices under way, by gang and revision of its settings."""

    def __init__(self) -> None:
        self._intervals: dict[Key, _Interval] = {}

    def look(
        self, order: Order, report: Report | None, reported_at: float, now: float, energy_at: Callable[[float], float]
    ) -> bool:
        """Take note of how a gang stands whose settings are in force; return whether that has ended its slice.

        Args:
            order: The gang's settings.
            report: What the job said last.
            reported_at: When it did, on any steady clock, seconds.
            now: On the same clock.
            energy_at: Energy of its devices here up to a moment, from any beginning.
        """
        done = report.done if report else None
        piece = self._intervals.get(_key(order))
        if piece is None:
            found = _Mark(now, done, energy_at(now))
            self._intervals[_key(order)] = _Interval(found, found, done)
            return False
        piece.now = _Mark(now, done, energy_at(now))
        if piece.over or done is None or (piece.done is not None and done <= piece.done):
            return False
        piece.done = done
        if reported_at < piece.found.at:
            return False  # it was reported before the settings were in force
        mark = _Mark(reported_at, done, energy_at(reported_at))
        piece.first, piece.last = piece.first or mark, mark
        piece.marks += 1
        piece.local_batch = report.local_batch if report else None
        piece.over = piece.marks > 1 and mark.at - piece.first.at >= order.settings.slice_s
        return piece.over

    def of(self, order: Order) -> MeasuredInterval | None:
        """Return what was measured so far; None where nothing is to be, or the settings are not in force yet."""
        piece = self._intervals.get(_key(order))
        if piece is None:
            return None
        first, last = (piece.first, piece.last) if piece.first and piece.last else (piece.found, piece.now)
        return MeasuredInterval(
            elapsed_s=last.at - first.at,
            work=(last.done or 0.0) - (first.done or 0.0) if piece.marks else 0.0,
            gpu_energy_j=max(last.energy_j - first.energy_j, 0.0),
            marks=piece.marks,
            over=piece.over,
            local_batch=piece.local_batch,
        )

    def forget_all_but(self, orders: Iterable[Order]) -> None:
        """Drop the slices of all other gangs and revisions."""
        kept = {_key(order) for order in orders}
        self._intervals = {key: piece for key, piece in self._intervals.items() if key in kept}


def _key(order: Order) -> Key:
    return order.allocation_id, order.settings.revision
