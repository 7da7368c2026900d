"""What was measured of kinds of jobs, as models and as the curves that policies see.

A kind's points are fitted anew whenever a measurement of it ends (``services.core.profiles``). Sizes and settings that
were measured stand as measured; the model fills in the others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

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

log = Log(__name__)

WIDEST = 64
"""Gang sizes are foreseen up to here, and up to the widest that was measured."""
KIND = "coalesce(j.tenant_id || '/' || (j.labels ->> 'kind'), j.id)"
"""A kind of job, as the tables name it, of a row ``j`` of jobs: what one tenant's jobs teach stays that tenant's."""

NEWS = """
SELECT p.kind, p.gpu_model, p.setting, max(p.measured_at) AS newest,
       coalesce((SELECT max(jsonb_array_length(n.devices)) FROM nodes n
                  WHERE n.devices -> 0 ->> 'model' = p.gpu_model), 1) AS gpus_per_node
  FROM setting_points p LEFT JOIN setting_profiles f USING (kind, gpu_model, setting)
 WHERE NOT EXISTS (SELECT FROM setting_measurements m
                    WHERE m.state = 'running' AND (m.kind, m.gpu_model, m.setting) = (p.kind, p.gpu_model, p.setting))
 GROUP BY p.kind, p.gpu_model, p.setting, f.fitted_at
HAVING f.fitted_at IS NULL OR max(p.measured_at) > f.fitted_at LIMIT 1
"""

POINTS = """
SELECT p.gpus, p.nodes, p.local_batch, p.value, p.step_time_s, p.power_w, j.spec ->> 'family' AS family
  FROM setting_points p LEFT JOIN jobs j ON j.id = p.job_id
 WHERE p.kind = $1 AND p.gpu_model = $2 AND p.setting = $3 ORDER BY p.measured_at DESC, p.gpus, p.value
"""

STORE = """
INSERT INTO setting_profiles (kind, gpu_model, setting, gpus, settings, speed, power_w, measured_gpus, points,
                              time_mape, energy_mape, detail, fitted_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, greatest(now(), $13))
ON CONFLICT (kind, gpu_model, setting) DO UPDATE SET
    gpus = excluded.gpus, settings = excluded.settings, speed = excluded.speed, power_w = excluded.power_w,
    measured_gpus = excluded.measured_gpus, points = excluded.points, time_mape = excluded.time_mape,
    energy_mape = excluded.energy_mape, detail = excluded.detail, fitted_at = excluded.fitted_at
"""


@dataclass(frozen=True)
class Learned:
    """One kind of job on one GPU model under one kind of setting.

    Attributes:
        table: What gangs of it do.
        measured_gpus: Sizes that were measured.
        points: How many configurations were.
        time_mape, energy_mape: Mean absolute error of the model on them, as a share.
    """

    table: GangTable
    measured_gpus: tuple[int, ...]
    points: int
    time_mape: float
    energy_mape: float


def learn(points: list[Any], gpu_model: str, setting: ControlKind, gpus_per_node: int) -> Learned:
    """Return what these points teach.

    The batch of the job as a whole is taken to stay the same at every size (PowerFlow, section 4). Where nothing says
    how large it is, the smallest gang measured is taken to have its family's usual batch on each GPU.

    Args:
        points: Rows with gpus, nodes, local_batch (0: not known), value, step_time_s, power_w and family (None: not
            known), the newest first.
        gpu_model: The boards' name.
        setting: What ``value`` is.
        gpus_per_node: GPUs of the widest node, over which wider gangs are taken to spread.

    Raises:
        DomainError: The points do not belong together.
    """
    gpus, nodes, batch, value, step_s, power_w = (
        np.array([row[name] for row in points], dtype=np.float64)
        for name in ("gpus", "nodes", "local_batch", "value", "step_time_s", "power_w")
    )
    family = next((row["family"] for row in points if row["family"]), ANY_FAMILY)
    known = np.flatnonzero(batch > 0)
    whole = float((gpus * batch)[known[0]]) if known.size else family_of(family).batch * float(gpus.min())
    batch = np.where(batch > 0, batch, whole / gpus)
    seen = Observations.of(
        step_s,
        gpus=gpus,
        nodes=nodes,
        setting=value,
        local_batch=batch,
        mean_power_w=power_w,
        axis=setting,
    )
    profile = JobProfile.of(gpu_model, family, setting).observe(seen)
    widest = max(WIDEST, int(gpus.max()))
    sizes: Ints = np.array(
        sorted({*gpus.astype(np.int64).tolist(), *(1 << at for at in range(widest.bit_length()))}), dtype=np.int64
    )
    values: Floats = np.unique(value)
    size = sizes[:, None].astype(np.float64)
    time_s, energy_j = profile.foreseen(size, whole / size, values[None, :], np.ceil(size / gpus_per_node))
    speed, drawn_w = 1.0 / time_s, energy_j / time_s
    for row in range(len(points) - 1, -1, -1):  # of several the newest stays
        at = np.searchsorted(sizes, gpus[row]), np.searchsorted(values, value[row])
        speed[at], drawn_w[at] = 1.0 / step_s[row], power_w[row] * gpus[row]
    model = profile.model
    qualities = (
        (model.time_quality, model.energy_quality)
        if isinstance(model, CappedModel)
        else (model.throughput.quality, model.quality)
    )
    return Learned(
        GangTable(sizes, speed, drawn_w, setting, values),
        tuple(np.unique(gpus).astype(np.int64).tolist()),
        len(points),
        qualities[0].mape,
        qualities[1].mape,
    )


async def refit(database: Database) -> bool:
    """Fit one kind of job that has points since it was last fitted; return whether there was one."""
    async with database.connection() as connection:
        news = await connection.fetchrow(NEWS)
        if news is None:
            return False
        key = news["kind"], news["gpu_model"], news["setting"]
        points = await connection.fetch(POINTS, *key)
    try:
        found = await asyncio.to_thread(learn, points, key[1], ControlKind(key[2]), news["gpus_per_node"])
    except DomainError as error:
        log.warning("profile.not_fitted", kind=key[0], error=str(error))
        columns: tuple[Any, ...] = ([], [], [], [], [], len(points), None, None, str(error))
    else:
        table = found.table
        columns = (
            *(column.tolist() for column in (table.gpus, table.values, table.speed, table.power_w)),
            *(list(found.measured_gpus), found.points, found.time_mape, found.energy_mape, ""),
        )
    async with database.connection() as connection:
        await connection.execute(STORE, *key, *columns, news["newest"])
    return True


Tables = Mapping[str, Mapping[tuple[str, ControlKind], GangTable]]
"""By kind of job, then by GPU model and kind of setting; the one learned last comes last."""

PROFILES = """
SELECT kind, gpu_model, setting, gpus, settings, speed, power_w, coalesce(time_mape + energy_mape, 0) AS power_error
  FROM setting_profiles
 WHERE kind = ANY($1::text[]) AND jsonb_array_length(gpus) > 0 ORDER BY fitted_at
"""


def tables_of(rows: list[Any]) -> Tables:
    """Return the tables of rows as ``PROFILES`` gives them."""
    found: dict[str, dict[tuple[str, ControlKind], GangTable]] = defaultdict(dict)
    for row in rows:
        where = row["gpu_model"], ControlKind(row["setting"])
        found[row["kind"]][where] = replace(table_of(row), power_error=row["power_error"])
    return found


def table_of(row: Any) -> GangTable:
    """Return the table of one row that has one."""
    speed, power_w, values = (np.array(row[name], dtype=np.float64) for name in ("speed", "power_w", "settings"))
    return GangTable(np.array(row["gpus"], dtype=np.int64), speed, power_w, ControlKind(row["setting"]), values)


def with_hosts(table: GangTable, host_w: float) -> GangTable:
    """Return the table of gangs each of whose GPUs has so much of its host's draw."""
    return replace(table, power_w=table.power_w + host_w * table.gpus[:, None])


def speed_curve(table: GangTable) -> Floats:
    """Return the speed at 1, 2, ... ``WIDEST`` GPUs at the default setting, in units of that at one: (WIDEST,)."""
    speed, _ = table.at(np.arange(1, WIDEST + 1))
    return speed[:, -1] / speed[0, -1]


def curve_of(table: GangTable, gpus: int) -> ControlCurve:
    """Return speed relative to the default and the draw of one GPU, by setting, of gangs of one size."""
    speed, power_w = table.at(np.array([gpus]))
    return ControlCurve(table.values, speed[0] / speed[0, -1], power_w[0] / gpus)
