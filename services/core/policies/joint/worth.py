"""What an hour of completion time is worth now, as power: ``w / c`` of the package's formula."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from services.core.cycle.grids import eligible_curves
from services.core.cycle.ranking import every_job
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve
from services.core.policies.joint.config import JointConfig

HALF_DAY_S = 43_200.0
GREENEST = 0.05
"""An hour greener than this share of the day's mean counts as one at it, so that nothing is worth everything."""


class Worth:
    """What time is worth in one round, found where it is first asked for: most rounds of a simulation never do."""

    def __init__(self, snapshot: Snapshot, config: JointConfig) -> None:
        self._snapshot, self._hour_wh = snapshot, config.hour_wh

    @cached_property
    def hour_w(self) -> Floats:
        """How many watts more a gang may draw, in exchange for no delay: (n_jobs,)."""
        snapshot, everyone = self._snapshot, every_job(self._snapshot)
        curves = eligible_curves(snapshot, everyone)
        each = curves.each(lambda curve: _hour_w(curve, snapshot.now_s, self._hour_wh))
        return each if isinstance(each, np.ndarray) else np.full(everyone.shape, each)


def hour_g(curve: CarbonCurve, now_s: float, hour_wh: float) -> float:
    """Return ``w``, gCO2 per hour."""
    return hour_wh / 1000.0 * _mean(curve, now_s)


def _mean(curve: CarbonCurve, now_s: float) -> float:
    """Return the mean of the day around now, as far as it is known, gCO2/kWh."""
    since_s, until_s = max(curve.start_s, now_s - HALF_DAY_S), min(curve.end_s, now_s + HALF_DAY_S)
    mean = curve.mean(since_s, until_s) if since_s < until_s else curve.at(now_s)
    return mean if mean > 0 else 1.0


def _hour_w(curve: CarbonCurve, now_s: float, hour_wh: float) -> float:
    mean = _mean(curve, now_s)
    return hour_wh * mean / max(curve.at(now_s), GREENEST * mean)
