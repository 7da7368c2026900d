"""Measured profiles of model variants on slices, and their accuracies, as an application of the core.

A slice that is a whole GPU (``sm_percent`` 100) runs alone; its figures come from the table of instances measured
alone. On a smaller slice the neighbours slow an instance down and share the GPU's power; those figures come from the
table of instances measured together. Among several mixes with the same size, the one with the most instances counts.
The GPU's power above idle is split over the instances of a mix by their size. A size that was only measured alone, 3g
in the bundled tables, takes a slowdown and power between those of its neighbours.

``python -m lab.inference.profiles`` writes the bundled ones for the example of an application, in a checkout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.bundles import path_of
from services.core.domain.gpus import SLICE_SEVENTHS, GpuModel, likeliest_gpu_model, slice_memory_gib
from services.core.policies.clover.application import Application
from services.simulator.raw import ReadReport, TraceFormatError
from services.simulator.readers.text import number, open_text, table

EXAMPLE = Path(__file__).parents[2] / "examples" / "apps" / "efficientnet.json"
_P95 = 1.6449  #: Standard deviations from the mean to the 95th percentile of a normal distribution
_COLUMNS = ("gpu", "family", "variant", "sm_percent", "mean_ms", "p95_ms", "gpu_power_w")
SLICE_SM_PERCENT = (14, 28, 43, 57, 100)
"""Of the multiprocessors, for CUDA MPS, which stands in for slices on boards without MIG."""
_SIZES: Mapping[int, int] = dict(zip(SLICE_SM_PERCENT, SLICE_SEVENTHS, strict=True))


@dataclass(frozen=True)
class Measured:
    """One row of a profile.

    Attributes:
        gpu, variant: What ran, and on which GPU.
        mean_s, p95_s: Service time.
    """

    gpu: str
    variant: str
    size: int  #: Of the slice, in sevenths
    mean_s: float
    p95_s: float
    power_w: float  #: Of the whole GPU
    sevenths: int  #: Total size of all instances that ran at once
    instances: int  #: How many ran at once
    memory_gib: float  #: What the variant needs; 0 if the profile does not say


def read_application(
    family: str, profile: Path | None = None, shared: Path | None = None, accuracy: Path | None = None
) -> Application:
    """Return a model family's variants as measured.

    Args:
        family: Selects the rows of the profile and the bundled accuracies.
        profile: Instances measured alone; the bundled table by default.
        shared: Instances measured together; by default the bundled table, or none if ``profile`` is given.
        accuracy: A JSON object of per cent by variant; the family's bundled one by default.

    Raises:
        TraceFormatError: A file cannot be used; the message names its line or variant.
        DomainError: The numbers do not make an application.
    """
    alone = _read_rows(profile or path_of("inference_slices.csv"), family)
    if shared is None and profile is None:
        shared = path_of("inference_shared.csv")
    together = _read_rows(shared, family) if shared else []
    board = _board({row.gpu for row in (*alone, *together)})
    variants = tuple(dict.fromkeys(row.variant for row in alone))
    shape = (len(variants), len(SLICE_SEVENTHS))
    service_s, jitter_s, busy_w = (np.full(shape, math.nan) for _ in range(3))
    for row, variant in enumerate(variants):
        mine = {each.size: each for each in alone if each.variant == variant}
        mixed = _most_shared([each for each in together if each.variant == variant])
        for column, size in enumerate(SLICE_SEVENTHS):
            if size not in mine or mine[size].memory_gib > slice_memory_gib(board)[column]:
                continue
            service_s[row, column], jitter_s[row, column], busy_w[row, column] = _instance(mine, mixed, size, board)
    values = _accuracies(accuracy or _bundled_accuracy(family), variants)
    return Application(variants, values, service_s, jitter_s, busy_w, board.idle_w)


def _instance(
    mine: Mapping[int, Measured], mixed: Mapping[int, Measured], size: int, board: GpuModel
) -> tuple[float, float, float]:
    """Return an instance's mean service time on a slice, its deviation, and its watts above idle."""
    alone = mine[size]
    deviation = max(alone.p95_s - alone.mean_s, 0.0) / _P95
    if size == SLICE_SEVENTHS[-1] or not mixed:
        return alone.mean_s, deviation, max(alone.power_w - board.idle_w, 0.0)
    sizes = sorted(set(mixed) & set(mine))
    if not sizes:
        return alone.mean_s, deviation, max(alone.power_w - board.idle_w, 0.0)
    slowdown = float(np.interp(size, sizes, [mixed[each].mean_s / mine[each].mean_s for each in sizes]))
    watts = [max(mixed[each].power_w - board.idle_w, 0.0) * each / mixed[each].sevenths for each in sizes]
    return alone.mean_s * slowdown, deviation * slowdown, float(np.interp(size, sizes, watts))


def _most_shared(rows: list[Measured]) -> dict[int, Measured]:
    """Return, by slice size, the mean over the rows of the mix with the most instances."""
    found: dict[int, Measured] = {}
    for size in {row.size for row in rows}:
        most = max(row.instances for row in rows if row.size == size)
        chosen = [row for row in rows if row.size == size and row.instances == most]
        first = chosen[0]
        found[size] = Measured(
            first.gpu,
            first.variant,
            size,
            float(np.mean([row.mean_s for row in chosen])),
            float(np.mean([row.p95_s for row in chosen])),
            float(np.mean([row.power_w for row in chosen])),
            first.sevenths,
            most,
            first.memory_gib,
        )
    return found


def _read_rows(path: Path, family: str) -> list[Measured]:
    report = ReadReport(path.name, "a profile of inference on slices")
    found: list[Measured] = []
    families: set[str] = set()
    with open_text(path) as lines:
        for line, cells in table(lines, _COLUMNS, report):
            families.add(cells["family"])
            if cells["family"] != family:
                continue
            try:
                found.append(_row(cells))
            except ValueError as error:
                raise TraceFormatError(f"{path.name} line {line}: {error}") from None
    if report.dropped:
        reason, at = next((reason, at[0]) for reason, at in report.lines.items())
        raise TraceFormatError(f"{path.name} line {at}: {reason}")
    if not found:
        known = ", ".join(sorted(families)) or "none"
        raise TraceFormatError(
            f"{path.name} has no family {family!r}, only {known}; give a profile of it (--profile, --shared-profile)"
        )
    alone = [(row.variant, row.size) for row in found if row.instances == 1]
    if twice := next((each for each in alone if alone.count(each) > 1), None):
        raise TraceFormatError(f"{path.name}: variant {twice[0]} on {twice[1]}g is there twice")
    return found


def _row(cells: Mapping[str, str]) -> Measured:
    percent = _positive(cells, "sm_percent")
    if percent not in _SIZES:
        raise ValueError(f"sm_percent {percent:g} is no slice; slices are {', '.join(map(str, _SIZES))}")
    mix = (cells.get("concurrent_instances") or "1").split("+")
    sizes = (
        [_SIZES.get(int(part), 0) if part.isdigit() else 0 for part in mix] if len(mix) > 1 else [_SIZES[int(percent)]]
    )
    if 0 in sizes:
        raise ValueError(f"concurrent_instances {'+'.join(mix)!r} is no sum of slices such as 57+28+14")
    mean_s = _positive(cells, "mean_ms") / 1_000
    return Measured(
        gpu=cells["gpu"],
        variant=cells["variant"],
        size=_SIZES[int(percent)],
        mean_s=mean_s,
        p95_s=_positive(cells, "p95_ms") / 1_000,
        power_w=_positive(cells, "gpu_power_w"),
        sevenths=sum(sizes),
        instances=len(sizes),
        memory_gib=_positive(cells, "memory_gib") if cells.get("memory_gib") else 0.0,
    )


def _positive(cells: Mapping[str, str], column: str) -> float:
    value = number(cells[column], column)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{column} must be a number above 0, not {cells[column] or 'empty'}")
    return value


def _board(names: set[str]) -> GpuModel:
    if len(names) > 1:
        raise TraceFormatError(f"a profile is of one GPU model, not of {' and '.join(sorted(names))}")
    name = next(iter(names))
    board = likeliest_gpu_model(name)
    if board is None:
        raise TraceFormatError(f"gpu {name!r} is not in the catalogue of GPU models, which has the idle power")
    return board


def _bundled_accuracy(family: str) -> Path:
    path = path_of(f"accuracy_{family}.json")
    if not path.is_file():
        raise TraceFormatError(f"no accuracies of family {family!r} are bundled; give a file of them (--accuracy)")
    return path


def _accuracies(path: Path, variants: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        with open_text(path) as lines:
            document: Any = json.load(lines)
    except ValueError as error:
        raise TraceFormatError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise TraceFormatError(f"{path.name} is not an object of accuracies by variant")
    values: list[float] = []
    for variant in variants:
        key = next((key for key in (variant, variant.rsplit("-", 1)[-1]) if key in document), None)
        if key is None:
            raise TraceFormatError(f"{path.name} has no accuracy of variant {variant}")
        value = document[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 100:
            raise TraceFormatError(f"{path.name}: the accuracy of {key} must be a percentage above 0, not {value}")
        values.append(float(value))
    return np.array(values)


def for_the_example(family: str) -> dict[str, dict[str, Any]]:
    """Return a family's variants, with their figures by slice, as ``examples/apps/variant_server.py`` reads them."""
    measured = read_application(family)

    def figures(row: int, column: int) -> dict[str, float]:
        of = {"service_s": measured.service_s, "jitter_s": measured.jitter_s, "busy_w": measured.busy_w}
        return {name: float(values[row, column]) for name, values in of.items()}

    return {
        variant: {
            "accuracy_pct": float(measured.accuracy[row]),
            "slices": {
                f"{SLICE_SEVENTHS[at]}g": figures(row, at) for at in np.flatnonzero(measured.fits[row]).tolist()
            },
        }
        for row, variant in enumerate(measured.variants)
    }


if __name__ == "__main__":
    EXAMPLE.write_text(json.dumps(for_the_example("efficientnet"), indent=1) + "\n")
