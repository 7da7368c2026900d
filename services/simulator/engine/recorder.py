"""Records of a simulation: jobs as they start, stop and end; the cluster at active rounds."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from services.core.cycle.snapshot import QUEUED
from services.core.domain.arrays import Bools, Floats
from services.core.domain.ids import JobId
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.simulator.engine.live import IntRow, LiveJobs
from services.simulator.engine.result import JobColumns, Series
from services.simulator.workload import SitePrices, Workload


class TenantTime:
    """GPU time of tenants with waiting jobs, compared with that of their weighted shares.

    Shares are divided among the tenants that have jobs at the time, waiting or running; none exceeds what its jobs can
    use at their smallest gangs. The state after a round is assumed to last until the next.
    """

    def __init__(self, workload: Workload, weights: Mapping[str, float], total_gpus: int) -> None:
        """Take the trace's tenants and their weights, 1 where none is given."""
        self.names = sorted(set(workload.tenants))
        code = {tenant: at for at, tenant in enumerate(self.names)}
        self._code = np.fromiter(map(code.__getitem__, workload.tenants), np.int64, len(workload))
        self._weight = np.array([weights.get(tenant, 1.0) for tenant in self.names])
        self._total_gpus = total_gpus
        self._held_s, self._due_s = np.zeros(len(self.names)), np.zeros(len(self.names))
        self._held, self._due = np.zeros(len(self.names)), np.zeros(len(self.names))
        self._since_s = 0.0

    def sample(self, now_s: float, live: LiveJobs) -> None:
        """Count the time since the last sample at that sample's state, and record the new state."""
        self._count(now_s)
        ints = live.ints[:, : live.count]
        tenant, most = self._code[ints[IntRow.ROW]], len(self.names)
        queued = ints[IntRow.PHASE] == QUEUED
        wanted = np.bincount(tenant[queued], ints[IntRow.MIN][queued], most)
        waits = wanted > 0
        weight = np.where(np.bincount(tenant, minlength=most) > 0, self._weight, 0.0)
        held = np.bincount(tenant, ints[IntRow.GPUS], most).astype(np.float64)
        share = self._total_gpus * weight / max(float(weight.sum()), 1e-9)
        self._held = np.where(waits, held, 0.0)
        self._due = np.where(waits, np.minimum(share, held + wanted), 0.0)

    def served(self, now_s: float) -> dict[str, float]:
        """Return each waiting tenant's GPU time as a fraction of that of its share: 1 is exactly its share."""
        self._count(now_s)
        known = np.flatnonzero(self._due_s > 0).tolist()
        return {self.names[at]: float(self._held_s[at] / self._due_s[at]) for at in known}

    def _count(self, now_s: float) -> None:
        self._held_s += self._held * (now_s - self._since_s)
        self._due_s += self._due * (now_s - self._since_s)
        self._since_s = now_s


ROUNDING = 1e-9


@dataclass
class AboveLimit:
    """Time and energy above the limit, summed over a run.

    Attributes:
        seconds, energy_j: Time above the limit, and the energy in excess of it.
    """

    limit_w: float = math.inf  #: The limit in force since the last round; inf for none
    seconds: float = 0.0
    energy_j: float = 0.0
    most: float = 0.0  #: The largest excess as a share of a limit above 0 W
    most_of_error: float = 0.0
    """The largest ratio of the excess to the error that the models stated then; NaN if they stated none."""

    def draw(self, power_w: float, seconds: float) -> None:
        excess_w = power_w - self.limit_w
        if excess_w > ROUNDING * self.limit_w:
            self.seconds += seconds
            self.energy_j += excess_w * seconds
            if self.limit_w > 0:  # it is 0 where a share of the cluster's power is set, and all nodes are away
                self.most = max(self.most, excess_w / self.limit_w)

    def held(self, power_w: float, limit_w: float) -> bool:
        """Set the limit of a round; return whether the cluster's power after the round stays within it."""
        self.limit_w = limit_w
        return power_w <= limit_w * (1 + ROUNDING)

    def stated(self, power_w: float, error_w: float) -> None:
        """Set the error that the models state while the limit is exceeded."""
        known = error_w > 0 and not math.isnan(self.most_of_error)
        self.most_of_error = max(self.most_of_error, (power_w - self.limit_w) / error_w) if known else math.nan

    def figures(self, whole_s: float) -> dict[str, float]:
        return {
            "above_limit_share": self.seconds / whole_s if whole_s > 0 else 0.0,
            "above_limit_kwh": self.energy_j / J_PER_KWH,
            "above_limit_most": self.most,
            "above_limit_of_error": self.most_of_error,
        }


class Bill:
    """Adds up the energy of each hour."""

    def __init__(self, prices: SitePrices) -> None:
        self._prices = prices
        self._hours_j: dict[int, float] = defaultdict(float)

    def draw(self, begin_s: float, end_s: float, power_w: float) -> None:
        """Add a constant draw over ``[begin_s, end_s)``, UTC seconds."""
        hour = int(begin_s // S_PER_HOUR)
        while begin_s < end_s:
            until_s = min(end_s, (hour + 1) * S_PER_HOUR)
            self._hours_j[hour] += power_w * (until_s - begin_s)
            begin_s, hour = until_s, hour + 1

    def figures(self) -> tuple[float, float]:
        """Return the money for energy, and that for each month's highest hour."""
        hours = sorted(self._hours_j)
        kwh = np.array([self._hours_j[hour] / J_PER_KWH for hour in hours])
        highest: dict[tuple[int, int], float] = {}
        for hour, mean_kw in zip(hours, kwh.tolist(), strict=True):
            at = datetime.fromtimestamp(hour * S_PER_HOUR, UTC)
            highest[at.year, at.month] = max(highest.get((at.year, at.month), 0.0), mean_kw)
        energy = kwh @ self._prices.curve.at(np.array(hours, dtype=np.float64) * S_PER_HOUR)
        return float(energy), self._prices.demand_per_kw_month * sum(highest.values())


class Recorder:
    """Columns of jobs by workload row, and rows of the cluster by time."""

    def __init__(self, workload: Workload, models: tuple[str, ...]) -> None:
        n = len(workload)
        self._workload = workload
        self.ids = [JobId(job_id) for job_id in workload.ids]
        self.completed = 0
        self.preemptions = [0] * n
        self.failures = [0] * n
        nothing = [float("nan")] * n
        self._started, self._ended = nothing.copy(), nothing.copy()
        self._gpu_s, self._energy_j, self._carbon = [0.0] * n, [0.0] * n, [0.0] * n
        self._last = [0] * n
        self._high = high_power(workload, models)
        self._samples: list[tuple[float, ...]] = []

    def started(self, row: int, now_s: float, gpus: int) -> None:
        if not self._last[row]:
            self._started[row] = now_s
        self._last[row] = gpus

    def has_started(self, row: int) -> bool:
        return self._last[row] > 0

    def spent(self, row: int, gpu_s: float, energy_j: float, carbon_gco2: float) -> None:
        self._gpu_s[row] += gpu_s
        self._energy_j[row] += energy_j
        self._carbon[row] += carbon_gco2

    def ended(self, row: int, now_s: float) -> None:
        self._ended[row] = now_s
        self.completed += 1

    def sample(
        self,
        now_s: float,
        intensity: float,
        sums: list[float],
        live: LiveJobs,
        on_slices: Sequence[int] = (),
        queued_for_slices: int = 0,
        *,
        shared_gpus: int = 0,
    ) -> None:
        """Record the state of the cluster.

        Args:
            sums: Energy (J), carbon (g), idle energy (J), idle carbon (g) so far.
            on_slices: The jobs that hold slices, in addition to ``live``.
            shared_gpus: How many devices are held by two gangs; each counts once.
        """
        n = live.count
        gpus = live.ints[IntRow.GPUS, :n]
        holding = np.count_nonzero(gpus)
        high = np.count_nonzero(self._high[live.ints[IntRow.CURVE, :n]] & (gpus > 0))
        held, queued = float(gpus.sum()) - shared_gpus, n - holding
        if on_slices or queued_for_slices:
            holding, held = holding + len(on_slices), held + len(on_slices)
            high += int(self._high[self._workload.profile[list(on_slices)]].sum())
            queued += queued_for_slices
        self._samples.append((now_s, *sums[:3], intensity, held, float(queued), float(high), float(holding - high)))

    def columns(self, predicted_work_s: Floats) -> JobColumns:
        floats = (self._workload.submitted_s, *map(np.array, (self._started, self._ended)))
        amounts = map(np.array, (self._gpu_s, self._energy_j, self._carbon))
        counts = [self.preemptions, self.failures, self._last]
        ints = (np.array(column, dtype=np.int64) for column in counts)
        kinds = self._workload.profile
        return JobColumns(
            self._workload.ids, *floats, *amounts, *ints, profile=kinds, predicted_work_s=predicted_work_s
        )

    def series(self) -> Series:
        rows = np.array(self._samples, dtype=np.float64).reshape(len(self._samples), 9)
        times, energy, carbon, idle, intensity, held, queued, high, low = rows.T
        seconds = np.maximum(np.diff(times, prepend=times[:1]), 1e-9)
        power, idle_power = np.diff(energy, prepend=0.0) / seconds, np.diff(idle, prepend=0.0) / seconds
        if times.size:
            power[0] = idle_power[0] = 0.0
        return Series(times, power, idle_power, intensity, carbon, energy, held, queued, high, low)


def high_power(workload: Workload, models: tuple[str, ...]) -> Bools:
    """Return which kinds draw at least the median power of the workload's jobs at the smallest size: (n_profiles,)."""
    draws = np.zeros(len(workload.profiles))
    for at, profile in enumerate(workload.profiles):
        behaviour = next(filter(None, map(profile.truth, models)), None)
        if behaviour is not None:
            draws[at] = behaviour.gpu_power_w[0]
    return draws >= np.median(draws[workload.profile]) if len(workload) else np.zeros(draws.size, dtype=np.bool_)
