"""The table ``faults`` of ``lab/results/forecasts.md``: ``python -m lab.reproductions.carbon_faults PAGE DATA``.

What gaps, wild values and silence before the moment of forecasting do to the first day's forecast. DATA holds
``em_hourly``. Every 11 days of 2023 a forecast is made from what had been measured until then, less what the
fault took.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lab.reproductions.carbon_report import COLUMNS, FEW_REGRETS, hours_of
from lab.reproductions.marked import fill
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.learning.carbon import forecast
from services.learning.carbon_history import HOUR_S, history_of

EVERY_H, DAY_H, SILENCE_H, WILD = 11 * 24, 24, 6, 25
SEED = 20231
Fault = Callable[[Floats, np.random.Generator], Floats]


def missing(share: float) -> Fault:
    """Return a fault that takes single rows at random."""

    def takes(values: Floats, rng: np.random.Generator) -> Floats:
        return np.where(rng.random(len(values)) < share, np.nan, values)

    return takes


def weeks_missing(values: Floats, rng: np.random.Generator) -> Floats:
    """Return the values without 15 weeks in three years, taken at random."""
    taken = values.copy()
    for first in rng.choice(len(values) - 7 * DAY_H - 1, 15, replace=False):
        taken[first : first + 7 * DAY_H] = np.nan
    return taken


def wild(values: Floats, rng: np.random.Generator) -> Floats:
    """Return the values with 25 of them ten thousand times as large, of either sign."""
    taken = values.copy()
    at = rng.choice(len(values), WILD, replace=False)
    taken[at] *= rng.choice([-1e4, 1e4], WILD)
    return taken


def silent(values: Floats, rng: np.random.Generator) -> Floats:
    """Return the values without the last six hours."""
    return np.concatenate([values[:-SILENCE_H], np.full(SILENCE_H, np.nan)])


FAULTS: dict[str, Fault] = {
    "none": lambda values, rng: values,
    "9 % of the rows missing": missing(0.09),
    "15 % of the rows missing": missing(0.15),
    "30 % of the rows missing": missing(0.3),
    "15 weeks missing": weeks_missing,
    "25 wild values": wild,
    "6 h of silence": silent,
}


def error_of(times: Floats, values: Floats, shares: Floats, fault: Fault) -> tuple[float, str]:
    """Return the mean absolute error of the first day, gCO2/kWh, and the methods that were used."""
    rng = np.random.default_rng(SEED)
    first = int(np.searchsorted(times, np.datetime64("2023-01-01T00:00", "s").astype(np.float64)))
    errors: list[float] = []
    methods: set[str] = set()
    for now in range(first, len(times) - DAY_H, EVERY_H):
        spoilt = fault(values[:now], rng)
        try:
            made = forecast(history_of(times[:now], spoilt, float(times[now]), shares[:now]), DAY_H)
        except DomainError as error:
            methods.add(f"none: {error}")
            continue
        methods.add(made.method)
        begun = int((made.start_s - times[now]) / HOUR_S)
        came = values[now + begun : now + begun + DAY_H]
        errors.append(float(np.abs(made.values - came).mean()))
    return float(np.mean(errors)), ", ".join(sorted(methods))


def table(data: Path) -> str:
    """Return the table."""
    rows = ["| zone | " + " | ".join(FAULTS) + " |", "|---|" + "---:|" * len(FAULTS)]
    for zone in FEW_REGRETS:
        hours = hours_of(data / "em_hourly" / f"{zone}_2021_2023.csv.gz", COLUMNS["direct"])
        cells: list[str] = []
        for name, fault in FAULTS.items():
            error, methods = error_of(*hours, fault)
            print(f"{zone}, {name}: {error:.2f} by {methods}", flush=True)
            cells.append(f"{error:.1f}")
        rows.append(f"| {zone} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), {"faults": lambda: table(Path(sys.argv[2]))})
