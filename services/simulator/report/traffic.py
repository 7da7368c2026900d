"""The tables of ``docs/results/traffic.md``.

    python -m services.simulator.report.traffic PAGE DATA

DATA is a folder with ``llm/azure_2023_{conv,code}.csv.gz`` (``TIMESTAMP,ContextTokens,GeneratedTokens``) and
``llm/freesh_qps_partition_{a,b}.csv`` (a day of five-minute peaks for each class). In PAGE, what stands between
``<!-- NAME -->`` and ``<!-- end -->`` is made anew for the names day, hour, hour-lstm and speed. The LSTM's rows need
torch.
"""

from __future__ import annotations

import csv
import gzip
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from services.core.policies.freesh.classes import CLASSES, PARTITIONS
from services.core.profiles.traffic import (
    STEP_S,
    WINDOWS,
    Backtest,
    Choice,
    Forecaster,
    Traffic,
    backtest,
    choose,
    observe,
)
from services.learning.traffic import forecasters
from services.learning.traffic_boosting import Boosting
from services.learning.traffic_lstm import Lstm
from services.simulator.report.marked import fill

TRACES = {"conv": "conversations", "code": "code"}
HIGH = Boosting(quantile=0.9)
SHIFT_S = 60.0
LEAST_ORIGINS = 2
"""In an hour there are no more; in service the default of ``choose`` holds."""
DAYS = 14


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
        spare = np.nansum(score.spare_share() * peaks) / peaks.sum()
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
    """Return the tables of the hours without LSTM, which needs too much of them."""
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


def reasons(choice: Choice) -> list[str]:
    """Return who was not compared, and why."""
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
        told = median(_cpu_s(lambda: model.forecast(many)) for _ in range(50))  # noqa: B023
        lines.append(f"| {each.name} | {fits[0]:.1f} s | {fits[1]:.1f} s | {1_000 * told:.1f} ms |")
    return "\n".join(lines)


def _cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU time of this process, all threads: a busy machine lengthens it less than the time that passes."""
    start = time.process_time()
    work()
    return time.process_time() - start


TABLES = {"day": day, "hour": hour, "hour-lstm": hour_lstm, "speed": speed}


def main() -> None:
    """Fill the page."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    fill(page, {name: partial(table, data) for name, table in TABLES.items()})


if __name__ == "__main__":
    main()
