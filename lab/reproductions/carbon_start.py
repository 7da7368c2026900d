"""Learn the weights of ``services/learning/carbon_start.py``, and judge them on grids that they never saw.

    python -m lab.reproductions.carbon_start lab/results/first-days.md CARBONX [--keep]

CARBONX is a copy of https://github.com/nesl/CarbonX at 47723d30; of its ``data/forecasting-data``, hours of 2021 to
2024, every file is read that is there. ``--keep`` writes the weights beside the module. Between ``<!-- NAME -->`` and
``<!-- end -->`` the tables grids, judged, lengths and folds of PAGE are made anew.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill as fill_text

import numpy as np

from lab.reproductions.carbon_report import COLUMNS, ZONES, fill, since
from services.core.domain.arrays import Floats, Ints
from services.learning import carbon_start
from services.learning.carbon import HORIZON_H, greenest_regret, mean_errors, persistence, training_days, tune
from services.learning.carbon_history import HOUR_S, History, history_of
from services.learning.carbon_intervals import QUANTILES, inside, outside
from services.learning.carbon_start import DAY_H, LENGTHS_D, REACH_H, WEIGHTS_FILE, WINDOW_D, Weights, started, window
from services.learning.one_thread import one_thread

FIRST, TESTED, END = (
    float(np.datetime64(day, "s").astype(np.int64)) for day in ("2021-01-01", "2023-01-01", "2024-01-01")
)
"""What came before ``TESTED`` is learned from, and the year after it judges."""
MOMENTS = 1400  #: Of each grid to learn from, drawn with replacement from all hours
PENALTY = 1e-3  #: Of the regression, for each moment
FARTHEST = 8.0  #: Changes beyond this many standard deviations count as this many
MOST_ESTIMATED, MOST_REPEATED, LEAST_KNOWN = 0.15, 0.06, 0.98
"""Grids with more hours that their source estimated, or that are as a day before to the digit, teach nothing."""
FOLDS = 4


def grids_of(folder: Path) -> dict[str, tuple[History, bool]]:
    """Return the hours of 2021 to 2023 of each grid, and whether it may teach."""
    found: dict[str, tuple[History, bool]] = {}
    for file in sorted((folder / "data/forecasting-data").glob("*.csv")):
        with file.open(encoding="utf-8") as text:
            rows = csv.reader(text)
            header = next(rows)
            value = next(at for at, name in enumerate(header) if name.endswith(COLUMNS["direct"]))
            cells = [(row[0], row[value] or "nan", row[header.index("Data estimated")]) for row in rows]
        times = np.array([cell[0][:19] for cell in cells], dtype="datetime64[s]").astype(np.float64)
        values, early = np.array([cell[1] for cell in cells], dtype=np.float64), times < TESTED
        estimated = np.array([cell[2].lower() == "true" for cell in cells])[early].mean()
        whole = history_of(times, values, END)
        past = whole.until(int((TESTED - whole.start_s) / HOUR_S))
        repeated = (past.values[DAY_H:] == past.values[:-DAY_H]).mean()
        usable = past.known.mean() >= LEAST_KNOWN and estimated < MOST_ESTIMATED and repeated < MOST_REPEATED
        found[file.stem] = whole, bool(usable and whole.start_s == FIRST and past.values.min() >= 0)
    return found


def learned(grids: Sequence[History]) -> dict[int, Weights]:
    """Return what these grids teach until ``TESTED``, for each length of history."""
    made: dict[int, Weights] = {}
    for days in LENGTHS_D:
        rng = np.random.default_rng(0)
        x, y, units = (np.concatenate(each) for each in zip(*(_taught(grid, days, rng) for grid in grids), strict=True))
        with one_thread():
            penalty = PENALTY * len(x) * np.eye(x.shape[1])
            change = np.linalg.solve(x.T @ x + penalty, x.T @ y).astype(np.float16).astype(np.float64)
            missed = (y - x @ change) / units
        made[days] = Weights(change, np.quantile(missed, QUANTILES, axis=0).astype(np.float16).astype(np.float64))
    return made


def _taught(grid: History, days: int, rng: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Return features, changes from the last value in units of the scale, and the units of their errors."""
    end = int((TESTED - grid.start_s) / HOUR_S)
    values = inside(grid.values, root=True)
    moments = np.unique(rng.integers(WINDOW_D * DAY_H, end - REACH_H, size=MOMENTS))
    seen = window(values, grid.start_s, moments, days)
    change = (values[moments[:, None] + np.arange(REACH_H)] - seen.last) / seen.scale
    return seen.x, np.clip(change, -FARTHEST, FARTHEST), seen.unit / seen.scale


@contextmanager
def _using(weights: dict[int, Weights]) -> Iterator[None]:
    """Let the package use these weights and not those that it ships."""
    shipped = carbon_start.shipped
    carbon_start.shipped = lambda: weights  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        carbon_start.shipped = shipped


def _issues(grid: History) -> tuple[Ints, Floats]:
    """Return 00:00 UTC of each day of the tested year whose four days end in it, and what came: (days, 96)."""
    moments = np.arange(int((TESTED - grid.start_s) / HOUR_S), len(grid.values) - HORIZON_H + 1, DAY_H)
    return moments, grid.values[moments[:, None] + np.arange(HORIZON_H)]


def _with_days(grid: History, moments: Ints, days: int) -> Floats:
    """Return (3, moments, 96): what the pretrained model says with so many days known, and p10 and p90."""
    said: list[Floats] = []
    for moment in moments.tolist():
        known = since(grid, moment - days * DAY_H).until(days * DAY_H)
        levels = inside(known.values, root=True)
        said.append(started(levels, known.start_s, np.array([len(levels)]), HORIZON_H))
    return outside(np.concatenate(said, axis=1), root=True)


def _two_years(grid: History, moments: Ints) -> Floats:
    """Return (3, moments, 96): what is learned from the two years before, and p10 and p90."""
    before = grid.until(int(moments[0]))
    tuned = tune(before)
    if tuned is None:
        raise ValueError("too short a history")
    made = tuned.at(grid, training_days(before, HORIZON_H), moments)
    return np.stack([made, *tuned.quantiles(grid, moments, made)])


def _share_inside(made: Floats, truth: Floats) -> float:
    return float(((truth >= made[1]) & (truth <= made[2])).mean())


def _days(made: Floats, truth: Floats) -> str:
    return " / ".join(f"{error:.2f}" for error in mean_errors(made, truth))


def judged_table(grids: dict[str, History]) -> str:
    """Return errors by day ahead, regret and coverage with a fortnight known, against two years."""
    lines = [
        "| zone | persistence, days 1 to 4 | 14 days known | two years | day 1, 14 days to two years | "
        "inside, 14 days | regret: persistence, 14 days, two years |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    more: list[float] = []
    inside_all: list[float] = []
    for zone, grid in grids.items():
        moments, truth = _issues(grid)
        plain, few, many = (
            persistence(grid, moments, HORIZON_H),
            _with_days(grid, moments, 14),
            _two_years(grid, moments),
        )
        more.append(mean_errors(few[0], truth)[0] / mean_errors(many[0], truth)[0] - 1)
        inside_all.append(_share_inside(few, truth))
        regrets = ", ".join(f"{100 * greenest_regret(each, truth):.2f}" for each in (plain, few[0], many[0]))
        errors = " | ".join(_days(each, truth) for each in (plain, few[0], many[0]))
        lines.append(f"| {zone} | {errors} | {100 * more[-1]:+.1f} % | {100 * inside_all[-1]:.0f} % | {regrets} % |")
    mean, most = 100 * float(np.mean(more)), 100 * max(more)
    covered = f"{100 * np.mean(inside_all):.1f} % ({100 * min(inside_all):.0f} to {100 * max(inside_all):.0f} %)"
    return "\n".join([*lines, "", f"Day 1: {mean:+.1f} % in the mean, {most:+.1f} % at most. Inside: {covered}."])


def lengths_table(grids: dict[str, History]) -> str:
    """Return how much day 1's error exceeds that of two years, by the days known."""
    lines = [f"| zone | {' | '.join(f'{days} d' for days in LENGTHS_D)} |", "|---|" + "---:|" * len(LENGTHS_D)]
    for zone, grid in grids.items():
        moments, truth = _issues(grid)
        best = mean_errors(_two_years(grid, moments)[0], truth)[0]
        made = (_with_days(grid, moments, days)[0] for days in LENGTHS_D)
        lines.append(
            f"| {zone} | {' | '.join(f'{100 * (mean_errors(m, truth)[0] / best - 1):+.0f} %' for m in made)} |"
        )
    return "\n".join(lines)


def folds_table(grids: dict[str, History]) -> str:
    """Return the same for every grid that teaches, each by weights of which its quarter of the grids taught nothing."""
    zones = list(grids)
    more: dict[str, float] = {}
    covered: list[float] = []
    for part in np.array_split(np.random.default_rng(1).permutation(len(zones)), FOLDS):
        out = {zones[at] for at in part.tolist()}
        with _using(learned([grid for zone, grid in grids.items() if zone not in out])):
            for zone in sorted(out):
                moments, truth = _issues(grids[zone])
                few, many = _with_days(grids[zone], moments, 14), _two_years(grids[zone], moments)
                more[zone] = mean_errors(few[0], truth)[0] / mean_errors(many[0], truth)[0] - 1
                covered.append(_share_inside(few, truth))
    by, share = sorted(more, key=lambda zone: more[zone]), np.array(covered)
    above = ", ".join(f"{zone} {100 * more[zone]:+.0f} %" for zone in reversed(by) if more[zone] > 0.2) or "none"
    between = 100 * ((share >= 0.7) & (share <= 0.9)).mean()
    rows = [
        ("grids", f"{len(zones)}"),
        ("day 1, 14 days to two years, mean", f"{100 * np.mean(list(more.values())):+.1f} %"),
        (
            "median, 90th percentile",
            " / ".join(f"{100 * np.quantile(list(more.values()), q):+.1f} %" for q in (0.5, 0.9)),
        ),
        ("above +20 %", above),
        ("inside, mean", f"{100 * share.mean():.1f} %"),
        ("grids with 70 to 90 % inside", f"{between:.0f} %"),
    ]
    return "\n".join(["| | |", "|---|---:|", *(f"| {name} | {figure} |" for name, figure in rows)])


def main(arguments: Sequence[str]) -> None:
    """Fill the page; with ``--keep`` write the weights first."""
    page, grids = Path(arguments[0]), grids_of(Path(arguments[1]))
    taught = {zone: grid for zone, (grid, teaches) in grids.items() if teaches and zone not in ZONES}
    weights = learned(list(taught.values()))
    if "--keep" in arguments:
        kept = {f"change_{days}": each.change.astype(np.float16) for days, each in weights.items()}
        kept |= {f"quantiles_{days}": each.quantiles.astype(np.float16) for days, each in weights.items()}
        np.savez_compressed(WEIGHTS_FILE, **kept)  # pyright: ignore[reportArgumentType]
    judges = {zone: grids[zone][0] for zone in ZONES}
    with _using(weights):
        parts = {
            "grids": fill_text(", ".join(taught), 120, break_on_hyphens=False),
            "judged": judged_table(judges),
            "lengths": lengths_table(judges),
        }
    parts["folds"] = folds_table(taught)
    page.write_text(fill(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
