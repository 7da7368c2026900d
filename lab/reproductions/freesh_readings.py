"""Twice the load by two more readings, Figures 7, 8 and 18, starts and margins, in ``lab/results/freesh-serving.md``.

    python -m lab.reproductions.freesh_readings PAGE DATA

PAGE and DATA are those of ``freesh_serving``, which makes the page's other tables. The hour is the same; each figure is
the mean of three seeds, in which arrivals, lengths and errors of predictions are drawn anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np

from lab.reproductions.freesh_serving import (
    CLASSES,
    FREESH,
    MAE_TOKENS,
    Figures,
    Hour,
    alone,
    change,
    the_hour,
)
from lab.reproductions.marked import fill
from lab.serving import accounting
from lab.serving.plans import HalfHour
from lab.serving.requests import RequestTrace, read_requests
from lab.serving.simulation import ClocksSee, predicted_lengths
from lab.serving.site import Site, papers_pools
from services.core.policies.freesh import laxity
from services.core.policies.freesh.laxity import Order

SEEDS = (1, 2, 3)
LOADS = (1.2, 1.25, 1.3, 1.35, 1.4)
FCFS_LOAD = 1.25
"""The load at which FCFS with a queue per class is shown, too."""
PAPER_S = 370.98
"""Mean latency of FCFS at twice the load (Table 2)."""
SERVER_SIDE = replace(FREESH, preempt=False, clocks_see=ClocksSee.SERVER)
ORDERS = {
    "LLF": SERVER_SIDE,
    "FCFS, one queue": replace(SERVER_SIDE, order=Order.FCFS, one_queue=True),
    "FCFS per class": replace(SERVER_SIDE, order=Order.FCFS),
}
MODES = ("A100_TP4", "A100_TP8", "H100_TP4")
FIGURE_7_QPS = 15.0
MAES = (0.0, 25.0, 55.0, MAE_TOKENS, 220.0)
ALPHAS = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
DRAWS = 10
STARTS_S, MARGINS_S = (0.0, 120.0, 300.0), (0.0, 0.1, 1.0)


class Readings:
    """The runs of the second table, each made once."""

    def __init__(self, hour: Hour) -> None:
        self._hour, self._plans = hour, hour.plans()
        self.at = cache(self._at)

    def _at(self, order: str, load: float) -> Figures:
        return self._hour.simulated(self._plans, ORDERS[order], load)


def twice(readings: Readings) -> str:
    """Return LLF and FCFS by load, where clocks see what servers do and FCFS is one queue, and the paper's rows."""
    lines = [
        "| | energy | emissions | violations | mean | TTFT at the server | TBT | Jain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        _line("paper, LLF, 2x", (4653.26, 2.15, 0.35, 109.55, 335.28, 77.46, 0.65)),
        _line("paper, FCFS, 2x", (5133.22, 2.38, 0.94, PAPER_S, 310.80, 76.07, 0.62)),
        "| paper, LLF against FCFS | -9.4 % | -9.4 % | -62.8 % | -70.5 % | +7.9 % | +1.8 % | +4.8 % |",
    ]
    for load in LOADS:
        ours, strict = readings.at("LLF", load), readings.at("FCFS, one queue", load)
        lines += [_line(f"LLF, {load:g}x", _row(ours)), _line(f"FCFS, one queue, {load:g}x", _row(strict))]
        if load == FCFS_LOAD:
            lines.append(_line(f"FCFS per class, {load:g}x", _row(readings.at("FCFS per class", load))))
        changes = [change(now, before) for now, before in zip(_row(ours), _row(strict), strict=True)]
        lines.append(f"| LLF against one queue, {load:g}x | {' | '.join(changes)} |")
    lines.append(_at_the_papers_latency(readings))
    return "\n".join(lines)


def _at_the_papers_latency(readings: Readings) -> str:
    """Return LLF against FCFS at the load at which FCFS has the paper's latency, between two that were simulated."""
    name = f"**at FCFS' {PAPER_S:.0f} s, in between**"
    means = [readings.at("FCFS, one queue", load)["e2e_mean_s"] for load in LOADS]
    above = next((at for at, mean in enumerate(means) if mean >= PAPER_S), 0)
    if not above:
        return f"| {name}: not among these loads | | | | | | | |"
    low, high = LOADS[above - 1], LOADS[above]
    part = (PAPER_S - means[above - 1]) / (means[above] - means[above - 1])

    def between(order: str) -> list[float]:
        pair = zip(_row(readings.at(order, low)), _row(readings.at(order, high)), strict=True)
        return [before + part * (after - before) for before, after in pair]

    both = zip(between("LLF"), between("FCFS, one queue"), strict=True)
    cells = [f"**{change(now, before)}**" for now, before in both]
    return f"| {name} ({low + part * (high - low):.2f}x) | {' | '.join(cells)} |"


def _row(found: Figures) -> Sequence[float]:
    names = ("energy_wh", "carbon_kg", "violation_rate", "e2e_mean_s", "server_ttft_mean_ms", "tbt_mean_ms", "jain")
    return [found[name] for name in names]


def _line(name: str, row: Sequence[float]) -> str:
    wh, kg, rate, mean, ttft, tbt, jain = row
    shown = (
        f"{wh:.0f} Wh",
        f"{kg:.2f} kg",
        f"{rate:.2f}",
        f"{mean:.1f} s",
        f"{ttft:.0f} ms",
        f"{tbt:.1f} ms",
        f"{jain:.2f}",
    )
    return f"| {name} | {' | '.join(shown)} |"


def figure_7(azure: RequestTrace) -> str:
    """Return TTFT and Jain's index of each order, by class and mode, as in Table 5 at one rate."""
    orders = (Order.EDF, Order.SRTF, Order.FCFS, Order.LLF)
    lines = [
        "| mode | class | " + " | ".join(each.value.upper() for each in orders) + " |",
        "|---|---|" + "---:|" * len(orders),
    ]
    served = {(mode, name) for mode in MODES for name in CLASSES if _serves(mode, name)}
    for mode in MODES:
        for name in CLASSES:
            if (mode, name) not in served:
                continue
            cells: list[str] = []
            for order in orders:
                found = [alone(name, FIGURE_7_QPS, order, azure, seed, mode=mode) for seed in range(DRAWS)]
                rate, ttft, jain = np.mean(found, axis=0)
                cells.append(f"{100 * rate:.0f}/{ttft:.1f}/{jain:.2f}")
            lines.append(f"| {mode} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _serves(mode: str, name: str) -> bool:
    classes = papers_pools().partitions[0].classes
    profiles = next(each.profiles for each in classes if each.name == name)
    return any(each.mode == mode and each.max_qps > 0 for each in profiles)


def figure_8(hour: Hour) -> str:
    """Return how figures change with the accuracy of the classes that are predicted."""
    site, plans = Site(papers_pools()), hour.plans()
    found = {mae: hour.simulated(plans, replace(FREESH, length_mae=mae)) for mae in MAES}
    names = ("energy_wh", "carbon_kg", "jain", "tbt_mean_ms", "e2e_mean_s", "server_ttft_mean_ms")
    lines = [
        "| mean error | right | energy | emissions | Jain | TBT | end-to-end | TTFT at the server | violations |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mae, each in found.items():
        changes = " | ".join(change(each[name], found[MAES[0]][name]) for name in names)
        right = 100 * np.mean([accuracy(site, plans, trace, mae, seed) for seed, trace in hour.traces.items()])
        lines.append(f"| {mae:.0f} tokens | {right:.0f} % | {changes} | {100 * each['violation_rate']:.2f} % |")
    return "\n".join(lines)


def accuracy(site: Site, plans: Sequence[HalfHour], trace: RequestTrace, mae: float, seed: int) -> float:
    """Return the share of requests whose class in the first plan's partition is predicted right."""
    lengths = np.round(predicted_lengths(trace.output_tokens, mae, seed)).astype(np.int64)
    said = site.classes_of(plans[0].partition, trace.input_tokens, lengths)
    return float(np.mean(said == site.classes_of(plans[0].partition, trace.input_tokens, trace.output_tokens)))


def figure_18(azure: RequestTrace) -> str:
    """Return TTFT and Jain's index of LLF by the length of the window, by class, as in Table 5 at one rate."""
    lines = [
        "| alpha | " + " | ".join(CLASSES) + " |",
        "|---:|" + "---:|" * len(CLASSES),
    ]
    for alpha in ALPHAS:
        cells: list[str] = []
        with _window(alpha):
            for name in CLASSES:
                found = [alone(name, FIGURE_7_QPS, Order.LLF, azure, seed) for seed in range(DRAWS)]
                _, ttft, jain = np.mean(found, axis=0)
                cells.append(f"{ttft:.1f} s/{jain:.2f}")
        lines.append(f"| {alpha:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


@contextmanager
def _window(alpha: float) -> Iterator[None]:
    """Have windows of another length, in which requests are ordered and fairness is judged."""
    with ExitStack() as stack:
        for module in (laxity, accounting):
            stack.enter_context(patch.object(module, "WINDOW_LATENCIES", alpha))
        yield


def starts_and_margins(hour: Hour) -> str:
    """Return what starts that take time change at the simple load, and a margin of preemption at two loads."""
    runs = {f"1x, starts take {each:.0f} s": (1.0, replace(FREESH, start_s=each)) for each in STARTS_S}
    runs |= {
        f"{load:g}x, margin {each:g} s": (load, replace(FREESH, preempt_margin_s=each))
        for load in (1.0, FCFS_LOAD)
        for each in MARGINS_S
    }
    runs[f"{FCFS_LOAD:g}x, no preemption"] = (FCFS_LOAD, replace(FREESH, preempt=False))
    plans = hour.plans()
    lines = [
        "| load | energy | violations | mean | p99 | Jain | preemptions |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (load, options) in runs.items():
        each = hour.simulated(plans, options, load)
        lines.append(
            f"| {name} | {each['energy_wh']:.0f} Wh | {100 * each['violation_rate']:.2f} % "
            f"| {each['e2e_mean_s']:.2f} s | {each['e2e_p99_s']:.1f} s "
            f"| {each['jain']:.3f} | {each['preemptions']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Fill the page."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    hour, azure = the_hour(data, SEEDS), read_requests(data / "llm" / "azure_2023_conv.csv.gz")
    fill(
        page,
        {
            "table-2-read": lambda: twice(Readings(hour)),
            "figure-7": lambda: figure_7(azure),
            "figure-8": lambda: figure_8(hour),
            "figure-18": lambda: figure_18(azure),
            "starts-and-margins": lambda: starts_and_margins(hour),
        },
    )


if __name__ == "__main__":
    main()
