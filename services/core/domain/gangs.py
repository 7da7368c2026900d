"""What gangs of one kind of job do on one GPU model: speed and power by size and by control value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError


@dataclass(frozen=True, eq=False)
class GangTable:
    """Predicted or measured; linear between sizes. Outside, power per GPU and speed are those of the nearest size."""

    gpus: Ints  #: (n_sizes,) gang sizes, ascending
    speed: Floats  #: (n_sizes, n_values) seconds of work done per second
    power_w: Floats  #: (n_sizes, n_values) draw of the whole gang with its share of the hosts, watts
    kind: ControlKind | None
    """The control that is set; None if none can be set or nothing is known about it; then there is one value."""
    values: Floats  #: (n_values,) watts or MHz, ascending; the last is the default
    power_error: float = 0.0
    """The mean error that the underlying model states for its powers, as a share of them; 0: measured."""

    def __post_init__(self) -> None:
        shape = self.gpus.size, self.values.size
        if not all(shape) or self.speed.shape != shape or self.power_w.shape != shape:
            raise DomainError("a gang's table needs one speed and one power per size and control value")
        if not all(table.min() > 0 and table.max() < np.inf for table in (self.speed, self.power_w)):
            raise DomainError("speeds and powers are finite and above 0")
        if self.gpus[0] < 1 or bool((np.diff(self.gpus) <= 0).any()) or bool((np.diff(self.values) <= 0).any()):
            raise DomainError("gang sizes ascend from at least 1, and control values ascend")
        if self.kind is None and self.values.size != 1:
            raise DomainError("without a kind of control there is one control value")

    def at(self, gpus: Ints) -> tuple[Floats, Floats]:
        """Return speed and power at each size: (n,) to (n, n_values) each."""
        lower, upper, share = _between(self.gpus, gpus)
        share = share[:, None]
        per_gpu_w = self.power_w / self.gpus[:, None]
        speed = self.speed[lower] * (1 - share) + self.speed[upper] * share
        drawn = per_gpu_w[lower] * (1 - share) + per_gpu_w[upper] * share
        return speed, drawn * np.asarray(gpus)[:, None]

    def default_only(self) -> GangTable:
        """Return the table for a place where no control can be set."""
        return GangTable(self.gpus, self.speed[:, -1:], self.power_w[:, -1:], None, self.values[-1:], self.power_error)


class StackedTables:
    """Many tables in which gangs can be looked up at once: those of equal sizes and value counts share one array."""

    def __init__(self, tables: Sequence[GangTable]) -> None:
        self.kinds = [table.kind for table in tables]  #: The kind of each table
        self.n_values: Ints = np.array([table.values.size for table in tables], dtype=np.int64)
        """(n_tables,) how many control values each has."""
        self.values: Floats = np.full((len(tables), int(self.n_values.max(initial=1))), np.inf)
        """(n_tables, n_values) the tables' control values, inf beyond a table's own."""
        for row, table in enumerate(tables):
            self.values[row, : table.values.size] = table.values
        alike: dict[tuple[bytes, int], list[int]] = defaultdict(list)
        for at, table in enumerate(tables):
            alike[table.gpus.tobytes(), table.values.size].append(at)
        self._group: Ints = np.zeros(len(tables), dtype=np.int64)
        self._place: Ints = np.zeros(len(tables), dtype=np.int64)
        self._stacks: list[tuple[Ints, Floats, Floats]] = []
        for group, members in enumerate(alike.values()):
            self._group[members], self._place[members] = group, np.arange(len(members))
            gpus = tables[members[0]].gpus
            speed, power_w = (np.array([getattr(tables[at], name) for at in members]) for name in ("speed", "power_w"))
            self._stacks.append((gpus, speed, power_w / gpus[:, None]))

    def at(self, tables: Ints, gpus: Ints, *, default: bool = False) -> tuple[Floats, Floats]:
        """Return speed and power of gangs: (n, n_sizes, n_values) each, 0 beyond a table's own control values.

        Args:
            tables: (n,) indices of the tables.
            gpus: (n, n_sizes) sizes, at least 1.
            default: Whether to use only each table's default control value; then ``n_values`` is 1.
        """
        if len(self._stacks) == 1:
            return self._of(0, self._place[tables], gpus, default)
        speed, power_w = np.zeros((2, *gpus.shape, 1 if default else self.values.shape[1]))
        group = self._group[tables]
        for each in np.unique(group).tolist():
            rows = np.flatnonzero(group == each)
            of_speed, of_power_w = self._of(each, self._place[tables[rows]], gpus[rows], default)
            width = of_speed.shape[2]
            speed[rows, :, :width], power_w[rows, :, :width] = of_speed, of_power_w
        return speed, power_w

    def _of(self, group: int, places: Ints, gpus: Ints, default: bool) -> tuple[Floats, Floats]:
        sizes, speed, per_gpu_w = self._stacks[group]
        if default:
            speed, per_gpu_w = speed[:, :, -1:], per_gpu_w[:, :, -1:]
        lower, upper, share = _between(sizes, gpus)
        place = places[:, None]
        if bool(((share == 0) | (share == 1)).all()):  # no size is between two of the table's
            at = np.where(share == 1, upper, lower)
            return speed[place, at], per_gpu_w[place, at] * gpus[:, :, None]
        share = share[:, :, None]
        of_speed, of_per_gpu_w = (
            each[place, lower] * (1 - share) + each[place, upper] * share for each in (speed, per_gpu_w)
        )
        return of_speed, of_per_gpu_w * gpus[:, :, None]


def _between(sizes: Ints, gpus: Ints) -> tuple[Ints, Ints, Floats]:
    """Return the table's sizes below and above each gang's, and how far it lies between: all shaped as ``gpus``."""
    upper = np.minimum(np.maximum(np.searchsorted(sizes, gpus), 1), max(sizes.size - 1, 1)) % sizes.size
    lower = np.maximum(upper - 1, 0)
    span = np.maximum(sizes[upper] - sizes[lower], 1)
    return lower, upper, np.minimum(np.maximum((gpus - sizes[lower]) / span, 0.0), 1.0)
