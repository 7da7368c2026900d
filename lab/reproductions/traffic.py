"""The tables of ``lab/results/traffic.md``.

    python -m lab.reproductions.traffic PAGE DATA

DATA is a folder with ``llm/azure_2023_{conv,code}.csv.gz`` (``TIMESTAMP,ContextTokens,GeneratedTokens``) and
``llm/freesh_qps_partition_{a,b}.csv`` (a day of five-minute peaks for each class). In PAGE, what stands between
``<!-- NAME -->`` and ``<!-- end -->`` is made anew for the names plans, day, hour, hour-lstm and speed. Tables with
rows of an LSTM (day, hour-lstm, speed) need torch; without it they stay as they are, which is said.
"""

from __future__ import annotations

import csv
import gzip
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np

from lab.reproductions.forecasters import choose, forecasters
from lab.reproductions.marked import fill
from lab.reproductions.traffic_lstm import Lstm
from lab.serving.logs import observe, spare_share
from services.core.domain.arrays import Floats
from services.core.domain.serving import CLASSES, STEP_S, STEPS_AHEAD
from services.core.policies.freesh.classes import PARTITIONS
from services.core.profiles.traffic import (
    WINDOWS,
    Backtest,
    Choice,
    Forecaster,
    LastPeak,
    Traffic,
    backtest,
)
from services.learning.demand import forecast_demand
from services.learning.traffic_boosting import Boosting

TRACES = {"conv": "conversations", "code": "code"}
HIGH = Boosting(quantile=0.9)
SHIFT_S = 60.0
LEAST_ORIGINS = 2
"""In an hour there are no more; in service the default of ``choose`` holds."""
DAYS = 14
LEAST_PLANNED = 24
"""Steps; both ways to choose need twice as many."""


def day_of_peaks(data: Path, partition: str) -> Traffic:
    """Return the published day: (288, 4) peaks, no counts."""
    lines = (data / f"llm/freesh_qps_partition_{partition}.csv").read_text(encoding="utf-8").splitlines()
    return Traffic(np.array([[float(row[name.lower()]) for name in CLASSES] for row in csv.DictReader(lines)]))


def hours(data: Path, trace: str, partition: str) -> list[Traffic]:
    """Return a trace cut into steps from its first request, and again from each whole minute of the first step on."""
    with gzip.open(data / f"llm/azure_2023_{trace}.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    moments = np.array([row["TIMESTAMP"] for row in rows], dtype="datetime64[ns]")
    times = (moments - moments.min()).astype(np.float64) / 1e9
    lengths = [np.array([int(row[name]) for row in rows]) for name in ("ContextTokens", "GeneratedTokens")]
    class_of = PARTITIONS[partition].class_of(*lengths)
    end = float(times.max())
    return [
        observe(times[times >= start], class_of[times >= start], n_classes=len(CLASSES), start_s=start, end_s=end)
        for start in np.arange(0.0, STEP_S, SHIFT_S).tolist()
    ]


def pooled(scores: Iterable[Backtest]) -> Backtest:
    """Return the backtests of one forecaster as one."""
    each = list(scores)
    return Backtest(
        each[0].name,
        np.concatenate([score.origins for score in each]),
        np.concatenate([score.forecast_qps for score in each]),
        np.concatenate([score.actual_qps for score in each]),
    )


def table(scores: Sequence[Backtest]) -> list[str]:
    """Return rows of a table: the mean peaks, then mean absolute errors and shares of steps under-forecast."""
    peaks = np.nanmean(scores[0].actual_qps, axis=(0, 1))
    best = min(score.mae_qps.sum() for score in scores if score.name != HIGH.name)
    rows = ["| *mean peak* | " + " | ".join(f"*{each:.2f}*" for each in peaks) + f" | *{peaks.sum():.2f}* | |"]
    for score in scores:
        mae, under = score.mae_qps, score.under_share()
        cells = [f"{error:.2f}, {100 * share:.0f} %" for error, share in zip(mae, under, strict=True)]
        total = f"**{mae.sum():.2f}**" if mae.sum() == best else f"{mae.sum():.2f}"
        spare = np.nansum(spare_share(score) * peaks) / peaks.sum()
        rows.append(f"| {score.name} | {' | '.join(cells)} | {total} | {100 * spare:.0f} % |")
    return rows


def head(what: str, scores: Sequence[Backtest]) -> list[str]:
    """Return what stands above a table's rows."""
    known = int((~np.isnan(scores[0].actual_qps[:, :, 0])).sum())
    columns = ["", *CLASSES, "all", "spare"]
    return [f"{what}, {known:,} forecasts for each class:", "", f"| {' | '.join(columns)} |", "|---|" + "---:|" * 6]


def day(data: Path) -> str:
    """Return the tables of the published day."""
    lines: list[str] = []
    for partition in PARTITIONS:
        peaks = day_of_peaks(data, partition)
        choice = choose(peaks, forecasters())
        high = backtest(peaks, HIGH, choice.scores[0].origins.tolist())
        lines += [*head(f"Partition {partition}", choice.scores), *table([*choice.scores, high]), "", *reasons(choice)]
    return "\n".join(lines).rstrip()


def hour(data: Path) -> str:
    """Return the tables of the hours without LSTM, which needs too much history."""
    without = [each for each in forecasters() if not isinstance(each, Lstm)]
    return "\n".join(_hour(data, [*without, HIGH])).rstrip()


def hour_lstm(data: Path) -> str:
    """Return the tables of the hours' ends, where the LSTM on windows can be trained."""
    return "\n".join(_hour(data, forecasters())).rstrip()


def _hour(data: Path, compared: Sequence[Forecaster]) -> list[str]:
    lines: list[str] = []
    left_out: list[str] = []
    for trace, label in TRACES.items():
        for partition in PARTITIONS:
            cuts = hours(data, trace, partition)
            choices = [choose(cut, compared, least_origins=LEAST_ORIGINS, refit_steps=1) for cut in cuts]
            scores = [pooled(each) for each in zip(*(choice.scores for choice in choices), strict=True)]
            lines += [*head(f"{label.capitalize()}, partition {partition}", scores), *table(scores), ""]
            left_out = reasons(choices[-1])
    return [*lines, *left_out]


def plans(data: Path) -> str:
    """Return what a planner would have had ready that asks every half hour of the day, or every step of an hour."""
    return "\n".join([*plans_of_day(data), *plans_of_hours(data)]).rstrip()


def plans_of_day(data: Path) -> list[str]:
    """Return the tables of the published day."""
    without = [each for each in forecasters() if not isinstance(each, Lstm)]
    lines: list[str] = []
    for partition in PARTITIONS:
        peaks = day_of_peaks(data, partition)
        asked = range(2 * LEAST_PLANNED, len(peaks), STEPS_AHEAD)
        least = [choose(peaks.until(at), without) for at in asked]
        least_qps = [each.model.forecast(peaks.until(at)) for at, each in zip(asked, least, strict=True)]
        demand = [forecast_demand(peaks.until(at), None) for at in asked]
        rows = {"least error": _asked(peaks, asked, least_qps),
                "for the planner": _asked(peaks, asked, [each.peaks_qps for each in demand])}  # fmt: skip
        lines += [*_planned(f"The day, partition {partition}", rows), ""]
        for name, methods in (("Least error", least), ("For the planner", demand)):
            chosen = ", ".join(
                f"{name} {times}" for name, times in Counter(each.method for each in methods).most_common()
            )
            lines += [f"{name} chose, by half hours: {chosen}.", ""]
    return lines


def plans_of_hours(data: Path) -> list[str]:
    """Return the tables of the hours."""
    lines: list[str] = []
    for trace, label in TRACES.items():
        for partition in PARTITIONS:
            cuts = hours(data, trace, partition)
            alone = [backtest(cut, LastPeak(), range(1, len(cut))) for cut in cuts]
            ready = [_demand_of_every_step(cut) for cut in cuts]
            rows = {"last peak": pooled(alone), "for the planner": pooled(ready)}
            lines += [*_planned(f"{label.capitalize()}, partition {partition}", rows), ""]
    return lines


def _demand_of_every_step(history: Traffic) -> Backtest:
    moments = range(1, len(history))
    return _asked(history, moments, [forecast_demand(history.until(at), None).peaks_qps for at in moments])


def _asked(history: Traffic, asked: Sequence[int], predicted: Sequence[Floats]) -> Backtest:
    came = backtest(history, LastPeak(), asked)
    return Backtest(came.name, came.origins, np.stack(predicted), came.actual_qps)


def _planned(what: str, rows: dict[str, Backtest]) -> list[str]:
    """Return shares of steps short of their peak, by class, and what is spare."""
    lines = head(what, list(rows.values()))
    lines[2] = lines[2].replace(" all |", " mean peak |")
    for name, score in rows.items():
        peaks = np.nanmean(score.actual_qps, axis=(0, 1))
        short = " | ".join(f"{100 * share:.0f} %" for share in score.under_share())
        spare = np.nansum(spare_share(score) * peaks) / peaks.sum()
        lines.append(f"| {name} | {short} | {peaks.sum():.2f} | {100 * spare:.0f} % |")
    return lines


def reasons(choice: Choice) -> list[str]:
    """Return the forecasters that were not compared, and why."""
    return [f"Not compared: {name} ({why})." for name, why in choice.left_out.items()] + [""]


def speed(data: Path) -> str:
    """Return seconds of CPU that fits and forecasts take."""
    peaks = day_of_peaks(data, "a").peaks_qps
    counts = np.random.default_rng(1).poisson(peaks[:, None] * 2.5, (len(peaks), WINDOWS, len(CLASSES)))
    one = Traffic(peaks, counts)
    many = Traffic(np.tile(peaks, (DAYS, 1)), np.tile(counts, (DAYS, 1, 1)))
    lines = ["| | fit, a day | fit, two weeks | forecast |", "|---|---:|---:|---:|"]
    for each in forecasters():
        if isinstance(why := each.steps_needed(one), str):
            lines.append(f"| {each.name} | {why} | | |")
            continue
        model = each.fit(many)
        fits = [_cpu_s(lambda: each.fit(past)) for past in (one, many)]  # noqa: B023
        forecast_s = median(_cpu_s(lambda: model.forecast(many)) for _ in range(50))  # noqa: B023
        lines.append(f"| {each.name} | {fits[0]:.1f} s | {fits[1]:.1f} s | {1_000 * forecast_s:.1f} ms |")
    return "\n".join(lines)


def _cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time of this process, all threads: a busy machine lengthens it less than the time that passes."""
    start = time.process_time()
    work()
    return time.process_time() - start


TABLES = {"plans": plans, "hour": hour}
WITH_LSTM = {"day": day, "hour-lstm": hour_lstm, "speed": speed}
"""Without torch these would lack rows, and others would be the best in them."""


def main() -> None:
    """Fill the page."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    tables = dict(TABLES)
    if find_spec("torch") is not None:
        tables |= WITH_LSTM
    else:
        print(f"left as they are, for their LSTM's rows need torch: {', '.join(WITH_LSTM)}", file=sys.stderr)
    fill(page, {name: partial(table, data) for name, table in tables.items()})


if __name__ == "__main__":
    main()
