"""Measured points of one job, one row per configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.core.domain.arrays import Bools, Floats
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError

COLUMN_OF = {ControlKind.CLOCK: "clock_mhz", ControlKind.POWER_LIMIT: "power_limit_w"}
"""What a control is called where there is a column of it."""

PLAUSIBLE = {
    "gpus": (1, 100_000, "GPUs"),
    "local_batch": (1e-3, 1e8, "samples per GPU"),
    "nodes": (1, 100_000, "nodes"),
    "seconds_per_iteration": (1e-5, 1e4, "seconds"),
    "energy_j_per_iteration": (1e-4, 1e10, "joules"),
}
"""Per column the range outside of which the unit must be wrong."""
PLAUSIBLE_CONTROL = {ControlKind.CLOCK: (100.0, 5_000.0, "MHz"), ControlKind.POWER_LIMIT: (20.0, 3_000.0, "W")}
PLAUSIBLE_POWER_W = (1.0, 3_000.0)
"""Mean draw of one board; catches milliseconds beside joules and seconds beside millijoules."""


class PointError(DomainError):
    """An impossible point; ``row`` is its index among the points given."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


@dataclass(frozen=True)
class Observations:
    """Measured points; every array is (n,). A column that was not observed has one value, and is in ``absent``.

    Raises:
        PointError: a value is NaN, not positive, beyond any plausible unit, or contradicts another.
    """

    axis: ControlKind  #: What ``control`` is
    gpus: Floats  #: GPUs of the gang (``n``), whole numbers >= 1
    local_batch: Floats  #: Samples per GPU and iteration (``bs``)
    control: Floats  #: Clock, MHz (``f``), or power limit, W, by ``axis``
    nodes: Floats  #: Nodes that the gang spans; GPUs per node (``r``) is ``gpus / nodes``
    seconds_per_iteration: Floats  #: Mean step time (``T_iter``)
    energy_j_per_iteration: Floats  #: Energy of all the gang's GPUs in one step (``E_iter``); NaN where not measured
    count: Floats  #: How many measurements each point is the mean of
    absent: frozenset[str] = field(default_factory=frozenset[str])
    """Which of the four columns of a configuration were not observed."""

    def __post_init__(self) -> None:
        columns = self._columns()
        if len({column.shape for column in columns.values()}) != 1 or self.gpus.ndim != 1:
            shapes = ", ".join(f"{name} {column.shape}" for name, column in columns.items())
            raise DomainError(f"observations need columns of one length: {shapes}")
        for name, column in columns.items():
            self._check_range(name, column)
        _refuse(self.gpus != np.rint(self.gpus), lambda at: f"gpus is {self.gpus[at]:g}, not a whole number")
        _refuse(self.nodes != np.rint(self.nodes), lambda at: f"nodes is {self.nodes[at]:g}, not a whole number")
        _refuse(self.nodes > self.gpus, lambda at: f"{self.nodes[at]:g} nodes for {self.gpus[at]:g} GPUs")
        power_w = self.power_w
        low, high = PLAUSIBLE_POWER_W
        _refuse(
            (power_w < low) | (power_w > high),
            lambda at: (
                f"{self.energy_j_per_iteration[at]:g} J in {self.seconds_per_iteration[at]:g} s on {self.gpus[at]:g} "
                f"GPUs is {power_w[at]:.3g} W each, which no board draws; wrong units?"
            ),
        )

    @classmethod
    def of(
        cls,
        seconds_per_iteration: Sequence[float] | Floats,
        *,
        gpus: Sequence[float] | Floats | None = None,
        local_batch: Sequence[float] | Floats | None = None,
        control: Sequence[float] | Floats | None = None,
        nodes: Sequence[float] | Floats | None = None,
        energy_j_per_iteration: Sequence[float] | Floats | None = None,
        mean_power_w: Sequence[float] | Floats | None = None,
        axis: ControlKind = ControlKind.CLOCK,
    ) -> Observations:
        """Return observations from columns (n,), of which only times are required; ``mean_power_w`` is per GPU."""
        time_s = np.atleast_1d(np.asarray(seconds_per_iteration, dtype=np.float64))
        given = {"gpus": gpus, "local_batch": local_batch, COLUMN_OF[axis]: control, "nodes": nodes}

        def column(values: Sequence[float] | Floats | None, default: float) -> Floats:
            if values is None:
                return np.full(time_s.shape, default)
            return np.atleast_1d(np.asarray(values, dtype=np.float64))

        size = column(gpus, 1.0)
        if energy_j_per_iteration is None and mean_power_w is not None:
            energy_j_per_iteration = column(mean_power_w, np.nan) * time_s * size
        return cls(
            axis=axis,
            gpus=size,
            local_batch=column(local_batch, 1.0),
            control=column(control, 1_000.0),
            nodes=column(nodes, 1.0),
            seconds_per_iteration=time_s,
            energy_j_per_iteration=column(energy_j_per_iteration, np.nan),
            count=np.ones(time_s.shape),
            absent=frozenset(name for name, values in given.items() if values is None),
        )

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def power_w(self) -> Floats:
        """Mean draw of one GPU, W, (n,); NaN where the energy was not measured."""
        return self.energy_j_per_iteration / (self.seconds_per_iteration * self.gpus)

    @property
    def with_energy(self) -> Bools:
        """Which points have an energy, (n,)."""
        return ~np.isnan(self.energy_j_per_iteration)

    def take(self, rows: NDArray[Any]) -> Observations:
        """Return the points at these indices, or where a mask holds."""
        return Observations(
            axis=self.axis, absent=self.absent, **{name: column[rows] for name, column in self._columns().items()}
        )

    def merged(self) -> Observations:
        """Return one point per configuration, in order of first appearance, with means weighted by count."""
        keys = np.column_stack([self.gpus, self.local_batch, self.control, self.nodes])
        _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        group, n_groups = group.reshape(-1), len(first)
        with_energy = np.where(self.with_energy, self.count, 0.0)
        count = np.bincount(group, self.count, n_groups).astype(np.float64)
        energy_count = np.bincount(group, with_energy, n_groups)
        time_s = np.bincount(group, self.count * self.seconds_per_iteration, n_groups) / count
        known_j = np.bincount(group, with_energy * np.nan_to_num(self.energy_j_per_iteration), n_groups)
        energy_j = np.where(energy_count > 0, known_j / np.maximum(energy_count, 1.0), np.nan)
        order = np.argsort(first)
        means = {"count": count, "seconds_per_iteration": time_s, "energy_j_per_iteration": energy_j}
        return replace(self.take(first[order]), **{name: column[order] for name, column in means.items()})

    def _columns(self) -> dict[str, Floats]:
        names = ("gpus", "local_batch", "control", "nodes", "seconds_per_iteration", "energy_j_per_iteration", "count")
        return {name: getattr(self, name) for name in names}

    def _check_range(self, name: str, column: Floats) -> None:
        shown = COLUMN_OF[self.axis] if name == "control" else name
        low, high, unit = PLAUSIBLE_CONTROL[self.axis] if name == "control" else PLAUSIBLE.get(name, (0.0, np.inf, ""))
        optional = name == "energy_j_per_iteration"
        missing = ~np.isfinite(column) & ~(np.isnan(column) & optional)
        _refuse(missing, lambda at: f"{shown} is {column[at]}, not a number")
        _refuse(column <= 0, lambda at: f"{shown} is {column[at]:g}, not positive")
        _refuse(
            (column < low) | (column > high),
            lambda at: f"{shown} is {column[at]:g}, outside {low:g}..{high:g} {unit}; wrong units?",
        )


def _refuse(wrong: Bools, say: Callable[[int], str]) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise PointError(row, say(row))
