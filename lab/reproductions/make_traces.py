"""Make the bundled traces from their sources: ``python -m lab.reproductions.make_traces SOURCES``.

SOURCES is a folder with ``{zone}_*.csv.gz`` in ``carbon/em_hourly`` and ``carbon/forecast_96h`` (nesl/CarbonX) and
``jobs/gaia_pai_100k.csv.gz`` (GAIA). The files are written to ``services/simulator/bundles``;
``make_profiles`` makes the measured tables there.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from pathlib import Path

import numpy as np

from lab.bundles import path_of
from services.core.domain.arrays import Floats
from services.core.domain.carbon import Signal
from services.simulator import bundles
from services.simulator.bundles import BUNDLED_ZONES, GRIDS_BEGIN_S
from services.simulator.readers.grids import read_grid
from services.simulator.readers.jobs import read_raw

BUNDLES = Path(bundles.__file__).parent
LAB_BUNDLES = path_of("")
SEED = 20230101
DAY_S = 86_400.0
ISSUE_H = 96
EDGES_S = (600.0, 3_600.0, 36_000.0)
"""The paper's categories of duration: below 10 minutes, an hour, 10 hours, and above."""
YEAR_JOBS, YEAR_SHARES = 400, (0.16, 0.38, 0.36, 0.08)
POWERFLOW_JOBS = 1_901
SRPT_JOBS = 12_637
"""758,223 jobs in 60 days."""
DAY_JOBS, DAY_SHARES, LONGEST_S = 791, (0.22, 0.30, 0.30, 0.18), 37 * 3_600.0


def shares_of(durations_s: Floats) -> Floats:
    """Return the share of jobs in each of the four categories."""
    return np.bincount(np.digitize(durations_s, EDGES_S), minlength=4).astype(np.float64) / durations_s.size


def year_day(submitted_s: Floats, durations_s: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return arrivals within the day and durations of 400 jobs of one day of the trace."""
    day = (submitted_s // DAY_S).astype(np.int64)
    wanted = np.array(YEAR_SHARES) / sum(YEAR_SHARES)
    full = [number for number, count in enumerate(np.bincount(day)) if count >= YEAR_JOBS]
    best = min(full, key=lambda number: float(np.abs(shares_of(durations_s[day == number]) - wanted).sum()))
    rows = rng.choice(np.flatnonzero(day == best), YEAR_JOBS, replace=False)
    print(f"green-year: day {best} of {len(full)} with 400 arrivals, shares {shares_of(durations_s[rows]).round(3)}")
    return submitted_s[rows] - best * DAY_S, durations_s[rows]


def testbed_day(submitted_s: Floats, durations_s: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return arrivals and durations of 791 jobs in the paper's shares."""
    counts = np.round(np.array(DAY_SHARES) * DAY_JOBS).astype(np.int64)
    counts[np.argmax(counts)] += DAY_JOBS - counts.sum()
    category = np.where(durations_s <= LONGEST_S, np.digitize(durations_s, EDGES_S), -1)
    picked = [rng.choice(np.flatnonzero(category == each), count, replace=False) for each, count in enumerate(counts)]
    durations = rng.permutation(durations_s[np.concatenate(picked)])
    return rng.choice(submitted_s, DAY_JOBS, replace=False) % DAY_S, durations


def drawn_day(submitted_s: Floats, durations_s: Floats, jobs: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return arrivals within the day and durations of a number of jobs of the whole trace."""
    rows = rng.choice(durations_s.size, jobs, replace=False)
    return submitted_s[rows] % DAY_S, durations_s[rows]


def write_jobs(file: Path, arrivals_s: Floats, durations_s: Floats) -> None:
    """Write one day of jobs in order of arrival, whole seconds; packed by the name."""
    order = np.argsort(arrivals_s, kind="stable")
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["arrival_s", "duration_s"])
    out.writerows((round(float(arrivals_s[row])), round(float(durations_s[row]))) for row in order.tolist())
    content = text.getvalue().encode()
    file.write_bytes(gzip.compress(content, 9, mtime=0) if file.suffix == ".gz" else content)
    print(f"{file.name}: {order.size} jobs, {durations_s.sum() / 3600:.0f} h of work, shares {shares_of(durations_s)}")


def write_grids(sources: Path) -> None:
    """Write the five zones' year, direct and life cycle, with the day before it."""
    columns: dict[str, list[str]] = {}
    for zone in BUNDLED_ZONES:
        file = next((sources / "carbon" / "em_hourly").glob(f"{zone}_*.csv.gz"))
        for name, signal in (("direct", Signal.AVERAGE_DIRECT), ("lifecycle", Signal.AVERAGE_LIFECYCLE)):
            grid = read_grid(file, signal)
            kept = grid.times_s >= GRIDS_BEGIN_S
            if not np.array_equal(grid.times_s[kept], GRIDS_BEGIN_S + 3600.0 * np.arange(kept.sum())):
                raise SystemExit(f"{file.name} has a gap")
            columns[f"{zone} {name}"] = [f"{value:g}" for value in grid.intensity_gco2_per_kwh[kept]]
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(columns)
    out.writerows(zip(*columns.values(), strict=True))
    (BUNDLES / "grids_2023.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


def write_forecasts(sources: Path) -> None:
    """Write the five zones' forecasts issued in 2023, to a tenth of a gram, in their order."""
    for zone in BUNDLED_ZONES:
        file = next((sources / "carbon" / "forecast_96h").glob(f"{zone}_*.csv.gz"))
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            head, *rows = csv.reader(lines)
        issues = [rows[at : at + ISSUE_H] for at in range(0, len(rows), ISSUE_H)]
        kept = [row for issue in issues if issue[0][0].startswith("2023") for row in issue]
        text = "\n".join([",".join(head), *(f"{time},{float(value):.1f}" for time, value in kept), ""])
        (BUNDLES / f"forecasts_{zone}_2023.csv.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    """Make the files beside this module."""
    sources = Path(sys.argv[1])
    raw = read_raw(sources / "jobs" / "gaia_pai_100k.csv.gz", "pai-hours")
    rng = np.random.default_rng(SEED)
    write_jobs(BUNDLES / "green_year.csv", *year_day(raw.submitted_s, raw.duration_s, rng))
    write_jobs(BUNDLES / "green_day.csv", *testbed_day(raw.submitted_s, raw.duration_s, rng))
    rng = np.random.default_rng(SEED)  # its own, so that no day changes another
    write_jobs(LAB_BUNDLES / "powerflow_day.csv", *drawn_day(raw.submitted_s, raw.duration_s, POWERFLOW_JOBS, rng))
    rng = np.random.default_rng(SEED)
    write_jobs(LAB_BUNDLES / "a_srpt_day.csv.gz", *drawn_day(raw.submitted_s, raw.duration_s, SRPT_JOBS, rng))
    write_grids(sources)
    write_forecasts(sources)


if __name__ == "__main__":
    main()
