"""Traces and tables that come with the product, so that nothing has to be downloaded. ``NOTICE`` names their sources.

========================== ================================================================================== =========
file                       what                                                                               licence
========================== ================================================================================== =========
``grids_2023.csv.gz``      hourly intensity of five zones, direct and life cycle, 2022-12-31 to 2023-12-31 UTC ODbL
``forecasts_*.csv.gz``     96 hours of direct intensity ahead, one issue a day in 2023, of the same zones     BSD-3
``green_year.csv``         400 arrivals of one day, repeated for every day of the year                         MIT
``green_day.csv``          791 arrivals of one day                                                            MIT
``powerflow_day.csv``     1,901 arrivals of one day                                                          MIT
``a_srpt_day.csv.gz``     12,637 arrivals of one day, repeated for twelve days                                  MIT
``speeds.csv``             measured training speed by model, batch, gang and placement                        see NOTICE
``powers.csv``             measured training power by model, batch and power limit                            see NOTICE
``powerflow_fits.json``    what fits to the measured speeds and powers predict of a V100                      see NOTICE
``slice_speeds.csv``       measured training speed on MIG slices by model and batch                           MIT
``sia_work.csv``           samples until a model has trained, by batch size                                   see NOTICE
``noise.csv``              gradient noise scale by model, tenth of its training and batch size                see NOTICE
``azure_2023_conv.csv.gz`` 19,366 LLM requests of an hour, with their numbers of tokens                       CC BY 4.0
``freesh_pools.json``      GPUs, modes, partitions and profiles of FREESH's authors, as a pool                MIT
``freesh_rates.csv``       a day of their three places' marginal intensities, gCO2/kWh                        MIT
``inference_slices.csv``   EfficientNet alone on fractions of an H200: latency and power                      our own
``inference_shared.csv``   the same with several instances at once                                            our own
``accuracy_*.json``        accuracy of the variants that Clover's authors serve, per cent                     MIT
``ciso_march.csv`` ...     their three traces of 49 hours, gCO2/kWh                                           MIT
========================== ================================================================================== =========

The days are samples of GAIA's sample of Alibaba's PAI trace. ``lab/reproductions/make_traces.py`` makes
all of them from the sources, ``lab/reproductions/make_profiles.py`` the measured tables, and
``lab/reproductions/powerflow_fits.py`` the fits of those.

``green-year``: of the days with at least 400 arrivals, the one whose share of jobs in four categories of duration is
nearest to the one the paper prints of its own day (16, 38, 36 and 8 %); 400 of its arrivals drawn without replacement.
``green-day``: durations drawn in the shares the paper prints of its testbed (22, 30, 30 and 18 %) from all jobs of up
to 37 h, its longest; arrivals drawn from the hours of the day of the whole trace. ``powerflow-day``: as many jobs as
the PowerFlow paper's day has, drawn from the whole trace with their durations and the hours of the day they came at.
``a-srpt``: as many jobs a day as the A-SRPT paper's trace has (758,223 in two months), drawn in the same way; twelve
days are the fifth of it that the paper simulates. All by a fixed seed.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from services.core.domain.carbon import Signal
from services.simulator.raw import Collector, RawJob, RawJobs, RawSeries, ReadReport, TraceFormatError

DAY_S = 86_400.0
HOUR_S = 3_600.0
YEAR_DAYS = 365


@dataclass(frozen=True)
class Bundle:
    """A bundled job trace: its file, how many days its one day is repeated, and the recipe it goes with."""

    file: str
    days: int
    recipe: str = "green"


BUNDLED_JOBS = {
    "green-year": Bundle("green_year.csv", YEAR_DAYS),
    "green-day": Bundle("green_day.csv", 1),
    "a-srpt": Bundle("a_srpt_day.csv.gz", 12, "a-srpt"),
    "powerflow-day": Bundle("powerflow_day.csv", 1, "powerflow"),
}
BUNDLED_ZONES = ("US-CAL-CISO", "GB", "SE", "PL", "CA-ON")
GRIDS_BEGIN_S = 1_672_444_800.0
"""2022-12-31 00:00 UTC."""


def rows_of(file: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a bundled table."""
    packed = resources.files(__package__ or "services.simulator.bundles").joinpath(file).read_bytes()
    text = gzip.decompress(packed) if file.endswith(".gz") else packed
    yield from csv.DictReader(text.decode().splitlines())


def json_of(file: str) -> Any:
    """Return the content of a bundled JSON file."""
    return json.loads(resources.files(__package__ or "services.simulator.bundles").joinpath(file).read_bytes())


def bundled_jobs(name: str, days: float | None = None) -> RawJobs:
    """Return a bundled trace; of one that repeats, only as many days as are needed."""
    bundle = BUNDLED_JOBS[name]
    repeats = bundle.days if days is None else min(bundle.days, max(int(np.ceil(days)), 1))
    jobs = Collector(ReadReport(name, "bundled"))
    rows = [(float(row["arrival_s"]), float(row["duration_s"])) for row in rows_of(bundle.file)]
    for day in range(repeats):
        for number, (arrival_s, duration_s) in enumerate(rows):
            jobs.report.rows += 1
            job = RawJob(f"{name}-{day:03d}-{number:03d}", day * DAY_S + arrival_s, duration_s)
            jobs.add(number + 2, job)
    return jobs.finish()


def bundled_forecasts(zone: str) -> AbstractContextManager[Path]:
    """Yield a file with a bundled zone's forecasts of direct intensity as they were issued in 2023."""
    found = resources.files(__package__ or "services.simulator.bundles").joinpath(f"forecasts_{zone}_2023.csv.gz")
    return resources.as_file(found)


@cache
def _grids() -> dict[str, tuple[float, ...]]:
    columns: dict[str, list[float]] = {}
    for row in rows_of("grids_2023.csv.gz"):
        for name, value in row.items():
            columns.setdefault(name, []).append(float(value))
    return {name: tuple(values) for name, values in columns.items()}


def bundled_grid(zone: str, signal: Signal) -> RawSeries:
    """Return a bundled zone's series.

    Raises:
        TraceFormatError: the signal is not bundled.
    """
    kinds = {Signal.AVERAGE_DIRECT: "direct", Signal.AVERAGE_LIFECYCLE: "lifecycle"}
    if signal not in kinds:
        raise TraceFormatError(f"of {zone} direct and life-cycle intensity are bundled, not {signal.value}")
    values = np.array(_grids()[f"{zone} {kinds[signal]}"])
    report = ReadReport(zone, "bundled", rows=values.size, kept=values.size)
    report.note("contains data of Electricity Maps (electricitymaps.com), under the Open Database License")
    times_s = GRIDS_BEGIN_S + HOUR_S * np.arange(values.size, dtype=np.float64)
    return RawSeries(zone, signal, times_s, values, report)
