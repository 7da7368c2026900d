"""Records of a simulation: jobs as they start, stop and end; the cluster at active rounds."""

from collections.abc import Sequence

import numpy as np

from services.core.domain.arrays import Bools, Floats
from services.core.domain.ids import JobId
from services.simulator.engine.live import IntRow, LiveJobs
from services.simulator.engine.result import JobColumns, Series
from services.simulator.workload import Workload


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
