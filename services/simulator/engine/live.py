"""The live jobs of a simulation, as columns that a snapshot shows without copying.

Live jobs are in slots ``0 .. count - 1``; the last one moves into the slot of a job that ends. Figures of a job that
holds GPUs are closed forms in the time since it got them: ``attained = settled + gpus * (now - since)``, and so on.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.core.cycle.snapshot import RUNNING, STARTING, JobTable
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId
from services.core.domain.placement import Placement
from services.simulator.engine.beginning import Beginning
from services.simulator.engine.behaviour import TunedCurves
from services.simulator.workload import Workload


class FloatRow:
    """Rows of the table of floats; plain integers, because an enum's members are slow to access.

    Rows that are written together are adjacent: writing a whole slice costs no more than writing one element.
    """

    FLEX, SUBMITTED, DEADLINE, WORK, PREDICTED, REMAINING, SINCE, ATTAINED, ENERGY, CARBON, ACCOUNTED = range(11)
    GRID, SET_ATTAINED, SET_ENERGY, SET_CARBON, SET_GPU_ENERGY, SET_DONE = range(11, 17)
    RUN_FROM, SPEED, DRAW, GPU_DRAW, EFFICIENCY, BEGAN, KEPT, POWER, BASE, NOW, PROGRESS = range(17, 28)
    POWER_LIMIT, CLOCK, UNORDERED, COUNT = range(28, 32)


class IntRow:
    """Rows of the table of integers."""

    MIN, MAX, STEP, ASKED, PRIORITY, CURVE, ROW, GOODPUT, BATCH_MIN, BATCH_MAX = range(10)
    PHASE, GPUS, MEASURED, GENERATION, STALE, ZONE, COUNT = range(10, 17)


SHOWN_FLOATS = {
    "submitted_s": FloatRow.SUBMITTED,
    "waiting_since_s": FloatRow.SINCE,
    "deadline_s": FloatRow.DEADLINE,
    "attained_gpu_s": FloatRow.ATTAINED,
    "energy_j": FloatRow.ENERGY,
    "carbon_gco2": FloatRow.CARBON,
    "gpu_power_w": FloatRow.POWER,
    "efficiency_base": FloatRow.BASE,
    "efficiency_now": FloatRow.NOW,
    "progress": FloatRow.PROGRESS,
    "remaining_s": FloatRow.REMAINING,
    "power_limit_w": FloatRow.POWER_LIMIT,
    "clock_mhz": FloatRow.CLOCK,
    "unordered_w": FloatRow.UNORDERED,
    "flex": FloatRow.FLEX,
}
SHOWN_INTS = {
    "phase": IntRow.PHASE,
    "min_gpus": IntRow.MIN,
    "max_gpus": IntRow.MAX,
    "step_gpus": IntRow.STEP,
    "asked_gpus": IntRow.ASKED,
    "gpus": IntRow.GPUS,
    "priority": IntRow.PRIORITY,
    "speed_curve": IntRow.CURVE,
    "data_zone": IntRow.ZONE,
    "control_curve": IntRow.CURVE,
    "goodput_curve": IntRow.GOODPUT,
    "batch_min": IntRow.BATCH_MIN,
    "batch_max": IntRow.BATCH_MAX,
}
"""The rows of the tables that a snapshot shows, by column name."""
SHOWN_FLAGS = ("preemptible", "shareable")
KEPT_VIEWS = 128
GIVEN, GIVEN_INTS = slice(FloatRow.FLEX, FloatRow.SINCE + 1), slice(IntRow.MIN, IntRow.BATCH_MAX + 1)
"""The initial values of a job, by workload row; the rest is the same for all."""
SETTLED = slice(FloatRow.SINCE, FloatRow.SET_DONE + 1)
LONG = 4
"""A queue is long where this many times as many jobs are live as change: picking them out has its cost."""
REFRESHED = (
    slice(FloatRow.ATTAINED, FloatRow.CARBON + 1), FloatRow.REMAINING, FloatRow.POWER, FloatRow.PROGRESS,
)  # fmt: skip


class LiveJobs:
    """Slots of live jobs, with room to grow."""

    def __init__(
        self,
        workload: Workload,
        eligible: Bools,
        predicted_s: Floats,
        tuning: TunedCurves | None = None,
        capacity: int = 256,
    ) -> None:
        self._workload, self._tuning, self._eligible_of = workload, tuning, eligible
        n = len(workload)
        zeros = np.zeros(n, dtype=np.int64)
        self.count = 0  #: Number of live jobs
        self.floats: Floats = np.zeros((FloatRow.COUNT, capacity))
        """(FloatRow.COUNT, capacity). ``SET_`` rows are a job's figures at ``ACCOUNTED``, when it last got or lost GPUs
        or its controls changed; the rows a snapshot shows are brought up to date by ``refresh``. Work has run at
        ``SPEED`` since ``RUN_FROM`` and began at ``BEGAN``; ``KEPT`` is the work in the last checkpoint before
        ``RUN_FROM``."""
        self.ints: Ints = np.zeros((IntRow.COUNT, capacity), dtype=np.int64)
        """(IntRow.COUNT, capacity). ``STALE`` marks jobs without GPUs whose shown rows still have to be brought up to
        date. ``ZONE`` is where a job runs or has its checkpoint."""
        self.eligible: Bools = np.ones((capacity, eligible.shape[1]), dtype=np.bool_)
        self.flags: Bools = np.ones((len(SHOWN_FLAGS), capacity), dtype=np.bool_)  #: (2, capacity) as ``SHOWN_FLAGS``
        self.ids: list[JobId] = []
        self.tenants: list[str] = []
        self.placements: list[Placement | None] = []  #: Where each job runs
        self.slot: dict[JobId, int] = {}  #: Slot of each job, by id
        self.profiled: dict[int, dict[int, float]] = {}  #: Efficiency by workload row and gang size, once observed
        self._waiting: Counter[int] = Counter()
        self._whole = self._all_rows()
        self._tables: dict[int, JobTable] = {}
        self._all_eligible = bool(eligible.all())
        self._new = np.zeros(FloatRow.COUNT)
        self._new[[FloatRow.POWER, FloatRow.BASE, FloatRow.NOW]] = np.nan
        self._new[FloatRow.POWER_LIMIT : FloatRow.UNORDERED + 1] = np.nan
        flex = np.full(n, np.nan) if workload.flex is None else workload.flex
        deadline_s = np.full(n, np.inf) if workload.deadline_s is None else workload.deadline_s
        submitted_s, work_s = workload.submitted_s, workload.work_s
        self._given = np.stack([flex, submitted_s, deadline_s, work_s, predicted_s, predicted_s, submitted_s], axis=1)
        priority = zeros if workload.priority is None else workload.priority
        columns = [workload.min_gpus, workload.max_gpus, workload.step_gpus, workload.requested_gpus, priority]
        columns += [workload.profile, np.arange(n)]
        columns += [zeros - 1] * 3 if tuning is None else tuning.given(workload.profile)
        self._given_ints = np.stack(columns, axis=1)
        flags = (np.ones(n, dtype=np.bool_) if each is None else each for each in map(vars(workload).get, SHOWN_FLAGS))
        self._given_flags = np.stack([*flags], axis=1)

    def arrive(self, row: int) -> int:
        """Add the job in this row of the workload; return its slot."""
        slot = self.count
        if slot == self.floats.shape[1]:
            self._grow()
        workload = self._workload
        self.floats[:, slot] = self._new
        self.floats[GIVEN, slot] = self._given[row]
        self.ints[:, slot] = 0
        self.ints[GIVEN_INTS, slot] = self._given_ints[row]
        self.ints[IntRow.STALE, slot], self.ints[IntRow.ZONE, slot] = 1, -1
        if not self._all_eligible:
            self.eligible[slot] = self._eligible_of[row]
        self.flags[:, slot] = self._given_flags[row]
        job_id = JobId(workload.ids[row])
        self.ids.append(job_id)
        self.tenants.append(workload.tenants[row])
        self.placements.append(None)
        self.slot[job_id] = slot
        self.count += 1
        return slot

    def waits(self, slot: int, more: int = 1) -> None:
        """Count a job that waits for GPUs from now on; with ``more`` -1, one that does no longer."""
        self._waiting[self.ints.item(IntRow.MIN, slot)] += more

    def may_start(self, free_gpus: int) -> bool:
        """Return whether the smallest gang of any waiting job fits this many devices."""
        return any(count and size <= free_gpus for size, count in self._waiting.items())

    def resume(self, slot: int, row: int, beginning: Beginning) -> None:
        """Restore what a job that has just arrived had used and done before the run began."""
        column = self.floats[:, slot]
        done, attained = float(beginning.progress[row]), float(beginning.attained_gpu_s[row])
        energy_j, carbon = float(beginning.energy_j[row]), float(beginning.carbon_gco2[row])
        column[FloatRow.SINCE] = beginning.since_s[row]
        column[FloatRow.ATTAINED : FloatRow.CARBON + 1] = (attained, energy_j, carbon)
        column[FloatRow.SET_ATTAINED : FloatRow.SET_DONE + 1] = (
            attained, energy_j, carbon, energy_j, done * column[FloatRow.WORK],
        )  # fmt: skip
        column[FloatRow.PROGRESS], column[FloatRow.KEPT] = done, done * column[FloatRow.WORK]
        column[FloatRow.REMAINING] = column[FloatRow.PREDICTED] * (1.0 - done)
        self._show_stages(slice(slot, slot + 1))

    def leave(self, slot: int) -> None:
        """Remove the job in a slot; the last job takes its place."""
        last = self.count - 1
        row = self.ints.item(IntRow.ROW, slot)
        self.profiled.pop(row, None)
        del self.slot[self.ids[slot]]
        moved, tenant, placement = self.ids.pop(), self.tenants.pop(), self.placements.pop()
        if slot != last:
            self.floats[:, slot] = self.floats[:, last]
            self.ints[:, slot] = self.ints[:, last]
            self.eligible[slot] = self.eligible[last]
            self.flags[:, slot] = self.flags[:, last]
            self.ids[slot], self.tenants[slot], self.placements[slot] = moved, tenant, placement
            self.slot[moved] = slot
        self.count = last

    def settle(self, slot: int, now_s: float, integral: float) -> tuple[float, float, float]:
        """Bring a job's settled figures up to now; return what it has spent since the last time: GPU s, J, gCO2.

        Args:
            slot: A job that holds GPUs.
            integral: ``Grid.integral(now_s)`` of its zone.
        """
        column = self.floats[:, slot].tolist()
        seconds = now_s - column[FloatRow.ACCOUNTED]
        gpus = self.ints.item(IntRow.GPUS, slot)
        energy_j = column[FloatRow.DRAW] * seconds
        carbon = column[FloatRow.DRAW] * (integral - column[FloatRow.GRID]) / 3.6e6
        gpu_s = gpus * seconds
        done = column[FloatRow.SET_DONE] + column[FloatRow.SPEED] * max(now_s - column[FloatRow.RUN_FROM], 0.0)
        spent = (
            column[FloatRow.SET_ATTAINED] + gpu_s,
            column[FloatRow.SET_ENERGY] + energy_j,
            column[FloatRow.SET_CARBON] + carbon,
        )
        gpu_energy_j = column[FloatRow.SET_GPU_ENERGY] + column[FloatRow.GPU_DRAW] * seconds
        self.floats[SETTLED, slot] = (
            now_s, *spent, now_s, integral, *spent, gpu_energy_j, min(done, column[FloatRow.WORK]),
        )  # fmt: skip
        return gpu_s, energy_j, carbon

    def refresh(self, now_s: float, integrals: Sequence[float], min_profile_s: float) -> None:
        """Bring what a snapshot shows up to now: figures of jobs with GPUs, completed starts, observed profiles.

        Nothing changes for waiting jobs, so they are skipped and the cost does not grow with the queue.
        """
        n = self.count
        which: slice | Ints = slice(n)
        if LONG * np.count_nonzero(self.ints[IntRow.GPUS, :n]) < n:
            which = np.flatnonzero(self.ints[IntRow.GPUS, :n] | self.ints[IntRow.STALE, :n])
        f, i = self.floats[:, which], self.ints[:, which]
        phase, gpus = i[IntRow.PHASE], i[IntRow.GPUS]
        started = (phase == STARTING) & (f[FloatRow.RUN_FROM] <= now_s)
        phase[started] = RUNNING
        held_s = now_s - f[FloatRow.ACCOUNTED]
        integral = integrals[0] if len(integrals) == 1 else np.array(integrals)[i[IntRow.ZONE]]
        f[FloatRow.ATTAINED] = f[FloatRow.SET_ATTAINED] + gpus * held_s
        f[FloatRow.ENERGY] = f[FloatRow.SET_ENERGY] + f[FloatRow.DRAW] * held_s
        f[FloatRow.CARBON] = f[FloatRow.SET_CARBON] + f[FloatRow.DRAW] * ((integral - f[FloatRow.GRID]) / 3.6e6)
        done = f[FloatRow.SET_DONE] + f[FloatRow.SPEED] * np.maximum(now_s - f[FloatRow.RUN_FROM], 0.0)
        share = np.minimum(done / f[FloatRow.WORK], 1.0)
        f[FloatRow.PROGRESS] = share
        f[FloatRow.REMAINING] = f[FloatRow.PREDICTED] * (1.0 - share)
        ran = f[FloatRow.ATTAINED] >= 1.0
        gpu_energy = f[FloatRow.SET_GPU_ENERGY] + f[FloatRow.GPU_DRAW] * held_s
        np.divide(gpu_energy, f[FloatRow.ATTAINED], out=f[FloatRow.POWER], where=ran)
        if not isinstance(which, slice):
            for rows in REFRESHED:
                self.floats[rows, which] = f[rows]
            self.ints[IntRow.PHASE, which] = phase
        self.ints[IntRow.STALE, which] = 0
        self._show_stages(which)
        fresh = (phase == RUNNING) & (i[IntRow.MEASURED] == 0) & (now_s - f[FloatRow.RUN_FROM] >= min_profile_s)
        found = np.flatnonzero(fresh)
        for slot in (found if isinstance(which, slice) else which[found]).tolist():
            self.measured(slot)

    def _show_stages(self, slots: slice | Ints) -> None:
        """Show the goodput curves of these jobs' current stages, which follow from their progress."""
        tuning = self._tuning
        if tuning is None:
            return
        ints, curve = self.ints, self.ints[IntRow.CURVE, slots]
        begin = tuning.first[curve]
        stages = tuning.first[curve + 1] - begin
        stage = np.minimum((self.floats[FloatRow.PROGRESS, slots] * stages).astype(np.int64), stages - 1)
        ints[IntRow.GOODPUT, slots] = np.where(tuning.tunes[ints[IntRow.ROW, slots]], begin + stage, -1)

    def measured(self, slot: int) -> None:
        row, gpus = int(self.ints[IntRow.ROW, slot]), int(self.ints[IntRow.GPUS, slot])
        efficiency = float(self.floats[FloatRow.EFFICIENCY, slot])
        self.ints[IntRow.MEASURED, slot] = 1
        self.floats[FloatRow.NOW, slot] = efficiency
        self.profiled.setdefault(row, {})[gpus] = efficiency
        if gpus == self.ints[IntRow.MIN, slot]:
            self.floats[FloatRow.BASE, slot] = efficiency

    def table(self) -> JobTable:
        """Return the live jobs as a snapshot shows them: views, valid until the next event.

        They are cached by the number of live jobs, because the same numbers recur.
        """
        if (known := self._tables.get(n := self.count)) is not None:
            return known
        columns: dict[str, Any] = {name: column[:n] for name, column in self._whole.items()}
        columns.update(ids=self.ids, tenants=self.tenants, placements=self.placements, index=self.slot)
        if len(self._tables) >= KEPT_VIEWS:
            self._tables.clear()
        self._tables[n] = table = JobTable.of_columns(columns)
        return table

    def _all_rows(self) -> dict[str, Any]:
        """Return every array column of a job table for all slots, including those that this class does not fill."""
        columns: dict[str, Any] = {name: self.floats[row] for name, row in SHOWN_FLOATS.items()}
        columns |= {name: self.ints[row] for name, row in SHOWN_INTS.items()}
        columns |= dict(zip(SHOWN_FLAGS, self.flags, strict=True)) | {"eligible": self.eligible}
        none: list[Any] = [None] * self.eligible.shape[0]
        table = JobTable(ids=none, tenants=none, placements=none, **columns)
        return {name: column for name, column in vars(table).items() if isinstance(column, np.ndarray)}

    def _grow(self) -> None:
        self._tables.clear()
        self.floats = np.concatenate((self.floats, np.zeros_like(self.floats)), axis=1)
        self.ints = np.concatenate((self.ints, np.zeros_like(self.ints)), axis=1)
        self.eligible = np.concatenate((self.eligible, np.ones_like(self.eligible)))
        self.flags = np.concatenate((self.flags, np.ones_like(self.flags)), axis=1)
        self._whole = self._all_rows()
