"""What each power limit or clock does to a kind of job."""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError


@dataclass(frozen=True, eq=False)
class ControlCurve:
    """Speed and power of one kind of job on one GPU model by the value of one control, the other at its default."""

    values: Floats  #: (n_values,) watts or MHz, ascending, above 0
    speed: Floats  #: (n_values,) speed at each, as a share of the speed at the default
    power_w: Floats  #: (n_values,) mean draw of one GPU at each, watts

    def __post_init__(self) -> None:
        columns = (self.values, self.speed, self.power_w)
        if self.values.ndim != 1 or not self.values.size or any(each.shape != self.values.shape for each in columns):
            raise DomainError("a control value's curve needs one speed and one power per value")
        if not all(np.isfinite(column).all() and (column > 0).all() for column in columns):
            raise DomainError("control values, speeds and powers are finite and above 0")
        if bool((np.diff(self.values) <= 0).any()):
            raise DomainError("a curve's control values ascend")

    def at(self, value: float | None) -> tuple[float, float]:
        """Return (relative speed, watts of one GPU) at a control value: linear between values, clamped outside.

        None is the default, where speed is 1 and power is that of the highest value.
        """
        if value is None:
            return 1.0, float(self.power_w[-1])
        return float(np.interp(value, self.values, self.speed)), float(np.interp(value, self.values, self.power_w))
