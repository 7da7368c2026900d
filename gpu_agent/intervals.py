"""Work and energy of gangs under controls that are being measured, between two progress reports.

An interval begins and ends with a progress report, so that it consists of whole iterations under the controls; the
iteration during which the controls took effect is left out. It ends with the first report after its minimum length. It
is kept in memory only: an agent that restarts begins it again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpu_agent.controls import Order
from gpu_agent.progress import Report
from services.contracts.nodes import MeasuredInterval


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    done: float | None
    energy_j: float


@dataclass(slots=True)
class _Interval:
    """One interval.

    ``found`` is the state when the controls were first seen in effect; ``first`` and ``last`` are later reports.
    ``done`` is the last reported progress, whether or not it is a mark.
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
    """The current intervals, by gang and revision of its controls."""

    def __init__(self) -> None:
        self._intervals: dict[tuple[str, int], _Interval] = {}

    def look(
        self, order: Order, report: Report | None, reported_at: float, now: float, energy_at: Callable[[float], float]
    ) -> bool:
        """Record the state of a gang whose controls are in effect; return whether that has ended its interval.

        Args:
            reported_at: Time of that report in seconds, on any monotonic clock.
            now: The current time on the same clock.
            energy_at: Returns the energy of the gang's devices on this node up to a time, from any origin.
        """
        done = report.done if report else None
        piece, here = self._intervals.get(order.key), _Mark(now, done, energy_at(now))
        if piece is None:
            self._intervals[order.key] = _Interval(here, here, done)
            return False
        piece.now = here
        if piece.over or done is None or (piece.done is not None and done <= piece.done):
            return False
        piece.done = done
        if reported_at < piece.found.at:
            return False  # it was reported before the controls took effect
        mark = _Mark(reported_at, done, energy_at(reported_at))
        piece.first, piece.last = piece.first or mark, mark
        piece.marks += 1
        piece.local_batch = report.local_batch if report else None
        piece.over = piece.marks > 1 and mark.at - piece.first.at >= order.settings.interval_s
        return piece.over

    def of(self, order: Order) -> MeasuredInterval | None:
        """Return the measurement so far; None if none was requested or the controls are not in effect yet."""
        piece = self._intervals.get(order.key)
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
        """Drop the intervals of all other gangs and revisions."""
        kept = {order.key for order in orders}
        self._intervals = {key: piece for key, piece in self._intervals.items() if key in kept}
