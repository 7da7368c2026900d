"""The tables of ``lab/results/freesh-serving.md``.

    python -m lab.reproductions.freesh_serving PAGE DATA

DATA is a folder with ``carbon/freesh``, ``llm/freesh_qps_partition_{a,b}.csv``, ``llm/azure_2023_conv.csv.gz`` and
``profiles/freesh``. In PAGE, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made anew.

The hour is the paper's: time slots 24 and 25 of its day (11:30 to 12:30), planned from the authors' demand as
``freesh_day`` does. The requests are made to have that demand: see ``the_hour``. Figure 6 is the mean of ``SEEDS``, the
other tables are of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import pdtr

from lab.reproductions.freesh_day import BETA, CLASSES, PARTITIONS, STEP_S, TIE, UNTIED, Inputs, half_hour, read, solved
from lab.reproductions.marked import fill
from lab.serving.accounting import fairness_of_classes, violation_rate
from lab.serving.plans import PERIOD_S, HalfHour, PlannedInstance
from lab.serving.rates import PlaceRates, read_rates
from lab.serving.requests import RequestTrace, read_requests
from lab.serving.result import document
from lab.serving.simulation import Frequency, Outcome, ServingOptions, ServingSimulation
from lab.serving.site import Site, papers_pools
from services.contracts.pools import PoolsResult
from services.contracts.serving import PoolSpec
from services.core.domain.arrays import Floats, Ints
from services.core.domain.serving import MiadConfig
from services.core.domain.solving import Backend, SolveStatus
from services.core.policies.freesh.classes import PARTITIONS as THRESHOLDS
from services.core.policies.freesh.laxity import Order, ServingRequest, deadline_s

SLOTS, FIRST_HOUR = (23, 24), 11.5
"""Time slots 24 and 25, counted from 0."""
SEEDS = (1, 2)
WINDOWS, WINDOW_S = 60, 5.0
MAE_TOKENS = 110.0
"""Of the paper's output length predictor (Table 9)."""
FREESH = ServingOptions(order=Order.LLF, frequency=Frequency.MIAD, length_mae=MAE_TOKENS, preempt_margin_s=0.0)
Figures = dict[str, Any]
NO_PLAN = PoolsResult(status=SolveStatus.OPTIMAL, solver=Backend.HIGHS)
"""Where a table states the instances."""


@dataclass(frozen=True)
class Hour:
    """What is simulated: requests by seed, intensities, and the authors' inputs."""

    traces: Mapping[int, RequestTrace]
    rates: PlaceRates
    inputs: Inputs

    def of_one_seed(self) -> Hour:
        """Return the hour with the first seed's requests alone."""
        return replace(self, traces={SEEDS[0]: self.traces[SEEDS[0]]})

    def plans(self, *, hold: bool = False, **terms: Any) -> list[HalfHour]:
        """Return the half hours' plans; with ``hold`` only the first."""
        return [
            _half_hour_of(at * PERIOD_S, solved(half_hour(self.inputs, slot, **terms)))
            for at, slot in enumerate(SLOTS[:1] if hold else SLOTS)
        ]

    def simulated(
        self,
        plans: Sequence[HalfHour],
        options: ServingOptions,
        scale: float = 1.0,
        simulation: type[ServingSimulation] = ServingSimulation,
    ) -> Figures:
        """Return the means over seeds."""
        site = Site(papers_pools())
        runs = [
            document(
                simulation(site, self.rates, trace.scaled(scale), plans, replace(options, seed=seed)).run(),
                plans,
                {},
            )
            for seed, trace in self.traces.items()
        ]
        return {
            name: float(np.mean([run[name] for run in runs]))
            for name, value in runs[0].items()
            if isinstance(value, int | float)
        }


class LateLast(ServingSimulation):
    """Has requests that cannot end within their window any more wait behind those that can, in order of arrival."""

    def _due_s(self, pool: Any, request: ServingRequest) -> float:
        return deadline_s(request, pool.queue.times)


def the_hour(data: Path, seeds: Sequence[int] = SEEDS) -> Hour:
    """Return the hour: Azure's lengths at rates that have the authors' peaks.

    Their file has the peak rate of each class in each five minutes, under both partitions. A peak is the fullest of 60
    windows of five seconds; ``mean_of_peak`` gives the Poisson rate with that expected peak, halved as they halve
    demand (``BETA``). Azure's requests are divided into nine cells by both partitions' thresholds, whose shares are
    raked until both partitions' rates are met; then each cell's requests are drawn from Azure's.
    """
    inputs, azure = read(data), read_requests(data / "llm" / "azure_2023_conv.csv.gz")
    places = [(place.name, place.zone) for place in papers_pools().places]
    return Hour(
        {seed: _requests(inputs, azure, seed) for seed in seeds}, read_rates(None, places).from_hour(FIRST_HOUR), inputs
    )


def mean_of_peak(peak_qps: float) -> float:
    """Return the rate whose fullest of 60 five-second windows has on average ``peak_qps``, requests per second."""
    if peak_qps <= 0:
        return 0.0
    low, high = 0.0, peak_qps * WINDOW_S
    counts = np.arange(int(4 * high + 40))
    for _ in range(50):
        mean = (low + high) / 2
        expected = float((1 - pdtr(counts, mean) ** WINDOWS).sum())
        low, high = (mean, high) if expected < peak_qps * WINDOW_S else (low, mean)
    return low / WINDOW_S


def raked(shares: Floats, wanted: Sequence[tuple[Ints, Floats]], rounds: int = 200) -> Floats:
    """Return the rates of cells nearest to ``shares`` whose sums by group are as wanted (iterative proportional fit).

    Args:
        shares: (n_cells,) > 0.
        wanted: Pairs of (n_cells,) group numbers, and (n_groups,) sums; all pairs' sums add up to the same.
    """
    rates = shares.copy()
    for _ in range(rounds):
        for groups, sums in wanted:
            now = np.bincount(groups, rates, minlength=sums.size)
            rates *= np.divide(sums, now, out=np.zeros_like(sums), where=now > 0)[groups]
    return rates


def _requests(inputs: Inputs, azure: RequestTrace, seed: int) -> RequestTrace:
    random = np.random.default_rng(seed)
    edges = [
        sorted({getattr(each, name) for each in THRESHOLDS.values()}) for name in ("input_tokens", "output_tokens")
    ]
    bands = [
        np.digitize(each, edge) for each, edge in zip((azure.input_tokens, azure.output_tokens), edges, strict=True)
    ]
    cell = 3 * bands[0] + bands[1]
    counts = np.bincount(cell, minlength=9).astype(np.float64)
    lowest = [np.array([0, *edge]) for edge in edges]
    groups = {
        part: THRESHOLDS[part].class_of(lowest[0][np.arange(9) // 3], lowest[1][np.arange(9) % 3])
        for part in PARTITIONS
    }
    arrivals, rows_in, rows_out = list[Floats](), list[Ints](), list[Ints]()
    for number, step in enumerate(range(SLOTS[0] * 6, (SLOTS[-1] + 1) * 6)):
        sums = {
            part: np.array([mean_of_peak(float(inputs.demand[part][step][name.lower()])) for name in CLASSES]) / BETA
            for part in PARTITIONS
        }
        total = float(np.mean([each.sum() for each in sums.values()]))
        wanted = [(groups[part], each * total / each.sum()) for part, each in sums.items()]
        rates = raked(counts + 0.5, wanted)
        drawn = random.poisson(rates * STEP_S)
        for which, count in enumerate(drawn.tolist()):
            arrivals.append(STEP_S * (number + random.random(count)))
            inside = np.flatnonzero(cell == which)
            by_input, by_output = np.flatnonzero(bands[0] == which // 3), np.flatnonzero(bands[1] == which % 3)
            rows_in.append(random.choice(inside if inside.size else by_input, count))
            rows_out.append(rows_in[-1] if inside.size else random.choice(by_output, count))
    arrival_s = np.concatenate(arrivals)
    order = np.argsort(arrival_s)
    inputs_of, outputs_of = np.concatenate(rows_in)[order], np.concatenate(rows_out)[order]
    return RequestTrace("the hour", arrival_s[order], azure.input_tokens[inputs_of], azure.output_tokens[outputs_of])


def _half_hour_of(from_s: float, result: Any) -> HalfHour:
    instances = tuple(PlannedInstance(i.location, i.request_class, i.mode, i.count) for i in result.instances)
    return HalfHour(from_s, result.partition, instances, result)


def figure_6(hour: Hour) -> dict[str, Figures]:
    """Return FREESH, its ablations and the baseline."""
    carbon, first = hour.plans(), hour.plans(hold=True)
    baseline = replace(FREESH, order=Order.FCFS, frequency=Frequency.FIXED, classify=False)
    dirtiest = hour.plans(hold=True, **UNTIED, tie=-TIE)
    return {
        "FREESH": hour.simulated(carbon, FREESH),
        "w/o MultiParti": hour.simulated(hour.plans(partition="a"), FREESH),
        "w/o TPchange": hour.simulated(first, FREESH),
        "w/o MIAD": hour.simulated(carbon, replace(FREESH, frequency=Frequency.FIXED)),
        "w/o LLF": hour.simulated(carbon, replace(FREESH, order=Order.FCFS)),
        "Baseline": hour.simulated(hour.plans(hold=True, objective="energy"), baseline),
        DIRTIEST: hour.simulated(dirtiest, baseline),
    }


def change(now: float, before: float) -> str:
    """Return a relative change."""
    return f"{100 * (now / before - 1):+.1f} %" if before else "-"


def end_to_end(found: Mapping[str, Figures]) -> str:
    """Return FREESH against the baseline, beside the paper's Figure 6 and text."""
    ours, base = found["FREESH"], found["Baseline"]
    rows = [
        ("energy", "energy_wh", "-28.6 %"),
        ("emissions", "carbon_kg", "-45.45 %"),
        ("end-to-end, mean", "e2e_mean_s", "-8.2 %"),
        ("end-to-end, p50", "e2e_p50_s", "-16.4 %"),
        ("end-to-end, p90", "e2e_p90_s", "-9.1 %"),
        ("end-to-end, p99", "e2e_p99_s", "+0.3 %"),
        ("TTFT at the server, p50", "server_ttft_p50_ms", "-18.9 %"),
        ("TTFT at the server, p99", "server_ttft_p99_ms", "-22.8 %"),
        ("TBT, p50", "tbt_p50_ms", "-22.0 %"),
        ("TBT, p99", "tbt_p99_ms", "-13.3 %"),
    ]
    lines = ["| FREESH against the baseline | paper | here | baseline | FREESH |", "|---|---:|---:|---:|---:|"]
    for label, name, paper in rows:
        lines.append(f"| {label} | {paper} | {change(ours[name], base[name])} | {base[name]:.4g} | {ours[name]:.4g} |")
        if name == "carbon_kg":
            dirtiest, now = found[DIRTIEST][name], ours[name]
            lines.append(f"| emissions, against {DIRTIEST} | | {change(now, dirtiest)} | {dirtiest:.4g} | {now:.4g} |")
    return "\n".join(lines)


DIRTIEST = "the dirtiest baseline of as little energy"
PAPER_ABLATIONS = {
    "FREESH": ("4652", "2.14", ""),
    "w/o MultiParti": ("+33.3 %", "+42.3 %", "p99 +87.7 %, TBT -25 to -38 %"),
    "w/o TPchange": ("+2.7 %", "+0.4 %", "TTFT mean +8.1 %, TBT mean +4.0 %"),
    "w/o MIAD": ("+38.8 %", "+39.6 %", "p50 -36.7 %, TBT p99 -56.7 %, violations -71.2 %"),
    "w/o LLF": ("-2.2 %", "-2.4 %", "mean -4.4 %, TBT mean -1.9 %"),
    "Baseline": ("+40.1 %", "+83.3 %", ""),
}


def ablations(found: Mapping[str, Figures]) -> str:
    """Return Figure 6: each ablation against FREESH."""
    ours = found["FREESH"]
    lines = [
        "| | paper: energy, emissions | paper: latency | here: energy | emissions | mean | p50 | p99 | TBT mean "
        "| TTFT mean | violations |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, each in found.items():
        if name == DIRTIEST:
            continue
        energy, carbon, latency = PAPER_ABLATIONS[name]
        columns = ("energy_wh", "carbon_kg", "e2e_mean_s", "e2e_p50_s", "e2e_p99_s", "tbt_mean_ms", "ttft_mean_ms")
        if each is ours:
            units = ("Wh", "kg", "s", "s", "s", "ms", "ms")
            shown = [f"{each[column]:.4g} {unit}" for column, unit in zip(columns, units, strict=True)]
        else:
            shown = [change(each[column], ours[column]) for column in columns]
        cells = [name, f"{energy}, {carbon}", latency, *shown, f"{100 * each['violation_rate']:.2f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


PAPER_TABLE_2 = {
    "LLF": (4651.81, 2.14, 0.02, 12.85, 175.53, 75.79, 0.65),
    "FCFS": (4550.15, 2.09, 0.01, 12.28, 172.17, 74.33, 0.66),
    "LLF, 2x": (4653.26, 2.15, 0.35, 109.55, 335.28, 77.46, 0.65),
    "FCFS, 2x": (5133.22, 2.38, 0.94, 370.98, 310.80, 76.07, 0.62),
}


LATE_LAST = "the same, the hopeless last"


def table_2(hour: Hour) -> str:
    """Return LLF and FCFS at one and two times the load, with the plans of the simple load."""
    plans = hour.plans()
    fcfs, no_preemption = replace(FREESH, order=Order.FCFS), replace(FREESH, preempt=False)
    runs = {
        "LLF": (FREESH, 1.0),
        "FCFS": (fcfs, 1.0),
        "LLF, 2x": (FREESH, 2.0),
        "FCFS, 2x": (fcfs, 2.0),
        "LLF without preemption, 2x": (no_preemption, 2.0),
        "SRTF without preemption, 2x": (replace(no_preemption, order=Order.SRTF), 2.0),
        "LLF, 2x, ends with the hour": (replace(FREESH, latest_s=0.0), 2.0),
        "FCFS, 2x, ends with the hour": (replace(fcfs, latest_s=0.0), 2.0),
        "LLF without preemption, 2x, ends with the hour": (replace(no_preemption, latest_s=0.0), 2.0),
        LATE_LAST: (replace(no_preemption, latest_s=0.0, late_last=True), 2.0),
    }
    lines = [
        "| | | energy | emissions | violations | mean | TTFT at the server | TBT | Jain |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (options, scale) in runs.items():
        if name in PAPER_TABLE_2:
            wh, kg, rate, mean, ttft, tbt, jain = PAPER_TABLE_2[name]
            lines.append(
                f"| {name} | paper | {wh:.0f} Wh | {kg:.2f} kg | {rate:.2f} | {mean:.2f} s | {ttft:.0f} ms "
                f"| {tbt:.1f} ms | {jain:.2f} |"
            )
        each = hour.simulated(plans, options, scale, LateLast if name == LATE_LAST else ServingSimulation)
        lines.append(
            f"| {name} | here | {each['energy_wh']:.0f} Wh | {each['carbon_kg']:.2f} kg | {each['violation_rate']:.2f} "
            f"| {each['e2e_mean_s']:.2f} s | {each['server_ttft_mean_ms']:.0f} ms | {each['tbt_mean_ms']:.1f} ms "
            f"| {each['jain']:.2f} |"
        )
    return "\n".join(lines)


PAPER_TABLE_5 = {
    ("SS", 5.0): "0/0.0/.6 0/0.0/.6 0/0.0/.6 0/0.0/.6",
    ("SS", 15.0): "0/0.7/.7 0/0.7/.7 11/1.7/.4 1/0.7/.6",
    ("SS", 25.0): "0/1.4/.8 0/1.4/.8 16/2.5/.4 0/1.3/.6",
    ("SL", 5.0): "0/15.9/.9 0/13.9/.7 8/22.9/.7 0/9.0/1.0",
    ("SL", 15.0): "0/19.6/.5 0/19.4/.5 18/28.1/.8 0/4.8/1.0",
    ("SL", 25.0): "0/21.6/.8 0/21.5/.8 15/29.5/.6 0/6.9/1.0",
    ("LS", 5.0): "0/0.1/.7 0/0.1/.7 0/0.1/.7 0/0.0/.7",
    ("LS", 15.0): "0/1.5/.7 0/1.4/.7 29/3.9/.4 3/1.3/.6",
    ("LS", 25.0): "0/2.1/.8 0/2.1/.8 28/3.7/.5 1/1.7/.7",
    ("LL", 5.0): "0/12.4/1.0 0/10.9/.9 7/19.2/.6 0/8.5/.9",
    ("LL", 15.0): "0/14.9/.6 0/14.9/.6 22/27.9/.6 0/7.5/1.0",
    ("LL", 25.0): "0/17.7/.6 0/17.8/.6 20/29.1/.6 0/7.8/1.0",
}
TABLE_5_REQUESTS, TABLE_5_CONCURRENCY = 100, 20


def table_5(azure: RequestTrace) -> str:
    """Return violations in per cent, mean TTFT in seconds and Jain's index by class, rate and order."""
    orders = (Order.EDF, Order.SRTF, Order.FCFS, Order.LLF)
    head = "| | requests/s | | " + " | ".join(each.value.upper() for each in orders) + " |"
    lines = [head, "|---|---:|---|" + "---:|" * len(orders)]
    for (name, qps), paper in PAPER_TABLE_5.items():
        lines.append(f"| {name} | {qps:.0f} | paper | " + " | ".join(paper.replace("/.", "/0.").split()) + " |")
        cells: list[str] = []
        for order in orders:
            found = [alone(name, qps, order, azure, seed) for seed in range(10)]
            rate, ttft, jain = np.mean(found, axis=0)
            cells.append(f"{100 * rate:.0f}/{ttft:.1f}/{jain:.1f}")
        lines.append(f"| | | here | {' | '.join(cells)} |")
    return "\n".join(lines)


def alone(
    name: str, qps: float, order: Order, azure: RequestTrace, seed: int, *, mode: str = "A100_TP8"
) -> tuple[float, float, float]:
    """Return violations, mean TTFT in seconds and fairness of 100 requests of one class, on an instance of 20 places.

    Their rate ``qps`` is per second.
    """
    random = np.random.default_rng(seed)
    of_class = THRESHOLDS["a"].class_of(azure.input_tokens, azure.output_tokens)
    rows = random.choice(np.flatnonzero(of_class == CLASSES.index(name)), TABLE_5_REQUESTS)
    arrival_s = np.cumsum(random.exponential(1 / qps, TABLE_5_REQUESTS))
    trace = RequestTrace(name, arrival_s, azure.input_tokens[rows], azure.output_tokens[rows])
    document = papers_pools().model_dump(mode="json")
    for each in document["partitions"][0]["classes"]:
        for profile in each["profiles"]:
            profile["latency_s"] = TABLE_5_CONCURRENCY / profile["max_qps"] if profile["max_qps"] else 1.0
    site = Site(PoolSpec.model_validate(document))
    rates = PlaceRates(PERIOD_S, np.ones((3, 2)), ("loc1", "loc2", "loc3"))
    plan = HalfHour(0.0, "a", (PlannedInstance("loc3", name, mode, 1),), NO_PLAN)
    found = ServingSimulation(
        site, rates, trace, [plan], ServingOptions(order=order, frequency=Frequency.FIXED, classify=False)
    ).run()
    return violation_rate(found.served), float(found.served.ttft_s.mean()), _fairness(found)


def _fairness(found: Outcome) -> float:
    return fairness_of_classes(found.served, np.zeros(len(found.served), np.int64))


PAPER_TABLE_10 = {
    "MIAD (1.5, 10)": (2867, 5051, 6009, 39.84, 78.85, 106.93, 42.4, 0.33),
    "MIAD (1.5, 100)": (4152, 5999, 7291, 56.27, 103.03, 122.68, 38.6, 0.49),
    "MIAD (2.0, 10)": (2497, 4449, 5641, 33.33, 66.97, 95.55, 45.4, 0.31),
    "MIAD (2.0, 100)": (3424, 5520, 6510, 46.89, 97.60, 120.10, 40.4, 0.34),
    "fixed": (1521, 1987, 2414, 20.62, 24.96, 28.19, 83.9, 0.11),
}
TABLE_10_S, TABLE_10_QPS, TABLE_10_W = 1_200.0, 2.0, 83.917 * 3
TABLE_10_TOKENS = 72


def table_10(azure: RequestTrace) -> str:
    """Return MIAD's parameters on one A100 with an 8B model, 20 minutes of SS requests."""
    lines = [
        "| | | E2E p50 | p90 | p99 | TBT p50 | p90 | p99 | energy | violations |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, paper in PAPER_TABLE_10.items():
        cells = [f"{paper[at]:.0f} ms" for at in range(3)] + [f"{paper[at]:.1f} ms" for at in range(3, 6)]
        lines.append(f"| {name} | paper | {' | '.join(cells)} | {paper[6]:.1f} Wh | {paper[7]:.2f} % |")
        found = _one_gpu(name, azure)
        cells = [f"{1_000 * found[f'e2e_p{at}_s']:.0f} ms" for at in (50, 90, 99)]
        cells += [f"{found[f'tbt_p{at}_ms']:.1f} ms" for at in (50, 90, 99)]
        lines.append(
            f"| | here | {' | '.join(cells)} | {found['energy_wh']:.1f} Wh | {100 * found['violation_rate']:.2f} % |"
        )
    return "\n".join(lines)


def _one_gpu(name: str, azure: RequestTrace) -> Figures:
    random = np.random.default_rng(1)
    of_class = THRESHOLDS["a"].class_of(azure.input_tokens, azure.output_tokens)
    inside = np.flatnonzero(of_class == 0)
    median = float(np.median(azure.output_tokens[inside]))
    count = int(TABLE_10_S * TABLE_10_QPS)
    rows = random.choice(inside, count)
    tokens = np.maximum(np.round(azure.output_tokens[rows] * TABLE_10_TOKENS / median), 1).astype(np.int64)
    trace = RequestTrace("SS", np.sort(random.random(count)) * TABLE_10_S, azure.input_tokens[rows], tokens)
    profile = {"mode": "one", "max_qps": 10, "power_w": TABLE_10_W, "latency_s": 1.5, "ttft_ms": 33.76, "tbt_ms": 21.0}
    spec = PoolSpec.model_validate(
        {
            "places": [{"name": "here", "zone": "here", "gpus": {"A100-SXM4-40GB": 1}}],
            "modes": [{"name": "one", "gpu_model": "A100-SXM4-40GB", "gpus": 1, "command": ["serve"]}],
            "partitions": [{"name": "all", "classes": [{"name": "SS", "profiles": [profile]}]}],
        }
    )
    rates = PlaceRates(PERIOD_S, np.ones((1, 2)), ("here",))
    plan = HalfHour(0.0, "all", (PlannedInstance("here", "SS", "one", 1),), NO_PLAN)
    options = replace(FREESH, order=Order.FCFS, length_mae=0.0)
    if name == "fixed":
        options = replace(options, frequency=Frequency.FIXED)
    else:
        factor, step = name.removeprefix("MIAD (").removesuffix(")").split(",")
        options = replace(options, miad=MiadConfig(float(factor), float(step)))
    return document(ServingSimulation(Site(spec), rates, trace, [plan], options).run(), [plan], {})


def main() -> None:
    """Fill the page."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    hour, azure = the_hour(data), read_requests(data / "llm" / "azure_2023_conv.csv.gz")
    found: dict[str, Figures] = {}

    def ablated() -> dict[str, Figures]:
        found.update(found or figure_6(hour))
        return found

    fill(
        page,
        {
            "end-to-end": lambda: end_to_end(ablated()),
            "figure-6": lambda: ablations(ablated()),
            "table-2": lambda: table_2(hour.of_one_seed()),
            "table-5": lambda: table_5(azure),
            "table-10": lambda: table_10(azure),
        },
    )


if __name__ == "__main__":
    main()
