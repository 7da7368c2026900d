"""Past intensities of one zone, with the shares of energy in the same file, for forecasts to learn from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.carbon import Signal
from services.simulator.raw import ReadReport
from services.simulator.readers.grids import columns_of, read_grid
from services.simulator.readers.text import first_lines, header_of, number, open_text, table, utc_s


@dataclass(frozen=True)
class Intensities:
    """The contents of a file.

    Attributes:
        times_s: (n,) UTC seconds, increasing.
        values: (n,) gCO2/kWh.
        shares: (n, columns) percentages of carbon-free and renewable energy, NaN where a cell is empty; no columns in
            a file without them.
        step_s: The usual distance of two values.
        sentences: What was read and what was left out, for people.
    """

    times_s: Floats
    values: Floats
    shares: Floats
    step_s: float
    sentences: tuple[str, ...]


def read_intensities(path: Path, signal: Signal, zone: str) -> Intensities:
    """Return a zone's past; any file that ``read_grid`` knows will do, Electricity Maps' has shares too.

    Raises:
        TraceFormatError: as ``read_grid``, or the file is another zone's.
    """
    grid = read_grid(path, signal, zone=zone)
    step_s = float(np.median(np.diff(grid.times_s))) if grid.times_s.size > 1 else 3600.0
    shares = _shares(path, signal, zone, grid.times_s)
    return Intensities(grid.times_s, grid.intensity_gco2_per_kwh, shares, step_s, grid.report.sentences())


def _shares(path: Path, signal: Signal, zone: str, times_s: Floats) -> Floats:
    header = header_of(first_lines(path))
    columns = columns_of(header, signal, None)
    names = [name for name in header if name.lower().startswith(("carbon-free energy percentage", "renewable energy"))]
    found = np.full((len(times_s), len(names)), math.nan)
    if columns is None or not names:
        return found
    row_of = {time_s: row for row, time_s in enumerate(times_s)}
    with open_text(path) as lines:
        for _, cells in table(lines, (columns.time, *names), ReadReport(path.name, columns.format)):
            try:
                row = row_of.get(utc_s(cells[columns.time]))
                if row is not None and cells.get(columns.zone, zone) in ("", zone):
                    found[row] = [number(cells[name], name) for name in names]
            except ValueError:
                continue  # read_grid has named the line, or a share is no number: none is known then
    return found
