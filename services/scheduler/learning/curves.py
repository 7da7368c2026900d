"""An operator's measurements of speed and power by control, from a file, for policies to use on live jobs.

A JSON list with one entry per kind of job, GPU model and kind of control::

    [{"kind": "resnet50", "gpu_model": "A100-SXM4-80GB", "setting": "power_limit",
      "values": [150, 250, 400], "speed": [0.62, 0.9, 1.0], "power_w": [148, 241, 370]}]

``kind`` is the job's label ``kind``, for every tenant; ``values`` are watts or MHz, ascending, and end at the default;
``speed`` is relative to the default, ``power_w`` what one GPU draws.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from services.contracts.schema import Message, Name
from services.core.cycle.snapshot import Curves, Gangs
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.scheduler.learning.learned import Tables, curve_of, with_hosts
from services.scheduler.repository.kept_jobs import JobRows


class MeasuredCurve(Message):
    """One entry of the file."""

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
