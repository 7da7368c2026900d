"""What gangs do under settings that are being measured: their work and energy between two reports of progress.

A slice is counted from a report of progress to a report of progress, so that it holds whole iterations done under the
setting; the iteration in which the setting came into force belongs to none. It lives in memory: an agent that starts
anew begins the slice anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_agent.controls import Order
from gpu_agent.progress import Report
from services.contracts.nodes import SettingsSlice

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    done: float | None
    energy_j: float


@dataclass(slots=True)
class _Slice:
    """``found`` is how things stood when the settings were found in force; marks are the first and the last since."""

    found: _Mark
    now: _Mark
    first: _Mark | None = None
    last: _Mark | None = None
    marks: int = 0
    local_batch: float | None = None


class Slices:
    """The slices under way, by gang and revision of its settings."""

    def __init__(self) -> None:
        self._slices: dict[Key, _Slice] = {}

    def look(self, order: Order, report: Report | None, at: float, energy_j: float) -> None:
        """Take note of how a gang stands whose settings are in force.

        Args:
            order: The gang's settings.
            report: What the job said last.
            at: Now, on any steady clock, seconds.
            energy_j: Energy of its devices here, from any beginning.
        """
        mark = _Mark(at, report.done if report else None, energy_j)
        piece = self._slices.get(_key(order))
        if piece is None:
            self._slices[_key(order)] = _Slice(mark, mark)
            return
        piece.now = mark
        before = (piece.last or piece.found).done
        if mark.done is None or (before is not None and mark.done <= before):
            return
        piece.first, piece.last = piece.first or mark, mark
        piece.marks += 1
        piece.local_batch = report.local_batch if report else None

    def of(self, order: Order) -> SettingsSlice | None:
        """Return what was measured so far; None where nothing is to be, or the settings are not in force yet."""
        piece = self._slices.get(_key(order))
        if piece is None:
            return None
        first, last = (piece.first, piece.last) if piece.first and piece.last else (piece.found, piece.now)
        return SettingsSlice(
            elapsed_s=last.at - first.at,
            work=(last.done or 0.0) - (first.done or 0.0) if piece.marks else 0.0,
            gpu_energy_j=max(last.energy_j - first.energy_j, 0.0),
            marks=piece.marks,
            local_batch=piece.local_batch,
        )

    def forget_all_but(self, orders: Iterable[Order]) -> None:
        """Drop the slices of all other gangs and revisions."""
        kept = {_key(order) for order in orders}
        self._slices = {key: piece for key, piece in self._slices.items() if key in kept}


def _key(order: Order) -> Key:
    return order.allocation_id, order.settings.revision
