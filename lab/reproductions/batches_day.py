"""The table of ``lab/results/batches.md``: ``python -m lab.reproductions.batches_day PAGE DATA``.

DATA is a folder with ``carbon/em_hourly``, ``carbon/forecast_96h`` and ``llm/freesh_qps_partition_a.csv``. Half of the
requests of FREESH's day may wait for 24 hours. Five places have equal servers; interactive requests are a tenth of all
at each of them. Lines of batches go where and when ``fill_in_time`` says, as in serving's worker, by the forecasts that
had been issued; what they then emit is by the hours as they came. All is fluid: hours, not requests.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from lab.reproductions.carbon_report import COLUMNS, hours_of, issues_of
from lab.reproductions.marked import fill
from services.core.domain.arrays import Floats
from services.core.policies.cleanest_fill import Due, Slot, amounts_now, fill_in_time
from services.serving.batches.worker import MARGIN_S
from services.simulator.bundles import BUNDLED_ZONES

SETS = {
    "the year's five grids": BUNDLED_ZONES,
    "five grids without a very clean one": ("US-CAL-CISO", "PL", "US-MIDA-PJM", "DE", "GB"),
}
PEAK_SHARES = (0.5, 0.7, 0.9)
"""Of all servers' capacity that the day's fullest hour needs."""
LEFT_FREE = 0.1
"""Of a place's capacity, which the router keeps from lines."""
EVERY_DAYS, HOUR_S, WINDOW_H, HORIZON_H = 5, 3_600.0, 24, 48


@dataclass(frozen=True)
class Day:
    """Two days at five places: (2, 5, 96) forecasts as issued on each, and (5, 48) intensities as they came."""

    issued: Floats
    came: Floats


@dataclass(frozen=True)
class Outcome:
    """Emissions, in requests times gCO2/kWh: on arrival, as planned, at best; and the share of lines that were late."""

    arrival: float
    planned: float
    bound: float
    late: float


def days_of(data: Path, zones: tuple[str, ...]) -> list[Day]:
    """Return every fifth day of 2023 for which all that is needed is known."""
    since, until = (float(np.datetime64(at, "s").astype(np.int64)) for at in ("2023-01-01", "2023-12-27"))
    starts = np.arange(since, until, EVERY_DAYS * 24 * HOUR_S)
    issued, came = list[Floats](), list[Floats]()
    for zone in zones:
        issued_s, forecasts = issues_of(data / "carbon" / "forecast_96h" / f"{zone}_2021_2023.csv.gz")
        times, values, _ = hours_of(data / "carbon" / "em_hourly" / f"{zone}_2021_2023.csv.gz", COLUMNS["direct"])
        at = np.searchsorted(issued_s, starts)
        first = np.searchsorted(times, starts)
        issued.append(np.stack([forecasts[at], forecasts[at + 1]], axis=1))
        came.append(values[first[:, None] + np.arange(HORIZON_H)])
    return [
        Day(np.stack([each[at] for each in issued], axis=1), np.stack([each[at] for each in came]))
        for at in range(starts.size)
    ]


def rates_of(data: Path) -> Floats:
    """Return the requests per hour of FREESH's day: (24,)."""
    rows = csv.DictReader((data / "llm" / "freesh_qps_partition_a.csv").read_text(encoding="utf-8").splitlines())
    steps = np.array([sum(float(value) for value in row.values()) for row in rows])
    return HOUR_S * steps.reshape(24, -1).mean(axis=1)


def free_of(rates: Floats, peak_share: float, places: int) -> Floats:
    """Return how many lines each place can answer in an hour of the day: (24,)."""
    capacity = rates.max() / places / peak_share
    return np.maximum((1 - LEFT_FREE) * capacity - rates / 2 / places, 0.0)


def planned(day: Day, lines: Floats, free: Floats) -> tuple[float, float]:
    """Return what the worker's plan emits, and the lines that are not done in time."""
    waiting = np.zeros(WINDOW_H)
    emitted, late = 0.0, 0.0
    for hour in range(HORIZON_H):
        if hour < WINDOW_H:
            waiting[hour] = lines[hour]
        else:
            late += waiting[hour - WINDOW_H]
            waiting[hour - WINDOW_H] = 0.0
        known, today = day.issued[hour // 24], 24 * (hour // 24)
        due = [Due((at + WINDOW_H) * HOUR_S, waiting[at]) for at in range(min(hour + 1, WINDOW_H)) if waiting[at] > 0]
        slots = [
            Slot(str(place), at * HOUR_S, (at + 1) * HOUR_S, float(known[place, at - today]), float(free[at % 24]))
            for place in range(known.shape[0])
            for at in range(hour, hour + WINDOW_H + 1)
        ]
        done = fill_in_time(slots, due, hour * HOUR_S, MARGIN_S)
        for place, amount in amounts_now(slots, done, hour * HOUR_S).items():
            left = min(amount, free[hour % 24])
            for at in np.flatnonzero(waiting):  # the next to expire first
                taken = min(left, waiting[at])
                waiting[at] -= taken
                left -= taken
                emitted += taken * day.came[int(place), hour]
    return emitted, late + float(waiting.sum())


def bound(day: Day, lines: Floats, free: Floats) -> float:
    """Return the least that lines can emit which are done within a day of their hour: a linear programme."""
    places = day.came.shape[0]
    pairs = [(of, at, place) for of in range(WINDOW_H) for at in range(of, of + WINDOW_H) for place in range(places)]
    of, at, place = np.array(pairs).T
    each = np.arange(of.size)
    found = linprog(
        day.came[place, at],
        A_eq=coo_array((np.ones(of.size), (of, each))),
        b_eq=lines,
        A_ub=coo_array((np.ones(of.size), (at * places + place, each)), shape=(HORIZON_H * places, of.size)),
        b_ub=np.repeat(free[np.arange(HORIZON_H) % 24], places),
    )
    if found.status != 0:
        raise ValueError(f"the lines do not fit: {found.message}")
    return float(found.fun)


def outcome(day: Day, lines: Floats, free: Floats) -> Outcome:
    """Return what a day's lines emit in three ways."""
    emitted, late = planned(day, lines, free)
    arrival = float(lines @ day.came[:, :24].mean(axis=0))
    return Outcome(arrival, emitted, bound(day, lines, free), late / float(lines.sum()))


def table(data: Path) -> str:
    """Return the rows, means over the days."""
    rates = rates_of(data)
    rows = [
        "| places | peak, of capacity | carbon, against on arrival | above the bound | late |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, zones in SETS.items():
        days = days_of(data, zones)
        for share in PEAK_SHARES:
            free = free_of(rates, share, len(zones))
            found = [outcome(day, rates / 2, free) for day in days]
            arrival, emitted, least = (
                sum(getattr(each, what) for each in found) for what in ("arrival", "planned", "bound")
            )
            late = max(each.late for each in found)
            rows.append(
                f"| {name} | {share:.0%} | {emitted / arrival - 1:+.1%} | {emitted / least - 1:.1%} | {late:.2%} |"
            )
    return "\n".join(rows).replace("%", " %")


if __name__ == "__main__":
    fill(Path(sys.argv[1]), {"day": lambda: table(Path(sys.argv[2]))})
