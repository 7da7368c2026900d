"""The tables of ``lab/results/forecasts.md``: ``python -m lab.reproductions.carbon_report PAGE DATA``.

DATA is a folder with ``em_hourly`` (Electricity Maps' hours of 2021 to 2023) and ``forecast_96h`` (a foundation model's
96-hour forecasts as issued, one at 00:00 UTC of each day). In PAGE, what stands between ``<!-- NAME -->`` and
``<!-- end -->`` is made anew for the names errors, regret, rolling, intervals, intervals-chosen,
lifecycle, chosen, default, generation, first-months and marginal; for the last three DATA has ``generation`` and
``dayahead_2021h2``, hours with forecasts of wind and sun, and ``subhourly``, a month of WattTime's marginal intensity.

Every forecast of 2023 is made at the hours at which those were issued, from what had been measured until then. The
model has learned from 2021 and 2022 alone and stays as it is, but for the table ``rolling``, where it is tuned and
fitted anew every four weeks to all that came before.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.readers.intensities import read_intensities
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import Signal
from services.learning.carbon import (
    BACKTEST_SHARE,
    HORIZON_H,
    Tuned,
    forecast,
    greenest_regret,
    mean_errors,
    persistence,
    training_days,
    tune,
)
from services.learning.carbon_blend import blended, learn
from services.learning.carbon_history import HOUR_S, History, history_of
from services.learning.carbon_intervals import QUANTILES, inside, outside

ZONES = ("US-CAL-CISO", "PL", "US-MIDA-PJM", "DE", "GB", "FR", "CA-ON", "SE")
FEW_REGRETS = ("US-CAL-CISO", "PL", "US-MIDA-PJM", "DE")
"""Where the six greenest hours of the next day are to be found with at most 2 % regret."""
TESTED, CHOSEN_ON = 2023, 2022
"""The year tested, and the one on which features and weights were chosen; what came before is learned from."""
COLUMNS = {"direct": "(direct)", "lifecycle": "(Life cycle)"}
SHARES = ("Carbon-free", "Renewable")


@dataclass(frozen=True)
class Year:
    """A zone's forecasts of the tested year.

    Attributes:
        truth, plain, ours, theirs: (forecasts, 96) as it came, persistence, learned, and as issued, gCO2/kWh.
        rolling: (forecasts, 96) tuned and fitted anew every four weeks where that was asked for, else as ours.
        inside: Share of the hours that lay between p10 and p90, by day ahead.
        inside_late: The same, were p10 and p90 quantiles of the errors of the history's last fifth as they are.
        inside_rolling: The same of ``rolling``.
        width: Mean of p90 - p10, as a share of the mean intensity.
        penalties: Of the ridge regression by day ahead; None for persistence.
        fit_s: Processor time of tuning, fitting, and all forecasts of the year.
    """

    truth: Floats
    plain: Floats
    ours: Floats
    theirs: Floats
    rolling: Floats
    inside: tuple[float, ...]
    inside_late: tuple[float, ...]
    inside_rolling: tuple[float, ...]
    width: float
    penalties: tuple[float, ...] | None
    fit_s: float


def hours_of(file: Path, column: str) -> tuple[Floats, Floats, Floats]:
    """Return times, intensities and shares of a file of Electricity Maps."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        rows = csv.reader(text)
        header = next(rows)
        value = next(at for at, name in enumerate(header) if name.endswith(column))
        shares = [at for at, name in enumerate(header) if name.startswith(SHARES)]
        cells = [(row[0], row[value], *(row[at] for at in shares)) for row in rows]
    times = np.array([cell[0] for cell in cells], dtype="datetime64[s]").astype(np.float64)
    figures = np.array([cell[1:] for cell in cells], dtype=np.float64)
    return times, figures[:, 0], figures[:, 1:]


def issues_of(file: Path) -> tuple[Floats, Floats]:
    """Return the moments of issue (n,) and the forecasts (n, 96): rows come issue by issue, the target hour in each."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        rows = list(csv.reader(text))[1:]
    times = np.array([row[0] for row in rows], dtype="datetime64[s]").astype(np.float64).reshape(-1, HORIZON_H)
    if not (np.diff(times, axis=1) == HOUR_S).all():
        raise ValueError(f"{file} does not hold {HORIZON_H} contiguous hours per issue")
    return times[:, 0], np.array([row[1] for row in rows], dtype=np.float64).reshape(-1, HORIZON_H)


def year_of(data: Path, zone: str, signal: str, tested: int = TESTED, *, anew: bool = False) -> Year:
    """Return how the forecasts of a zone went; ``anew`` with those fitted anew, which takes the longest."""
    times, values, shares = hours_of(data / "em_hourly" / f"{zone}_2021_2023.csv.gz", COLUMNS[signal])
    issued_s, issued = issues_of(data / "forecast_96h" / f"{zone}_2021_2023.csv.gz")
    since, until = (
        float(np.datetime64(day, "s").astype(np.int64)) for day in (f"{tested}-01-01", f"{tested + 1}-01-01")
    )
    whole = history_of(times, values, until, shares)
    kept = (issued_s >= since) & (issued_s + HORIZON_H * HOUR_S <= until)
    now = ((issued_s[kept] - whole.start_s) / HOUR_S).astype(np.int64)
    truth = whole.values[now[:, None] + np.arange(HORIZON_H)]
    began_s = time.process_time()
    before = whole.until(int((since - whole.start_s) / HOUR_S))
    tuned = tune(before)
    if tuned is None:
        raise ValueError(f"{zone} has too short a history")
    days = training_days(before, HORIZON_H)
    ours = tuned.at(whole, days, now)
    fit_s = time.process_time() - began_s
    low, high = tuned.quantiles(whole, now, ours)
    rolling = np.concatenate(list(_monthly(whole, now)), axis=1) if anew else np.stack([ours, low, high])
    return Year(
        truth,
        persistence(whole, now, HORIZON_H),
        ours,
        issued[kept],
        rolling[0],
        _inside(truth, low, high),
        _inside(truth, *_late(before, tuned, ours)),
        _inside(truth, rolling[1], rolling[2]),
        float((high - low).mean() / truth.mean()),
        tuned.penalties,
        fit_s,
    )


def _monthly(whole: History, now: Ints) -> Iterator[Floats]:
    """Yield (3, forecasts, 96): forecasts, p10 and p90, tuned and fitted every 28 days to all that came before."""
    for first in range(0, len(now), 28):
        some = now[first : first + 28]
        before = whole.until(int(some[0]))
        tuned = tune(before)
        if tuned is None:
            raise ValueError("too short a history")
        made = tuned.at(whole, training_days(before, HORIZON_H), some)
        yield np.stack([made, *tuned.quantiles(whole, some, made)])


def _inside(truth: Floats, low: Floats, high: Floats) -> tuple[float, ...]:
    """Return the share of the hours between two limits, by day ahead."""
    return tuple(((truth >= low) & (truth <= high)).reshape(len(truth), -1, 24).mean(axis=(0, 2)).tolist())


def _late(before: History, tuned: Tuned, made: Floats) -> tuple[Floats, Floats]:
    """Return limits by the errors of the last fifth of a history, learned from the rest, whatever the season."""
    days = training_days(before, HORIZON_H)
    late = days[-int(BACKTEST_SHARE * len(days)) :]
    shown = tuned.at(before, days[days + HORIZON_H <= late[0]], late)
    came = before.values[late[:, None] + np.arange(HORIZON_H)]
    low, high = np.quantile(inside(came, tuned.root) - inside(shown, tuned.root), QUANTILES, axis=0)
    level = inside(made, tuned.root)
    return outside(level + low, tuned.root), outside(level + high, tuned.root)


def errors_table(years: dict[str, Year]) -> str:
    """Return mean absolute errors by day ahead, and day 1 against the forecasts as issued."""
    lines = ["| zone | persistence, days 1 to 4 | Sundial | ours | ours, day 1 | MAPE of day 1: Sundial, ours |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    better = 0
    for zone, year in years.items():
        cells = [mean_errors(made, year.truth) for made in (year.plain, year.theirs, year.ours)]
        better += cells[2][0] < cells[1][0]
        shown = [" / ".join(f"{error:.2f}" for error in each) for each in cells]
        mape = [_mape(made, year.truth) for made in (year.theirs, year.ours)]
        change = f"{100 * (cells[2][0] / cells[1][0] - 1):+.1f} %"
        lines.append(f"| {zone} | {' | '.join(shown)} | {change} | {mape[0]}, {mape[1]} |")
    return "\n".join([*lines, "", f"Day 1: smaller than Sundial's in {better} of {len(years)} zones."])


def _mape(made: Floats, truth: Floats) -> str:
    shown, came = made[:, :24], truth[:, :24]
    return "none" if (came == 0).any() else f"{100 * float((np.abs(shown - came) / came).mean()):.1f} %"


def regret_table(years: dict[str, Year]) -> str:
    """Return what choosing the six greenest hours of the next day by a forecast costs."""
    lines = ["| zone | persistence | Sundial | ours | target |", "|---|---:|---:|---:|---|"]
    for zone, year in years.items():
        regrets = [greenest_regret(made, year.truth) for made in (year.plain, year.theirs, year.ours)]
        target = ("met" if regrets[2] <= 0.02 else "missed") if zone in FEW_REGRETS else ""
        lines.append(f"| {zone} | {' | '.join(f'{100 * each:.2f} %' for each in regrets)} | {target} |")
    return "\n".join(lines)


def lifecycle_table(years: dict[str, Year]) -> str:
    """Return errors and regret of life-cycle intensity."""
    lines = [
        "| zone | persistence, days 1 to 4 | ours | regret of persistence | of ours |",
        "|---|---:|---:|---:|---:|",
    ]
    for zone, year in years.items():
        made = (year.plain, year.ours)
        shown = [" / ".join(f"{error:.2f}" for error in mean_errors(each, year.truth)) for each in made]
        regrets = [f"{100 * greenest_regret(each, year.truth):.2f} %" for each in made]
        lines.append(f"| {zone} | {' | '.join([*shown, *regrets])} |")
    return "\n".join(lines)


def intervals_table(years: dict[str, Year]) -> str:
    """Return how many hours lay between p10 and p90 by day ahead, and what it took."""
    lines = ["| zone | inside, days 1 to 4 | width | by the last fifth as it is | penalty, days 1 to 4 | CPU s |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for zone, year in years.items():
        penalties = " / ".join(map(str, year.penalties or ("persistence",)))
        shares = f"{_shares(year.inside)} | {100 * year.width:.0f} % | {_shares(year.inside_late)}"
        lines.append(f"| {zone} | {shares} | {penalties} | {year.fit_s:.1f} |")
    return "\n".join(lines)


def _shares(shares: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in shares) + " %"


def rolling_table(years: dict[str, Year]) -> str:
    """Return the errors where the model is tuned and fitted anew every four weeks."""
    lines = ["| zone | ours, days 1 to 4 | day 1 against Sundial's | regret | inside, days 1 to 4 |"]
    lines.append("|---|---:|---:|---:|---:|")
    for zone, year in years.items():
        errors, theirs = mean_errors(year.rolling, year.truth), mean_errors(year.theirs, year.truth)
        shown = " / ".join(f"{error:.2f}" for error in errors)
        regret = f"{100 * greenest_regret(year.rolling, year.truth):.2f} %"
        change = f"{100 * (errors[0] / theirs[0] - 1):+.1f} %"
        lines.append(f"| {zone} | {shown} | {change} | {regret} | {_shares(year.inside_rolling)} |")
    return "\n".join(lines)


AHEAD_H = ((0, 1), (1, 3), (3, 6), (6, 24), (24, 48), (48, 72), (72, 96))
MARGINAL_FROM_DAY = 14


def _span(first: int, last: int) -> str:
    return str(last) if last == first + 1 else f"{first + 1} to {last}"


def marginal_table(data: Path) -> str:
    """Return the errors on a month of five-minute values, asked each third hour and learned anew each time."""
    with gzip.open(data / "subhourly/CAISO_NORTH_marginal_5min_2023.csv.gz", "rt", encoding="utf-8") as text:
        values = np.array([float(row[1]) for row in list(csv.reader(text))[1:]])
    hour, steps = 12, HORIZON_H * 12
    day = 24 * hour
    now = np.arange(MARGINAL_FROM_DAY * day, len(values) - steps + 1, 3 * hour)
    truth = values[now[:, None] + np.arange(steps)]
    shown = np.stack([learn(values[:at], HORIZON_H, hour).at(values[:at], day) for at in now.tolist()], axis=1)
    zeros = np.zeros(steps)
    rows = {"last value": blended(values, now, zeros + 1, day), "persistence": blended(values, now, zeros, day)}
    lines = [
        f"| hours ahead | {' | '.join(_span(*each) for each in AHEAD_H)} |",
        "|---|" + "---:|" * 7,
    ]
    for name, made in {**rows, "ours (blend)": shown[0]}.items():
        errors = np.abs(made - truth).mean(axis=0)
        cells = (f"{errors[first * hour : last * hour].mean():.1f}" for first, last in AHEAD_H)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    inside = ((truth >= shown[1]) & (truth <= shown[2])).mean(axis=0)
    cells = (f"{100 * inside[first * hour : last * hour].mean():.0f} %" for first, last in AHEAD_H)
    lines.append(f"| between p10 and p90 | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{len(now)} forecasts; mean intensity {values.mean():.0f}."])


DEFAULT_DAYS = 90
"""Of history that the carbon service keeps by default."""


def default_table(data: Path) -> str:
    """Return the errors with as little as the carbon service has by default, tuned and fitted anew every week."""
    lines = ["| zone | persistence, days 1 to 4 | ours | regret | inside, days 1 to 4 |", "|---|---:|---:|---:|---:|"]
    for zone in ZONES:
        times, values, _ = hours_of(data / "em_hourly" / f"{zone}_2021_2023.csv.gz", COLUMNS["direct"])
        since, until = (np.datetime64(f"{year}-01-01", "s").astype(np.float64) for year in (TESTED, TESTED + 1))
        kept = times >= since - DEFAULT_DAYS * 24 * HOUR_S
        whole = history_of(times[kept], values[kept], until)
        now = np.arange(DEFAULT_DAYS * 24, len(whole.values) - HORIZON_H + 1, 24)
        truth = whole.values[now[:, None] + np.arange(HORIZON_H)]
        shown = np.concatenate([_by_default(whole, now[at : at + 7]) for at in range(0, len(now), 7)], axis=1)
        errors = (mean_errors(made, truth) for made in (persistence(whole, now, HORIZON_H), shown[0]))
        cells = [" / ".join(f"{error:.2f}" for error in each) for each in errors]
        regret = f"{100 * greenest_regret(shown[0], truth):.2f} %"
        lines.append(f"| {zone} | {' | '.join(cells)} | {regret} | {_shares(_inside(truth, shown[1], shown[2]))} |")
    return "\n".join(lines)


def since(history: History, hours: int) -> History:
    """Return a history without its first hours."""
    parts = history.values[hours:], history.known[hours:], history.shares[hours:], history.expected[hours:]
    return History(history.start_s + HOUR_S * hours, *parts)


def _by_default(whole: History, now: Ints) -> Floats:
    """Return (3, forecasts, 96): forecasts, p10 and p90, learned from the last days before the first moment."""
    first = int(now[0]) - DEFAULT_DAYS * 24
    recent = since(whole, first)
    before = recent.until(DEFAULT_DAYS * 24)
    tuned = tune(before)
    if tuned is None:
        raise ValueError("too short a history")
    made = tuned.at(recent, training_days(before, HORIZON_H), now - first)
    return np.stack([made, *tuned.quantiles(recent, now - first, made)])


GENERATION_ZONES = ("CISO", "PJM", "SE")
GENERATION_FROM, GENERATION_UNTIL = "2021-07-01", "2021-12-31"
"""What came before is learned from; what follows is forecast. Of wind and sun, the files end a day later."""


def generation_table(data: Path) -> str:
    """Return the errors with and without the day-ahead forecasts of wind and solar generation."""
    lines = [
        "| zone | persistence, days 1 to 4 | without | with | regret without | regret with |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for zone in GENERATION_ZONES:
        past = read_intensities(
            data / "generation" / f"{zone}_generation_2020_2021.csv.gz", Signal.AVERAGE_DIRECT, zone
        )
        since, until = (float(np.datetime64(day, "s").astype(np.int64)) for day in (GENERATION_FROM, GENERATION_UNTIL))
        errors: list[str] = []
        regrets: list[str] = []
        for expected in (None, past.expected):
            whole = history_of(past.times_s, past.values, until, expected=expected)
            before = whole.until(int((since - whole.start_s) / HOUR_S))
            tuned = tune(before)
            if tuned is None:
                raise ValueError(f"{zone} has too short a history")
            now = np.arange(len(before.values), len(whole.values) - HORIZON_H + 1, 24)
            truth = whole.values[now[:, None] + np.arange(HORIZON_H)]
            made = tuned.at(whole, training_days(before, HORIZON_H), now)
            shown = (persistence(whole, now, HORIZON_H), made) if expected is None else (made,)
            errors += [" / ".join(f"{error:.2f}" for error in mean_errors(each, truth)) for each in shown]
            regrets.append(f"{100 * greenest_regret(made, truth):.2f} %")
        lines.append(f"| {zone} | {' | '.join(errors)} | {' | '.join(regrets)} |")
    return "\n".join(lines)


FIRST_MONTHS_ZONES = ("DE", "CISO", "PJM", "SE")
KNOWN_DAYS, LEARNED_ANEW_DAYS = 49, 7


def first_months_table(data: Path, zones: Sequence[str] = FIRST_MONTHS_ZONES) -> str:
    """Return the errors and regrets of a site that knows a fortnight, and of one that knows everything since July."""
    lines = [
        "| zone | known | day 1: persistence | without | with | regret: persistence | without | with |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for zone in zones:
        path = data / "dayahead_2021h2" / f"{zone}_dayahead_jul_dec_2021.csv.gz"
        past = read_intensities(path, Signal.AVERAGE_DIRECT, zone)
        until_s = float(past.times_s[-1]) + HOUR_S
        plain, informed = (
            history_of(past.times_s, past.values, until_s, expected=each) for each in (None, past.expected)
        )
        now = np.arange(KNOWN_DAYS * 24, len(plain.values) - HORIZON_H + 1, 24)
        truth = plain.values[now[:, None] + np.arange(24)]
        for known, forecasts in (("14 days", _of_a_fortnight), ("since July", _of_all_before)):
            made = [persistence(plain, now, 24), forecasts(plain, now), forecasts(informed, now)]
            errors = [f"{mean_errors(each, truth)[0]:.2f}" for each in made]
            regrets = [f"{100 * greenest_regret(each, truth):.2f} %" for each in made]
            lines.append(f"| {zone} | {known} | {' | '.join(errors + regrets)} |")
    return "\n".join(lines)


def _published(history: History, hours: int) -> History:
    """Return what was known after so many hours: of wind and sun, the next day."""
    expected_h = 24 if history.expected.shape[1] else 0
    known = history.until(hours)
    return replace(known, expected=history.expected[: hours + expected_h])


def _of_a_fortnight(history: History, now: Ints) -> Floats:
    return np.stack([forecast(since(_published(history, at), at - 14 * 24), 24).values for at in now.tolist()])


def _of_all_before(history: History, now: Ints) -> Floats:
    """Return forecasts of the next day by what is learned every week from everything before it."""
    made: list[Floats] = []
    for week in np.split(now, range(LEARNED_ANEW_DAYS, len(now), LEARNED_ANEW_DAYS)):
        before = _published(history, int(week[0]))
        tuned = tune(before)
        if tuned is None:
            raise ValueError("too short a history")
        made.append(tuned.at(_published(history, int(week[-1])), training_days(before, HORIZON_H), week)[:, :24])
    return np.concatenate(made)


def fill(text: str, parts: dict[str, str]) -> str:
    """Return a page with its parts made anew.

    Raises:
        ValueError: the page lacks the place of one.
    """
    for name, part in parts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"the page has no place for {name}")
        text = place.sub(lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text)
    return text


def main(arguments: Sequence[str]) -> None:
    """Fill the page."""
    page, data = Path(arguments[0]), Path(arguments[1])
    direct = {zone: year_of(data, zone, "direct", anew=True) for zone in ZONES}
    chosen = {zone: year_of(data, zone, "direct", CHOSEN_ON) for zone in ZONES}
    lifecycle = {zone: year_of(data, zone, "lifecycle") for zone in ZONES}
    parts = {
        "errors": errors_table(direct),
        "regret": regret_table(direct),
        "intervals": intervals_table(direct),
        "intervals-chosen": intervals_table(chosen),
        "rolling": rolling_table(direct),
        "generation": generation_table(data),
        "first-months": first_months_table(data),
        "lifecycle": lifecycle_table(lifecycle),
        "chosen": errors_table(chosen),
        "marginal": marginal_table(data),
        "default": default_table(data),
    }
    page.write_text(fill(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
