"""Traces and tables that ship with the product, so that nothing needs downloading. ``NOTICE`` names their sources.

========================== ================================================================================== =========
file                       what                                                                               licence
========================== ================================================================================== =========
``grids_2023.csv.gz``      hourly intensity of five zones, direct and life cycle, 2022-12-31 to 2023-12-31 UTC ODbL
``forecasts_*.csv.gz``     96-hour forecasts of direct intensity for the same zones, issued daily in 2023     BSD-3
``green_year.csv``         one day's 400 arrivals, repeated every day of the year                              MIT
``green_day.csv``          one day's 791 arrivals                                                             MIT
``measured.npz``           measured speed, power and batches of five models, from the lab's tables            see NOTICE
========================== ================================================================================== =========

The days are drawn from GAIA's sample of Alibaba's PAI trace. ``lab/reproductions/make_traces.py`` builds the
traces from their sources.

``green-year``: among the days with at least 400 arrivals, the one whose shares of jobs in four duration categories are
closest to those the paper prints for its own day (16, 38, 36 and 8 %); 400 of its arrivals, drawn without replacement.
``green-day``: durations drawn in the shares the paper prints for its testbed (22, 30, 30 and 18 %) from all jobs of up
to 37 h, its longest; arrivals drawn from the whole trace's hours of the day. All with a fixed seed.
"""

import csv
import gzip
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from services.core.domain.carbon import Signal
from services.simulator.raw import Collector, RawJob, RawJobs, RawSeries, ReadReport, TraceFormatError

DAY_S = 86_400.0
HOUR_S = 3_600.0
YEAR_DAYS = 365


OURS = "services.simulator.bundles"


@dataclass(frozen=True)
class Bundle:
    """A bundled job trace; ``file`` and ``package``: where it is."""

    file: str
    days: int  #: How many days its single day is repeated for
    recipe: str = "green"  #: The recipe that it is used with by default
    package: str = OURS


BUNDLED_ZONES = ("US-CAL-CISO", "GB", "SE", "PL", "CA-ON")
GRIDS_BEGIN_S = 1_672_444_800.0  #: 2022-12-31 00:00 UTC


def rows_of(file: str, package: str = OURS) -> Iterator[dict[str, str]]:
    """Yield the rows of a table that ships in a package."""
    packed = resources.files(package).joinpath(file).read_bytes()
    text = gzip.decompress(packed) if file.endswith(".gz") else packed
    yield from csv.DictReader(text.decode().splitlines())


def bundled_jobs(name: str, bundle: Bundle, days: float | None = None) -> RawJobs:
    """Return a bundled trace; if it repeats, only as many days as are needed."""
    repeats = bundle.days if days is None else min(bundle.days, max(int(np.ceil(days)), 1))
    jobs = Collector(ReadReport(name, "bundled"))
    rows = [(float(row["arrival_s"]), float(row["duration_s"])) for row in rows_of(bundle.file, bundle.package)]
    for day in range(repeats):
        for number, (arrival_s, duration_s) in enumerate(rows):
            jobs.report.rows += 1
            job = RawJob(f"{name}-{day:03d}-{number:03d}", day * DAY_S + arrival_s, duration_s)
            jobs.add(number + 2, job)
    return jobs.finish()


def bundled_forecasts(zone: str) -> AbstractContextManager[Path]:
    """Yield a file with a bundled zone's forecasts of direct intensity, as issued in 2023."""
    found = resources.files(OURS).joinpath(f"forecasts_{zone}_2023.csv.gz")
    return resources.as_file(found)


@cache
def _grids() -> dict[str, tuple[float, ...]]:
    columns: dict[str, list[float]] = {}
    for row in rows_of("grids_2023.csv.gz"):
        for name, value in row.items():
            columns.setdefault(name, []).append(float(value))
    return {name: tuple(values) for name, values in columns.items()}


def bundled_grid(zone: str, signal: Signal) -> RawSeries:
    """Return a bundled zone's series; ``TraceFormatError`` if the signal is not bundled."""
    kinds = {Signal.AVERAGE_DIRECT: "direct", Signal.AVERAGE_LIFECYCLE: "lifecycle"}
    if signal not in kinds:
        raise TraceFormatError(f"of {zone} direct and life-cycle intensity are bundled, not {signal.value}")
    values = np.array(_grids()[f"{zone} {kinds[signal]}"])
    report = ReadReport(zone, "bundled", rows=values.size, kept=values.size)
    report.note("contains data of Electricity Maps (electricitymaps.com), under the Open Database License")
    times_s = GRIDS_BEGIN_S + HOUR_S * np.arange(values.size, dtype=np.float64)
    return RawSeries(zone, signal, times_s, values, report)
