"""The jobs of a snapshot as Algorithm 1 takes them: in order of precedence, each with its choices.

The predictions for a kind of job are its table (``Snapshot.gangs``). A job without one is assumed to scale with a
fixed exponent and to draw what was last measured for it; its control values are known if its kind's curve is.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from services.core.cycle.capacity import model_gpus, possible_sizes, powers_of_two
from services.core.cycle.snapshot import Phase, Snapshot
from services.core.cycle.sorting import order_by, wishes_first
from services.core.cycle.zones import Zones
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable, StackedTables
from services.core.policies.powerflow.allocate import Choices
from services.core.policies.powerflow.config import PowerflowConfig


@dataclass
class Tables:
    """The tables of all jobs on the GPU models they might use, looked up once per kind of job."""

    snapshot: Snapshot
    config: PowerflowConfig
    _known: list[GangTable] = field(default_factory=list[GangTable])
    _of_key: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    _rows: dict[tuple[int, int], tuple[Floats, Floats]] = field(
        default_factory=dict[tuple[int, int], tuple[Floats, Floats]]
    )
    stacked: StackedTables = field(default_factory=lambda: StackedTables(()))

    def of(self, job: int, gpu_model: int) -> GangTable:
        """Return what is known or assumed of a job on a GPU model."""
        return self._known[self._place(job, gpu_model)]

    def gang(self, job: int, gpu_model: int, gpus: int) -> tuple[Floats, Floats]:
        """Return speed and power by control value of one gang: (n_values,) each."""
        key = self._place(job, gpu_model), gpus
        if key not in self._rows:
            speed, power_w = self._known[key[0]].at(np.array([gpus]))
            self._rows[key] = speed[0], power_w[0]
        return self._rows[key]

    def gangs(self, jobs: Ints, gpu_models: Ints, gpus: Ints) -> tuple[Floats, Floats]:
        """Return speed and power of gangs of several sizes each: (n, n_sizes, n_values), 0 beyond a job's own values.

        Args:
            jobs: (n,) indices into the job table.
            gpu_models: (n,) the GPU model each runs on.
            gpus: (n, n_sizes) sizes, at least 1.
        """
        places = self.places(jobs, gpu_models)
        return self.stacked.at(places, gpus)

    def default_speed(self, jobs: Ints, gpu_models: Ints, gpus: Ints) -> Floats:
        """Return the speed of one gang of each job at its default control value; all are (n,)."""
        places = self.places(jobs, gpu_models)
        return self.stacked.at(places, gpus[:, None], default=True)[0][:, 0, 0]

    def places(self, jobs: Ints, gpu_models: Ints) -> Ints:
        """Return the indices in ``stacked`` of the tables of jobs on GPU models; all are (n,)."""
        kinds = self.snapshot.jobs.control_curve[jobs]
        places = self._of_kind[np.where(kinds < len(self.snapshot.gangs), kinds, -1), gpu_models]
        for row in np.flatnonzero(places < 0).tolist():
            places[row] = self._place(int(jobs[row]), int(gpu_models[row]))
        if len(self.stacked.kinds) != len(self._known):
            self.stacked = StackedTables(self._known)
        return places

    def _place(self, job: int, gpu_model: int) -> int:
        kind = self._kinds[job]
        if 0 <= kind < len(self.snapshot.gangs) and gpu_model in self.snapshot.gangs[kind]:
            key: tuple[object, ...] = (kind, gpu_model)
        else:
            jobs = self.snapshot.jobs
            measured_w = float(np.nan_to_num(jobs.gpu_power_w[job], nan=-1.0))
            key = (kind, gpu_model, int(jobs.speed_curve[job]), measured_w)
        place = self._of_key.get(key)
        if place is None:
            place = self._of_key[key] = len(self._known)
            self._known.append(self._look_up(job, gpu_model, known=len(key) == 2))
            if len(key) == 2:
                self._of_kind[kind, gpu_model] = place
        return place

    @cached_property
    def _of_kind(self) -> Ints:
        """Index in ``stacked`` of each kind's table on each GPU model, -1 if not there yet; the last row: no kind."""
        return np.full((len(self.snapshot.gangs) + 1, len(self.snapshot.gpu_models)), -1)

    @cached_property
    def _kinds(self) -> list[int]:
        return self.snapshot.jobs.control_curve.tolist()

    def _look_up(self, job: int, gpu_model: int, *, known: bool) -> GangTable:
        snapshot = self.snapshot
        if known:
            table = snapshot.gangs[int(snapshot.jobs.control_curve[job])][gpu_model]
        else:
            table = self.assumed(job, gpu_model)
        takes = table.kind is None or snapshot.takes(gpu_model, table.kind)
        return self.completed(table if takes else table.default_only(), gpu_model)

    def completed(self, table: GangTable, gpu_model: int) -> GangTable:
        """Return a table with what is known of it besides; here nothing."""
        del gpu_model
        return table

    def assumed(self, job: int, gpu_model: int) -> GangTable:
        """Return what is assumed of a job without a table of its kind."""
        snapshot, config = self.snapshot, self.config
        jobs = snapshot.jobs
        row = int(jobs.speed_curve[job])
        most = max(snapshot.total_gpus, int(jobs.max_gpus[job]), int(jobs.gpus[job]), 1)
        sizes = sorted({*range(1, min(most, 16) + 1), *(1 << at for at in range(most.bit_length()))})
        gpus: Ints = np.array(sizes, dtype=np.int64)
        speed: Floats = np.empty(gpus.size)
        speed[:] = gpus**config.default_scaling
        if row >= 0:
            curve = snapshot.speed_curves[row]
            measured: Ints = np.arange(1, curve.size + 1, dtype=np.int64)
            speed[:] = np.interp(gpus, measured, curve)
        measured_w = float(jobs.gpu_power_w[job])
        board_w = measured_w if np.isfinite(measured_w) and measured_w > 0 else config.default_gpu_w
        drawn_w: Floats = np.array([[size * board_w] for size in sizes], dtype=np.float64)
        for kind in sorted(ControlKind, key=lambda kind: kind.value != config.control):
            found = snapshot.control_curve(job, gpu_model, kind)
            if found is not None:
                cooler = found.power_w / found.at(None)[1]
                return GangTable(gpus, speed[:, None] * found.speed, drawn_w * cooler, kind, found.values)
        return GangTable(gpus, speed[:, None], drawn_w, None, np.ones(1))


@dataclass(frozen=True)
class View:
    """Rows of Algorithm 1; every column is (n_rows,), in order of precedence."""

    jobs: Ints  #: Indices into the job table
    gpu_model: Ints  #: GPU model each runs on, or would
    holds: Bools  #: Whether the job holds devices and may go on
    tables: Tables  #: The tables of all jobs
    choices: Choices  #: What each could have
    work_s: Floats  #: Seconds of work left at speed 1, NaN where unknown


def view_of(snapshot: Snapshot, config: PowerflowConfig, model: Ints, fixed_gpus: Ints) -> View:
    """Return the jobs that could run, on the GPU models they have or are assigned.

    Args:
        model: (n_jobs,) GPU model of the devices a job holds, -1 for none.
        fixed_gpus: (n_jobs,) the one size a job may have, 0 where it may have any of its own.
    """
    jobs = snapshot.jobs
    holds = (jobs.phase == Phase.STARTING) | (jobs.phase == Phase.RUNNING)
    able = holds | jobs.eligible.any(axis=1)
    order = wishes_first(order_by(jobs.ids, jobs.submitted_s), jobs.priority)
    order = order[able[order]]
    gpu_model = _gpu_models_of(snapshot, order, np.where(holds, model, -1))
    order, gpu_model = order[gpu_model >= 0], gpu_model[gpu_model >= 0]
    tables = Tables(snapshot, config)
    choices = choices_of(snapshot, tables, order, gpu_model, fixed_gpus[order])
    return View(order, gpu_model, holds[order], tables, choices, work_left_s(snapshot, tables, order, gpu_model))


def choices_of(snapshot: Snapshot, tables: Tables, rows: Ints, gpu_model: Ints, fixed_gpus: Ints) -> Choices:
    """Return the choices of these jobs on these GPU models; ``fixed_gpus`` as for ``view_of``, by row."""
    jobs = snapshot.jobs
    high = np.minimum(possible_sizes(snapshot, jobs.max_gpus)[rows], model_gpus(snapshot)[gpu_model])
    free = powers_of_two(jobs.min_gpus[rows], np.maximum(high, jobs.min_gpus[rows]), jobs.step_gpus[rows])
    gpus = np.where(fixed_gpus[:, None] > 0, 0, free)
    gpus[:, 0] = np.where(fixed_gpus > 0, fixed_gpus, gpus[:, 0])
    runs = (gpus > 0)[:, :, None]
    speed, power_w = tables.gangs(rows, gpu_model, np.maximum(gpus, 1))
    return Choices(gpus, np.where(runs, speed, 0.0), np.where(runs, power_w, 0.0))


def work_left_s(snapshot: Snapshot, tables: Tables, rows: Ints, gpu_model: Ints) -> Floats:
    """Return the work each job has left, seconds at speed 1, NaN if nothing predicts it: (n_rows,)."""
    jobs = snapshot.jobs
    left_s = jobs.remaining_s[rows].copy()
    known = np.isfinite(left_s)
    left_s[known] *= tables.default_speed(rows[known], gpu_model[known], jobs.min_gpus[rows][known])
    return left_s


def _gpu_models_of(snapshot: Snapshot, order: Ints, model: Ints) -> Ints:
    """Return the GPU model of each job in order: its own, else the usable one with the most GPUs unclaimed.

    Of a model's nodes in several zones, that is those on which it emits least.
    """
    jobs = snapshot.jobs
    if len(snapshot.gpu_models) == 1:
        return np.where(jobs.eligible[order, 0] | (model[order] >= 0), 0, -1)
    left: list[int] = model_gpus(snapshot).tolist()
    total, zones = tuple(left), Zones.of(snapshot)
    for job in np.flatnonzero(model >= 0).tolist():
        left[model[job]] -= int(jobs.gpus[job])
    gpu_model: list[int] = []
    for job in order.tolist():
        at, least = int(model[job]), int(jobs.min_gpus[job])
        if at < 0:
            usable = [m for m in range(len(left)) if jobs.eligible[job, m] and total[m] >= least]
            at = max(usable, key=lambda m: (left[m], -m), default=-1)
            if at >= 0 and zones is not None:
                same = [m for m in usable if left[m] >= least and snapshot.gpu_models[m] == snapshot.gpu_models[at]]
                at = zones.greenest(job, same or [at], left)
            if at >= 0:
                left[at] -= least
        gpu_model.append(at)
    return np.array(gpu_model, dtype=np.int64)
