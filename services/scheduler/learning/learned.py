"""The measurements of kinds of jobs, as models and as the curves that policies see.

A kind's points are fitted again whenever a measurement of it ends (``services.core.profiles``). Sizes and values that
were measured are kept as measured; the model fills in the others.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.gangs import GangTable
from services.core.profiles.capped import CappedModel
from services.core.profiles.observations import Observations
from services.core.profiles.priors import ANY_FAMILY, family_of
from services.core.profiles.profile import JobProfile
from services.db.database import Database
from services.kit.logging import Log
from services.scheduler.repository import profiles
from services.scheduler.repository.documents import StoredStepTimes
from services.scheduler.repository.profiles import LearnedRow, NewProfile, News, PointRow, TableRow

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
    except DomainError as error:
        log.warning("profile.not_fitted", kind=news.kind, error=str(error))
        profile = _nothing_learned(news, len(points), str(error))
    else:
        profile = _profile_of(news, found)
    async with database.connection() as connection:
        await profiles.store(connection, profile)
    return True


def _profile_of(news: News, found: Learned) -> NewProfile:
    table = found.table
    return NewProfile(
        kind=news.kind,
        gpu_model=news.gpu_model,
        control=news.control,
        gpus=table.gpus.tolist(),
        values=table.values.tolist(),
        speed=table.speed.tolist(),
        power_w=table.power_w.tolist(),
        measured_gpus=list(found.measured_gpus),
        points=found.points,
        time_mape=found.time_mape,
        energy_mape=found.energy_mape,
        detail="",
        newest=news.newest,
        by_batch=found.by_batch,
    )


def _nothing_learned(news: News, points: int, detail: str) -> NewProfile:
    return NewProfile(
        kind=news.kind,
        gpu_model=news.gpu_model,
        control=news.control,
        gpus=[],
        values=[],
        speed=[],
        power_w=[],
        measured_gpus=[],
        points=points,
        time_mape=None,
        energy_mape=None,
        detail=detail,
        newest=news.newest,
        by_batch=None,
    )


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
