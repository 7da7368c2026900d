"""Hourly carbon intensity: the bundled traces of Clover's authors, a single column, or any file of a grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lab.bundles import path_of
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve
from services.core.domain.signal import Signal, impossible
from services.simulator.raw import TraceFormatError
from services.simulator.readers.grids import NO_UNIT, read_grid, scale_of
from services.simulator.readers.text import first_lines, header_of, number, open_text

TRACES = {"ciso-march": "ciso_march.csv", "ciso-september": "ciso_september.csv", "eso-march": "eso_march.csv"}
HOUR_S = 3_600.0


def read_hours(source: str, hours: int) -> tuple[Floats, tuple[str, ...]]:
    """Return the intensity of each of so many hours, gCO2/kWh, and what a person should know of the file.

    A file of one column has a header, or none, and a value per hour from hour 0 on. A header may state the unit. Any
    other file is one that ``read_grid`` knows; its first hour is hour 0.

    Args:
        source: One of ``TRACES``, or a file.
        hours: How many, at least 1.

    Raises:
        TraceFormatError: There is no such file, a value is no intensity above 0, or there are too few.
    """
    if hours < 1:
        raise TraceFormatError(f"--hours must be at least 1, not {hours}")
    path = path_of(TRACES[source]) if source in TRACES else Path(source)
    if not path.is_file():
        raise TraceFormatError(f"there is no file {source!r}; bundled traces: {', '.join(TRACES)}")
    values, notes = _column(path) if len(header_of(first_lines(path))) == 1 else _grid(path)
    if len(values) < hours:
        raise TraceFormatError(f"{path.name} has {len(values)} hours, fewer than the {hours} of --hours")
    if not (np.isfinite(values[:hours]) & (values[:hours] > 0)).all():
        at = int(np.argmin(np.isfinite(values[:hours]) & (values[:hours] > 0)))
        raise TraceFormatError(f"{path.name}: the intensity of hour {at} must be a number above 0, not {values[at]:g}")
    at = next((at for at, each in enumerate(values[:hours]) if impossible(each, 1.0, Signal.AVERAGE_DIRECT)), None)
    if at is not None:
        raise TraceFormatError(f"{path.name}: the intensity of hour {at}, {values[at]:g} gCO2/kWh, is none of a grid")
    return values[:hours], () if source in TRACES else notes


def _column(path: Path) -> tuple[Floats, tuple[str, ...]]:
    values: list[float] = []
    filled = 0  # up to the empty lines at the end
    scale, note = 1.0, NO_UNIT.format(name=path.name)
    with open_text(path) as lines:
        for line, text in enumerate(lines, start=1):
            cell = text.strip().strip('"')
            try:
                values.append(number(cell, "the intensity"))
            except ValueError as error:
                if line > 1:
                    raise TraceFormatError(f"{path.name} line {line}: {error}") from None
                scale, note = scale_of(cell)
                continue
            filled = len(values) if cell else filled
    return scale * np.array(values[:filled]), (note,) if note else ()


def _grid(path: Path) -> tuple[Floats, tuple[str, ...]]:
    series = read_grid(path, Signal.AVERAGE_DIRECT)
    times = series.times_s
    step_s = float(np.median(np.diff(times))) if times.size > 1 else HOUR_S
    curve = CarbonCurve(times, series.intensity_gco2_per_kwh, float(times[-1]) + step_s)
    at_s = np.arange(times[0], float(times[-1]) + step_s, HOUR_S)
    return np.array([curve.at(float(each)) for each in at_s]), series.report.sentences()
