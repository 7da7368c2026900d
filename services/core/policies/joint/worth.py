"""What an hour of completion time is worth now, as power: ``w / c`` of the package's formula."""

from functools import cached_property

import numpy as np

from services.core.cycle.grids import eligible_curves
from services.core.cycle.rounds import every_job
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.modes import asked_w, lead_of

HALF_DAY_S = 43_200.0
GREENEST = 0.05
"""An hour greener than this share of the day's mean counts as one at it, so that nothing is worth everything."""


class Worth:
    """What time is worth in one round, computed only when first needed: most rounds of a simulation never need it."""

    def __init__(self, snapshot: Snapshot, config: JointConfig) -> None:
        self._snapshot, self._config = snapshot, config

    @cached_property
    def _dirtier(self) -> Floats:
        """(n_jobs,) the ratio of the day's mean intensity to the present one, for each job's grid."""
        snapshot, everyone = self._snapshot, every_job(self._snapshot)
        each = eligible_curves(snapshot, everyone).each(lambda curve: _dirtier(curve, snapshot.now_s))
        return each if isinstance(each, np.ndarray) else np.full(everyone.shape, each)

    def hour_wh(self, which: Ints) -> Floats:
        """Return what an hour is worth for each of these jobs at the day's mean intensity: (n_which,) Wh."""
        if self._config.hour_wh is not None:
            return np.full(which.shape, self._config.hour_wh)
        if not self._config.hour_share:
            return np.zeros(which.shape)
        return self._config.hour_share * asked_w(self._snapshot, which, self._config)

    def hour_w(self, which: Ints) -> Floats:
        """Return how many more watts each of these jobs may draw to avoid delay: (n_which,)."""
        return self.hour_wh(which) * self._dirtier[which]

    def gang_w(self, job: int | Ints, full_w: float | Floats) -> float | Floats:
        """Return the same for a gang that draws ``full_w`` with its hosts at the default power limit, watts."""
        wh = self._config.hour_share * full_w if self._config.hour_wh is None else self._config.hour_wh
        return wh * self._dirtier[job]

    def lost(self, job: int | Ints, gpus: int | Ints, hour_w: float | Floats) -> tuple[float | Floats, float | Floats]:
        """Return the additional worth of an hour lost by a gang, watts, and its speed relative to that asked for."""
        more = self._config.lost_times - 1.0
        return (more * hour_w, lead_of(self._snapshot, job, gpus)) if more > 0 else (0.0, np.inf)

    def hour_g(self, which: Ints) -> Floats:
        """Return ``w`` for each of these jobs: (n_which,) gCO2 per hour."""
        snapshot = self._snapshot
        return (
            self.hour_wh(which)
            / 1000.0
            * eligible_curves(snapshot, which).each(lambda curve: _mean(curve, snapshot.now_s))
        )


def _mean(curve: CarbonCurve, now_s: float) -> float:
    """Return the mean over the day around now, as far as it is known, or else over all of it, gCO2/kWh."""
    since_s, until_s = max(curve.start_s, now_s - HALF_DAY_S), min(curve.end_s, now_s + HALF_DAY_S)
    day = curve.mean(since_s, until_s) if since_s < until_s else curve.at(now_s)
    return next((mean for mean in (day, curve.mean(curve.start_s, curve.end_s)) if mean > 0), 1.0)


def _dirtier(curve: CarbonCurve, now_s: float) -> float:
    mean = _mean(curve, now_s)
    return mean / max(curve.at(now_s), GREENEST * mean)
