"""Past intensities of one zone, with related columns of the same file, for forecasts to learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.carbon import Signal
from services.simulator.raw import ReadReport
from services.simulator.readers.grids import Columns, columns_of, read_grid
from services.simulator.readers.text import date_s, first_lines, header_of, number, open_text, table


@dataclass(frozen=True)
class Intensities:
    """The contents of a file."""

    times_s: Floats  #: (n,) UTC seconds, increasing
    values: Floats  #: (n,) gCO2/kWh
    shares: Floats
    """(n, columns) percentages of carbon-free and renewable energy, NaN where a cell is empty; no columns for a file
    without them."""
    expected: tuple[Floats, Floats]
    """The start of each hour covered by the file's day-ahead forecasts of wind and solar generation, (m,) UTC seconds,
    and the forecasts, (m, columns), NaN where a cell is empty. They may extend past ``times_s``."""
    step_s: float  #: The usual interval between values
    sentences: tuple[str, ...]  #: What was read and what was left out, for people


def read_intensities(path: Path, signal: Signal, zone: str) -> Intensities:
    """Return a zone's past; any file that ``read_grid`` knows will do.

    Electricity Maps files also have shares. In any file, columns whose names contain "wind" or "solar" and
    "production_forecast" or "generation forecast" are taken as day-ahead forecasts.

    Raises:
        TraceFormatError: As ``read_grid``, or the file is another zone's.
    """
    grid = read_grid(path, signal, zone=zone)
    step_s = float(np.median(np.diff(grid.times_s))) if grid.times_s.size > 1 else 3600.0
    shares = _shares(path, signal, zone, grid.times_s)
    expected = _expected(path, signal, zone)
    return Intensities(grid.times_s, grid.intensity_gco2_per_kwh, shares, expected, step_s, grid.report.sentences())


def _shares(path: Path, signal: Signal, zone: str, times_s: Floats) -> Floats:
    header = header_of(first_lines(path))
    columns = columns_of(header, signal)
    names = [name for name in header if name.lower().startswith(("carbon-free energy percentage", "renewable energy"))]
    found = np.full((len(times_s), len(names)), math.nan)
    if columns is None or not names:
        return found
    row_of = {time_s: row for row, time_s in enumerate(times_s)}
    with open_text(path) as lines:
        for _, cells in table(lines, (columns.time, *names), ReadReport(path.name, columns.format)):
            try:
                row = row_of.get(date_s(cells[columns.time]))
                if row is not None and _is_of(cells, columns, zone):
                    found[row] = [number(cells[name], name) for name in names]
            except ValueError:
                continue  # read_grid has named the line, or a share is no number: none is known then
    return found


def _expected(path: Path, signal: Signal, zone: str) -> tuple[Floats, Floats]:
    header = header_of(first_lines(path))
    columns = columns_of(header, signal)
    names = [name for name in header if _is_generation_forecast(name.lower())]
    found: dict[float, list[float]] = {}
    if columns is not None and names:
        with open_text(path) as lines:
            for _, cells in table(lines, (columns.time, *names), ReadReport(path.name, columns.format)):
                try:
                    if _is_of(cells, columns, zone):
                        found[date_s(cells[columns.time])] = [number(cells[name], name) for name in names]
                except ValueError:
                    continue  # an hour without a forecast is filled as a gap
    times_s = sorted(found)
    return np.array(times_s), np.array([found[time_s] for time_s in times_s]).reshape(len(times_s), len(names))


def _is_of(cells: Mapping[str, str], columns: Columns, zone: str) -> bool:
    return not columns.zone or cells.get(columns.zone, zone) in ("", zone)


def _is_generation_forecast(name: str) -> bool:
    return any(word in name for word in ("wind", "solar")) and any(
        ending in name for ending in ("production_forecast", "generation forecast")
    )
