"""What an operator has measured of speed and power by setting, from a file: what policies know of live jobs.

A JSON list with one entry per kind of job, GPU model and kind of setting::

    [{"kind": "resnet50", "gpu_model": "A100-SXM4-80GB", "setting": "power_limit",
      "values": [150, 250, 400], "speed": [0.62, 0.9, 1.0], "power_w": [148, 241, 370]}]

``kind`` is the job's label ``kind``; ``values`` are watts or MHz, ascending, and end at the default; ``speed`` is
relative to the default, ``power_w`` what one GPU draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from services.contracts.schema import Message, Name
from services.core.cycle.snapshot import Curves
from services.core.domain.errors import DomainError
from services.core.domain.settings import SettingCurve, SettingKind

LABEL = "kind"


class MeasuredCurve(Message):
    """One entry of the file."""

    kind: Name
    gpu_model: Name
    setting: SettingKind
    values: list[float] = Field(min_length=1, max_length=1_000)
    speed: list[float]
    power_w: list[float]

    def curve(self) -> SettingCurve:
        """Return it as policies see it.

        Raises:
            DomainError: its columns do not hold together.
        """
        return SettingCurve(*(np.array(column, dtype=np.float64) for column in (self.values, self.speed, self.power_w)))


KnownCurves = Mapping[str, Mapping[tuple[str, SettingKind], SettingCurve]]
"""By kind of job, then by GPU model and kind of setting."""

_entries: TypeAdapter[list[MeasuredCurve]] = TypeAdapter(list[MeasuredCurve])


def read_curves(path: Path) -> KnownCurves:
    """Return the curves of a file.

    Raises:
        DomainError: no such file, or not of that form.
    """
    try:
        entries = _entries.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DomainError(f"the curves of {path} cannot be read: {error}") from error
    found: dict[str, dict[tuple[str, SettingKind], SettingCurve]] = defaultdict(dict)
    for entry in entries:
        found[entry.kind][entry.gpu_model, entry.setting] = entry.curve()
    return dict(found)


def curves_of(known: KnownCurves, gpu_models: tuple[str, ...]) -> tuple[dict[str, int], tuple[Curves, ...]]:
    """Return the row of each kind in ``Snapshot.setting_curves``, and those."""
    rows = {kind: row for row, kind in enumerate(sorted(known))}
    columns = [
        {
            (at, setting): curve
            for at, name in enumerate(gpu_models)
            for (model, setting), curve in known[kind].items()
            if model == name
        }
        for kind in rows
    ]
    return rows, tuple(columns)
