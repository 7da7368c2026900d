"""The measurements of kinds of jobs, and an operator's, as models and as the curves that policies see.

A kind's points are fitted again whenever a measurement of it ends (``services.core.profiles``). Sizes and values that
were measured are kept as measured; the model fills in the others.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from services.contracts.schema import Message, Name
from services.core.cycle.snapshot import Curves, Gangs, Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.gangs import GangTable
from services.core.profiles.boards import board_of
from services.core.profiles.capped import CappedModel
from services.core.profiles.goodput import StepTable, best_batches
from services.core.profiles.observations import Observations
from services.core.profiles.priors import ANY_FAMILY, family_of
from services.core.profiles.profile import JobProfile
from services.db.database import Database
from services.kit.logging import Log
from services.scheduler.repository import profiles
from services.scheduler.repository.documents import StoredStepTimes
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.profiles import LearnedRow, NewProfile, PointRow, TableRow

log = Log(__name__)

WIDEST = 64  #: Gang sizes are predicted up to here, and up to the widest that was measured
BATCH_DOUBLINGS = np.arange(-4, 11)  #: Batches at which step times are kept, as powers of two of the base batch


@dataclass(frozen=True)
class Learned:
    """One kind of job on one GPU model with one kind of control.

    Attributes:
        time_mape, energy_mape: Mean absolute error of the model on them, as a share.
    """

    table: GangTable  #: The predicted speed and power of its gangs
    measured_gpus: tuple[int, ...]
    points: int
    time_mape: float
    energy_mape: float
    by_batch: StoredStepTimes | None  #: Step times by total batch, where policies may choose the batch


def learn(points: Sequence[PointRow], gpu_model: str, control: ControlKind, gpus_per_node: int) -> Learned:
    """Return what is learned from these points.

    The batch of the whole job is assumed to stay the same at every size (PowerFlow, section 4). If its size is unknown,
    the smallest gang measured is assumed to have its family's usual batch on each GPU. Where policies choose the batch,
    work counts samples, so that a step takes longer than a unit of work by the ratio of its batch to the user's own.

    Args:
        points: Newest first.
        control: What their ``value`` sets.
        gpus_per_node: GPUs of the widest node, over which wider gangs are assumed to spread.

    Raises:
        DomainError: The points do not belong together.
    """
    gpus, nodes, batch, value, step_s, power_w = (
        np.array(list(map(attrgetter(name), points)), dtype=np.float64)
        for name in ("gpus", "nodes", "local_batch", "value", "step_time_s", "power_w")
    )
    family = next((row.family for row in points if row.family), ANY_FAMILY)
    known = np.flatnonzero(batch > 0)
    base = next((row.base_batch for row in points if row.base_batch), None)
    whole = float((gpus * batch)[known[0]]) if known.size else family_of(family).batch * float(gpus.min())
    whole = whole if base is None else base
    batch = np.where(batch > 0, batch, whole / gpus)
    units = np.ones(gpus.size) if base is None else gpus * batch / base
    seen = Observations.of(
        step_s * units, gpus=gpus, nodes=nodes, control=value, local_batch=batch, mean_power_w=power_w, axis=control
    )
    profile = JobProfile.of(gpu_model, family, control).observe(seen)
    widest = max(WIDEST, int(gpus.max()))
    sizes: Ints = np.array(
        sorted({*gpus.astype(np.int64).tolist(), *(1 << at for at in range(widest.bit_length()))}), dtype=np.int64
    )
    values: Floats = np.unique(value)
    size = sizes[:, None].astype(np.float64)
    time_s, energy_j = profile.foreseen(size, whole / size, values[None, :], np.ceil(size / gpus_per_node))
    speed, drawn_w = 1.0 / time_s, energy_j / time_s
    for point in reversed(points):  # of several the newest stays
        at = np.searchsorted(sizes, point.gpus), np.searchsorted(values, point.value)
        speed[at], drawn_w[at] = 1.0 / point.step_time_s, point.power_w * point.gpus
    model = profile.model
    qualities = (
        (model.time_quality, model.energy_quality)
        if isinstance(model, CappedModel)
        else (model.throughput.quality, model.quality)
    )
    return Learned(
        GangTable(sizes, speed, drawn_w, control, values),
        tuple(np.unique(gpus).astype(np.int64).tolist()),
        len(points),
        qualities[0].mape,
        qualities[1].mape,
        None if base is None else step_times(profile, base, float(values[-1]), gpus_per_node),
    )


def step_times(profile: JobProfile, base_batch: float, default: float, gpus_per_node: int) -> StoredStepTimes:
    """Return step times by size and total batch, from a sixteenth of the base batch up, at a control's default."""
    sizes = [1 << at for at in range(WIDEST.bit_length())]
    size, batch = np.array(sizes, dtype=np.float64)[:, None], base_batch * 2.0**BATCH_DOUBLINGS
    step_s, _ = profile.foreseen(size, batch / size, default, np.ceil(size / gpus_per_node))
    return {"gpus": sizes, "batch": batch.tolist(), "step_s": step_s.tolist()}


async def refit(database: Database) -> bool:
    """Fit one kind of job that has new points since it was last fitted; return whether there was one."""
    async with database.connection() as connection:
        news = await profiles.news(connection)
        if news is None:
            return False
        points = await profiles.points(connection, news.kind, news.gpu_model, news.control)
    control = ControlKind(news.control)
    try:
        found = await asyncio.to_thread(learn, points, news.gpu_model, control, news.gpus_per_node)
    except Exception as error:  # whatever it is, the kinds after it are fitted
        words = str(error) if isinstance(error, DomainError) else repr(error)
        log.warning("profile.not_fitted", kind=news.kind, error=words)
        profile = NewProfile(news.kind, news.gpu_model, news.control, news.newest, len(points), words)
    else:
        table = found.table
        profile = NewProfile(
            news.kind,
            news.gpu_model,
            news.control,
            news.newest,
            found.points,
            gpus=table.gpus.tolist(),
            values=table.values.tolist(),
            speed=table.speed.tolist(),
            power_w=table.power_w.tolist(),
            measured_gpus=found.measured_gpus,
            time_mape=found.time_mape,
            energy_mape=found.energy_mape,
            by_batch=found.by_batch,
        )
    await database.execute(profiles.STORE, *profile)
    return True


Tables = Mapping[str, Mapping[tuple[str, ControlKind], GangTable]]
"""By kind of job, then by GPU model and kind of control; the one learned last comes last."""


def tables_of(rows: Iterable[TableRow]) -> Tables:
    """Return the tables of rows, by kind of job."""
    found: dict[str, dict[tuple[str, ControlKind], GangTable]] = defaultdict(dict)
    for row in rows:
        control = ControlKind(row.control)
        found[row.kind][row.gpu_model, control] = replace(
            gang_table(row.gpus, row.speed, row.power_w, control, row.values), power_error=row.power_error
        )
    return found


def table_of(row: LearnedRow) -> GangTable | None:
    """Return the table of one row, None where nothing could be fitted."""
    if not row.settings:
        return None
    return gang_table(row.gpus, row.speed, row.power_w, ControlKind(row.setting), row.settings)


def gang_table(
    gpus: list[int], speed: list[list[float]], power_w: list[list[float]], control: ControlKind, values: list[float]
) -> GangTable:
    """Return stored columns as a table; ``speed`` and ``power_w`` are (n_sizes, n_values)."""
    return GangTable(
        gpus=np.array(gpus, dtype=np.int64),
        speed=np.array(speed, dtype=np.float64),
        power_w=np.array(power_w, dtype=np.float64),
        kind=control,
        values=np.array(values, dtype=np.float64),
    )


def with_hosts(table: GangTable, host_w: float) -> GangTable:
    """Return the table with the host's draw, ``host_w`` per GPU, added to that of its gangs."""
    return replace(table, power_w=table.power_w + host_w * table.gpus[:, None])


def speed_curve(table: GangTable) -> Floats:
    """Return the speed at 1, 2, ... ``WIDEST`` GPUs at the default, relative to one GPU: (WIDEST,)."""
    speed, _ = table.at(np.arange(1, WIDEST + 1))
    return speed[:, -1] / speed[0, -1]


def curve_of(table: GangTable, gpus: int) -> ControlCurve:
    """Return the speed, relative to the default, and the draw of one GPU, by value of the control, at one size."""
    speed, power_w = table.at(np.array([gpus]))
    return ControlCurve(table.values, speed[0] / speed[0, -1], power_w[0] / gpus)


class MeasuredCurve(Message):
    """One entry of an operator's file of curves, a JSON list, such as::

        {"kind": "resnet50", "gpu_model": "A100-SXM4-80GB", "setting": "power_limit",
         "values": [150, 250, 400], "speed": [0.62, 0.9, 1.0], "power_w": [148, 241, 370]}

    ``kind`` is the job's label ``kind``, for every tenant; ``values`` are watts or MHz, ascending, and end at the
    default; ``speed`` is relative to the default, ``power_w`` what one GPU draws.
    """

    kind: Name
    gpu_model: Name
    setting: ControlKind
    values: list[float] = Field(min_length=1, max_length=1_000)
    speed: list[float]
    power_w: list[float]

    def curve(self) -> ControlCurve:
        """Return it as policies see it; ``DomainError`` if its columns do not match."""
        return ControlCurve(*(np.array(column, dtype=np.float64) for column in (self.values, self.speed, self.power_w)))


KnownCurves = Mapping[str, Mapping[tuple[str, ControlKind], ControlCurve]]
"""By kind of job, then by GPU model and kind of control."""

_entries: TypeAdapter[list[MeasuredCurve]] = TypeAdapter(list[MeasuredCurve])


def read_curves(path: Path) -> KnownCurves:
    """Return the curves of a file; ``DomainError`` if the file does not exist, or does not have that form."""
    try:
        entries = _entries.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DomainError(f"the curves of {path} cannot be read: {error}") from error
    found: dict[str, dict[tuple[str, ControlKind], ControlCurve]] = defaultdict(dict)
    for entry in entries:
        found[entry.kind][entry.gpu_model, entry.setting] = entry.curve()
    return dict(found)


def known_of(
    jobs: JobRows, gpu_models: tuple[str, ...], operators: KnownCurves, learned: Tables, host_w: Mapping[str, float]
) -> tuple[dict[str, int], tuple[Curves, ...], tuple[Gangs, ...]]:
    """Return the row of each kind of job in ``Snapshot.control_curves`` and ``Snapshot.gangs``, and those two.

    An operator's curves take precedence; what was measured here fills in the rest. A kind that users name but about
    which nothing is known has a row of its own, so that a policy sees which unknown jobs are of one kind.

    Args:
        operators: From the operator's file, by users' names of kinds, for all tenants.
        host_w: What hosts draw per GPU, by GPU model, watts: gangs draw that in addition to what their GPUs draw.
    """
    kinds = jobs.columns["kind"].tolist()
    labelled = jobs.where(jobs.have("kind_label")).columns
    named: dict[str, str] = dict(zip(labelled["kind"].tolist(), labelled["kind_label"].tolist(), strict=True))
    rows = {kind: row for row, kind in enumerate(sorted({*operators, *learned, *named}))}
    sizes: dict[str, int] = dict(zip(kinds, jobs.columns["min_gpus"].tolist(), strict=True)) if rows else {}
    curves: list[Curves] = []
    gangs: list[Gangs] = []
    for kind in rows:
        tables = learned.get(kind, {})
        by_name = {key: curve_of(table, sizes.get(kind, 1)) for key, table in tables.items()}
        by_name |= operators.get(named.get(kind, kind), {})
        given = {model for model, _ in operators.get(named.get(kind, kind), {})}
        curves.append(
            {
                (at, control): curve
                for at, name in enumerate(gpu_models)
                for (model, control), curve in by_name.items()
                if model == name
            }
        )
        newest = {
            model: with_hosts(table, host_w.get(model, 0.0))
            for (model, _), table in tables.items()
            if model not in given
        }
        gangs.append({at: newest[name] for at, name in enumerate(gpu_models) if name in newest})
    return rows, tuple(curves), tuple(gangs)


DIGITS = 2  #: Significant digits of noise scales: a little more or less changes no batch


@dataclass(frozen=True)
class _Kind:
    """What the choice depends on; jobs that share all of it share a row. ``by_batch``: JSON text, None: the prior."""

    by_batch: str | None
    family: str
    gpu_model: str
    gpus_per_node: int
    permitted: tuple[int, int]
    base: float
    noise_scale: float


def with_permitted(
    snapshot: Snapshot, jobs: JobRows, tables: Sequence[TableRow], noise_scales: Mapping[str, float]
) -> Snapshot:
    """Return the snapshot with the batches that users permit, and what jobs are predicted to do with the best of them.

    How long a step takes by size and batch comes from the fit to the kind's measurements or, before there are any, from
    the prior of its family and GPU model. The gradient noise scale is the job's own report, else what others of its
    kind have reported, else the base batch itself: then a larger batch pays off only where it makes steps much faster.

    Args:
        jobs: The cluster's jobs, in the order of the snapshot's table.
        tables: What was learned about kinds of jobs, the latest fit last.
        noise_scales: By kind, for jobs that have reported none.

    Source: Pollux sections 3 and 4.1.
    """
    permitting = np.flatnonzero(np.isfinite(jobs.columns["batch_min"])).tolist()
    if not permitting or not snapshot.gpu_models:
        return snapshot
    learned = {(row.kind, row.gpu_model): row.by_batch for row in tables if row.by_batch is not None}
    low, high, curve = (np.full(len(jobs), -1, dtype=np.int64) for _ in range(3))
    rows: dict[_Kind, int] = {}
    for at in permitting:
        job = jobs[at]
        assert job.batch_min is not None
        assert job.batch_max is not None
        assert job.base_batch is not None
        low[at], high[at] = job.batch_min, job.batch_max
        model = _model_of(snapshot, at)
        gpu_model = snapshot.gpu_models[model]
        widest = snapshot.nodes.gpus[snapshot.nodes.gpu_model == model]
        noise = job.noise_scale or noise_scales.get(job.kind) or job.base_batch
        kind = _Kind(
            by_batch=learned.get((job.kind, gpu_model)),
            family=job.family or ANY_FAMILY,
            gpu_model=gpu_model,
            gpus_per_node=int(widest.max(initial=1)),
            permitted=(job.batch_min, job.batch_max),
            base=job.base_batch,
            noise_scale=float(f"{noise:.{DIGITS}g}"),
        )
        curve[at] = rows.setdefault(kind, len(rows))
    found = [_best(kind) for kind in rows]
    return replace(
        snapshot,
        jobs=replace(snapshot.jobs, batch_min=low, batch_max=high, goodput_curve=curve),
        goodput_curves=np.stack([np.stack((goodput, goodput)) for _, goodput, _ in found]),
        goodput_batches=np.stack([np.stack((batches, batches)) for batches, _, _ in found]),
        goodput_gains=np.stack([np.stack((gain, gain)) for _, _, gain in found]),
    )


def _model_of(snapshot: Snapshot, job: int) -> int:
    """Return the GPU model that a job runs on, or else the first that it may use."""
    placement = snapshot.jobs.placements[job]
    on = None if placement is None else snapshot.nodes.index.get(placement.shares[0].node_id)
    return int(snapshot.jobs.eligible[job].argmax()) if on is None else int(snapshot.nodes.gpu_model[on])


@lru_cache(maxsize=1_024)
def _best(kind: _Kind) -> tuple[Ints, Floats, Floats]:
    """Return ``best_batches`` at 1, 2, ... ``WIDEST`` GPUs."""
    stored: StoredStepTimes
    if kind.by_batch is not None:
        stored = json.loads(kind.by_batch)
    else:
        prior = JobProfile.of(kind.gpu_model, kind.family, ControlKind.POWER_LIMIT)
        stored = step_times(prior, kind.base, board_of(kind.gpu_model).peak_w, kind.gpus_per_node)
    times = StepTable(*(np.array(stored[name]) for name in ("gpus", "batch", "step_s")))
    return best_batches(times, kind.noise_scale, kind.base, kind.permitted, WIDEST)
