"""The jobs of a snapshot as Algorithm 1 takes them: in the order of their claim, each with its choices.

What is predicted of a kind of job is its table (``Snapshot.gangs``). A job without one is taken to scale with a fixed
exponent and to draw what it was last measured at; its settings are known if its kind's curve is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.core.cycle.ranking import order_by, wishes_first
from services.core.cycle.sizes import model_gpus, possible_sizes
from services.core.cycle.snapshot import Bools, Floats, Ints, Phase, Snapshot
from services.core.domain.gangs import GangTable
from services.core.domain.settings import SettingKind
from services.core.policies.powerflow.choices import Choices, powers_of_two
from services.core.policies.powerflow.config import PowerflowConfig


@dataclass
class Tables:
    """The table of every job on every GPU model it might use, looked up once per kind of job."""

    snapshot: Snapshot
    config: PowerflowConfig
    _found: dict[tuple[object, ...], GangTable] = field(default_factory=dict[tuple[object, ...], GangTable])
    _rows: dict[tuple[int, int], tuple[Floats, Floats]] = field(
        default_factory=dict[tuple[int, int], tuple[Floats, Floats]]
    )

    def of(self, job: int, gpu_model: int) -> GangTable:
        """Return what is known or assumed of a job on a GPU model."""
        jobs = self.snapshot.jobs
        kind, curve = int(jobs.setting_curve[job]), int(jobs.speed_curve[job])
        if 0 <= kind < len(self.snapshot.gangs) and gpu_model in self.snapshot.gangs[kind]:
            key: tuple[object, ...] = (kind, gpu_model)
        else:
            key = (kind, gpu_model, curve, float(np.nan_to_num(jobs.gpu_power_w[job], nan=-1.0)))
        table = self._found.get(key)
        if table is None:
            table = self._found[key] = self._look_up(job, gpu_model, known=len(key) == 2)
        return table

    def gang(self, job: int, gpu_model: int, gpus: int) -> tuple[Floats, Floats]:
        """Return speed and power by setting of one gang: (n_settings,) each."""
        table = self.of(job, gpu_model)
        key = id(table), gpus
        if key not in self._rows:
            speed, power_w = table.at(np.array([gpus]))
            self._rows[key] = speed[0], power_w[0]
        return self._rows[key]

    def _look_up(self, job: int, gpu_model: int, *, known: bool) -> GangTable:
        snapshot = self.snapshot
        if known:
            table = snapshot.gangs[int(snapshot.jobs.setting_curve[job])][gpu_model]
        else:
            table = self._assumed(job, gpu_model)
        return table if table.kind is None or snapshot.takes(gpu_model, table.kind) else table.default_only()

    def _assumed(self, job: int, gpu_model: int) -> GangTable:
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
        for kind in sorted(SettingKind, key=lambda kind: kind.value != config.setting):
            found = snapshot.setting_curve(job, gpu_model, kind)
            if found is not None:
                cooler = found.power_w / found.at(None)[1]
                return GangTable(gpus, speed[:, None] * found.speed, drawn_w * cooler, kind, found.values)
        return GangTable(gpus, speed[:, None], drawn_w, None, np.ones(1))


@dataclass(frozen=True)
class View:
    """Rows of Algorithm 1; every column is (n_rows,) in the order of their claim.

    Attributes:
        jobs: Indices into the job table.
        pool: GPU model each runs on, or would.
        holds: Whether the job holds devices and may go on.
        tables: Of every job.
        choices: What each could have.
        work_s: Seconds of work left at speed 1, NaN where unknown.
    """

    jobs: Ints
    pool: Ints
    holds: Bools
    tables: Tables
    choices: Choices
    work_s: Floats


def view_of(snapshot: Snapshot, config: PowerflowConfig, model: Ints, fixed_gpus: Ints) -> View:
    """Return the jobs that could run, on the GPU models they have or are assigned.

    Args:
        snapshot: The cluster.
        config: Parameters.
        model: (n_jobs,) GPU model of what a job holds, -1 for none.
        fixed_gpus: (n_jobs,) the one size a job may have, 0 where it may have any of its own.
    """
    jobs = snapshot.jobs
    holds = (jobs.phase == Phase.STARTING) | (jobs.phase == Phase.RUNNING)
    able = holds | jobs.eligible.any(axis=1)
    order = wishes_first(order_by(jobs.ids, jobs.submitted_s), jobs.priority)
    order = order[able[order]]
    pool = _pools(snapshot, order, np.where(holds, model, -1))
    order, pool = order[pool >= 0], pool[pool >= 0]
    tables = Tables(snapshot, config)
    choices = choices_of(snapshot, tables, order, pool, fixed_gpus[order])
    return View(order, pool, holds[order], tables, choices, work_left_s(snapshot, tables, order, pool))


def choices_of(snapshot: Snapshot, tables: Tables, rows: Ints, pool: Ints, fixed_gpus: Ints) -> Choices:
    """Return the choices of these jobs on these GPU models; ``fixed_gpus`` as for ``view_of``, by row."""
    jobs = snapshot.jobs
    high = np.minimum(possible_sizes(snapshot, jobs.max_gpus)[rows], model_gpus(snapshot)[pool])
    free = powers_of_two(jobs.min_gpus[rows], np.maximum(high, jobs.min_gpus[rows]), jobs.step_gpus[rows])
    gpus = np.where(fixed_gpus[:, None] > 0, 0, free)
    gpus[:, 0] = np.where(fixed_gpus > 0, fixed_gpus, gpus[:, 0])
    of: dict[int, tuple[GangTable, list[int]]] = {}
    for row, (job, model) in enumerate(zip(rows.tolist(), pool.tolist(), strict=True)):
        table = tables.of(job, model)
        of.setdefault(id(table), (table, []))[1].append(row)
    n_settings = max((table.values.size for table, _ in of.values()), default=1)
    speed, power_w = np.zeros((2, *gpus.shape, n_settings))
    for table, which in of.values():
        known = np.unique(gpus[which])
        at = np.searchsorted(known, gpus[which])
        of_speed, of_power_w = table.at(np.maximum(known, 1))
        runs = (gpus[which] > 0)[:, :, None]
        speed[which, :, : table.values.size] = np.where(runs, of_speed[at], 0.0)
        power_w[which, :, : table.values.size] = np.where(runs, of_power_w[at], 0.0)
    return Choices(gpus, speed, power_w)


def work_left_s(snapshot: Snapshot, tables: Tables, rows: Ints, pool: Ints) -> Floats:
    """Return the work each job has left, seconds at speed 1, NaN where nothing foretells it: (n_rows,)."""
    jobs = snapshot.jobs
    left_s = jobs.remaining_s[rows].copy()
    for row in np.flatnonzero(np.isfinite(left_s)).tolist():
        job = int(rows[row])
        left_s[row] *= tables.gang(job, int(pool[row]), int(jobs.min_gpus[job]))[0][-1]
    return left_s


def _pools(snapshot: Snapshot, order: Ints, model: Ints) -> Ints:
    """Return the GPU model of each job in order: its own, else of those it may use the one with most GPUs unclaimed."""
    jobs = snapshot.jobs
    if len(snapshot.gpu_models) == 1:
        return np.where(jobs.eligible[order, 0] | (model[order] >= 0), 0, -1)
    left: list[int] = model_gpus(snapshot).tolist()
    total = tuple(left)
    for job in np.flatnonzero(model >= 0).tolist():
        left[model[job]] -= int(jobs.gpus[job])
    pool: list[int] = []
    for job in order.tolist():
        at, least = int(model[job]), int(jobs.min_gpus[job])
        if at < 0:
            usable = [m for m in range(len(left)) if jobs.eligible[job, m] and total[m] >= least]
            at = max(usable, key=lambda m: (left[m], -m), default=-1)
            if at >= 0:
                left[at] -= least
        pool.append(at)
    return np.array(pool, dtype=np.int64)
