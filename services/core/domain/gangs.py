"""What gangs of one kind of job do on one GPU model: speed and power by size and by setting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.domain.errors import DomainError
from services.core.domain.settings import SettingKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GangTable:
    """Predicted or measured; between sizes linear, outside the nearest per GPU in power and the same in speed.

    Attributes:
        gpus: (n_sizes,) gang sizes, ascending.
        speed: (n_sizes, n_settings) seconds of work done per second.
        power_w: (n_sizes, n_settings) draw of the whole gang with its share of the hosts, watts.
        kind: What is set; None where nothing can be or nothing is known of it, with one setting then.
        values: (n_settings,) watts or MHz, ascending; the last is the default.
    """

    gpus: Ints
    speed: Floats
    power_w: Floats
    kind: SettingKind | None
    values: Floats

    def __post_init__(self) -> None:
        shape = self.gpus.size, self.values.size
        if not all(shape) or self.speed.shape != shape or self.power_w.shape != shape:
            raise DomainError("a gang's table needs one speed and one power per size and setting")
        if not all(np.isfinite(table).all() and (table > 0).all() for table in (self.speed, self.power_w)):
            raise DomainError("speeds and powers are finite and above 0")
        if self.gpus[0] < 1 or bool((np.diff(self.gpus) <= 0).any()) or bool((np.diff(self.values) <= 0).any()):
            raise DomainError("gang sizes ascend from at least 1, and settings ascend")
        if self.kind is None and self.values.size != 1:
            raise DomainError("without a kind of setting there is one setting")

    def at(self, gpus: Ints) -> tuple[Floats, Floats]:
        """Return speed and power at each size: (n,) to (n, n_settings), twice."""
        upper = np.clip(np.searchsorted(self.gpus, gpus), 1, max(self.gpus.size - 1, 1)) % self.gpus.size
        lower = np.maximum(upper - 1, 0)
        span = np.maximum(self.gpus[upper] - self.gpus[lower], 1)
        share = np.clip((gpus - self.gpus[lower]) / span, 0.0, 1.0)[:, None]
        per_gpu_w = self.power_w / self.gpus[:, None]
        speed = self.speed[lower] * (1 - share) + self.speed[upper] * share
        drawn = per_gpu_w[lower] * (1 - share) + per_gpu_w[upper] * share
        return speed, drawn * np.asarray(gpus)[:, None]

    def default_only(self) -> GangTable:
        """Return the table of a place where nothing can be set."""
        return GangTable(self.gpus, self.speed[:, -1:], self.power_w[:, -1:], None, self.values[-1:])
