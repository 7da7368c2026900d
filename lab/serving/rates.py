"""Carbon intensity of each place, in even steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.bundles import path_of
from lab.serving.requests import cell
from services.core.domain.arrays import Floats
from services.core.domain.signal import Signal, impossible
from services.simulator.raw import ReadReport, TraceFormatError
from services.simulator.readers.text import first_lines, header_of, moment_s, open_text, table

DEFAULT = "freesh_rates.csv"
HOUR_S = 3_600.0


@dataclass(frozen=True)
class PlaceRates:
    """Intensities of places from one moment on; after the last step they begin again.

    Attributes:
        step_s: Length of a step, seconds.
        gco2_per_kwh: (n_places, n_steps).
        names: Of the columns, by place.
    """

    step_s: float
    gco2_per_kwh: Floats
    names: tuple[str, ...]

    def from_hour(self, hour: float) -> PlaceRates:
        """Return the same rates, beginning so many hours later.

        Raises:
            TraceFormatError: The hour is negative, or not at the beginning of a step.
        """
        steps = hour * HOUR_S / self.step_s
        if not 0 <= hour < 1e6 or abs(steps - round(steps)) > 1e-6:
            raise TraceFormatError(
                f"the carbon data has steps of {self.step_s:g} s: they cannot begin {hour:g} hours later"
            )
        return PlaceRates(self.step_s, np.roll(self.gco2_per_kwh, -round(steps), axis=1), self.names)

    def of_steps(self, first: int, count: int) -> Floats:
        """Return the intensities of ``count`` steps from step ``first`` on: (n_places, count)."""
        return self.gco2_per_kwh[:, np.arange(first, first + count) % self.gco2_per_kwh.shape[1]]


def read_rates(source: str | Path | None, places: Sequence[tuple[str, str]]) -> PlaceRates:
    """Return the intensities of places from a table: a column of times in even steps, and a column for each place.

    A column is named by the place or its grid zone, and in gCO2/kWh. Times are seconds, or ISO 8601.

    Args:
        source: A CSV file; None for the day of three places that FREESH's authors published.
        places: (name, zone) of each place.

    Raises:
        TraceFormatError: The file cannot be read, lacks a place, or its steps are not even.
    """
    if source is None:
        return _read(path_of(DEFAULT), "the bundled rates", places)
    return _read(Path(source), Path(source).name, places)


def _read(path: Path, name: str, places: Sequence[tuple[str, str]]) -> PlaceRates:
    header = header_of(first_lines(path))
    if len(header) < 2:
        raise TraceFormatError(f"{name} needs a column of times and one for each place")
    columns = [next((each for each in names if each in header[1:]), "") for names in places]
    if missing := [place for (place, _), column in zip(places, columns, strict=True) if not column]:
        raise TraceFormatError(f"{name}: no column for place {missing[0]}; there are {', '.join(header[1:])}")
    report = ReadReport(name, "rates")
    times: list[float] = []
    values: list[list[float]] = []
    with open_text(path) as text:
        for line, row in table(text, [header[0], *columns], report):
            try:
                times.append(moment_s(row[header[0]]))
                values.append([cell(row[column], column) for column in columns])
            except ValueError as error:
                raise TraceFormatError(f"{name}, line {line}: {error}") from None
            if why := next((why for each in values[-1] if (why := impossible(each, 1.0, Signal.MARGINAL))), ""):
                raise TraceFormatError(f"{name}, line {line}: {why}")
    if report.dropped:
        raise TraceFormatError("; ".join(report.sentences()))
    steps_s = np.diff(times)
    if steps_s.size < 1 or not steps_s[0] > 0 or not np.allclose(steps_s, steps_s[0], atol=1e-3):
        raise TraceFormatError(f"{name} does not go in even steps of time, at least two of them")
    return PlaceRates(float(steps_s[0]), np.array(values).T.copy(), tuple(columns))
