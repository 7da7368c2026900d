"""The tables of ``lab/results/router.md``.

    python -m lab.reproductions.router PAGE DATA

DATA is a folder with ``llm/azure_2023_{conv,code}.csv.gz`` (``TIMESTAMP,ContextTokens,GeneratedTokens``). In PAGE, what
stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made anew for the names lengths and places.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, median

import carbon_service
from lab.reproductions.marked import fill
from services.core.domain.units import J_PER_KWH
from services.core.policies.freesh.dispatch import InstanceLoad, WeightedRoundRobin
from services.core.policies.freesh.server_choice import EnergyProfile, Given, ServerCosts, Work, choose_server
from services.core.profiles.answer_lengths import AnswerLengths, input_bucket

TRACES = {"conv": "conversations", "code": "code"}
THRESHOLDS = (232, 444)
RECORDINGS = Path(carbon_service.__file__).parent / "recordings"
ZONES = {"DE": 0.012, "GB": 0.030, "US-CAL-CISO": 0.150}
"""Zones of three places, and seconds from the clients there and back."""
HOURS = range(0, 24, 3)
SERVERS_EACH, CAPACITY = 4, 24
TTFT_S, TBT_S, TBT_LOAD_S = 0.2, 0.025, 0.0006
"""Seconds to the first token, between tokens, and what each further request adds to the latter."""
POWER_W, IDLE_W = 700.0, 250.0
LIMIT_S = 30.0
FULL = EnergyProfile((POWER_W - IDLE_W) / CAPACITY, 0.0, TBT_S + TBT_LOAD_S * CAPACITY)


def read_trace(data: Path, name: str) -> list[tuple[float, int, int]]:
    """Return arrival (seconds from the first), input and output tokens of each request."""
    with gzip.open(data / f"llm/azure_2023_{name}.csv.gz", "rt", encoding="utf-8") as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(), row["ContextTokens"], row["GeneratedTokens"])
            for row in csv.DictReader(file)
        ]
    first_s = min(row[0] for row in rows)
    return sorted((at_s - first_s, int(inputs), int(outputs)) for at_s, inputs, outputs in rows)


@dataclass
class Scores:
    """How good predictions were that were each made before the answer was seen."""

    errors: list[float] = field(default_factory=list[float])
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(THRESHOLDS, 0))


def prequential(trace: Sequence[tuple[float, int, int]], contexts: Callable[[int], list[object]]) -> Scores:
    """Predict each answer's length, then learn from it."""
    lengths, scores = AnswerLengths(), Scores()
    for _, inputs, outputs in trace:
        known = contexts(inputs)
        scores.errors.append(abs(lengths.predict(known).tokens - outputs))
        for threshold in THRESHOLDS:
            is_long = lengths.predict(known, threshold).long_share >= 0.5
            scores.hits[threshold] += is_long == (outputs >= threshold)
        lengths.observe(known, outputs)
    return scores


def lengths_table(data: Path) -> str:
    """Return the errors on each trace, beside a constant that knows the whole trace."""
    ways: dict[str, Callable[[int], list[object]]] = {
        "by model": lambda inputs: ["model"],
        "by model and prompt": lambda inputs: ["model", input_bucket(inputs)],
    }
    lines = ["| trace | prediction | MAE, tokens | right of 232 | right of 444 |", "|---|---|---:|---:|---:|"]
    for name, title in TRACES.items():
        trace = read_trace(data, name)
        outputs = [row[2] for row in trace]
        middle = median(outputs)
        constant = [fmean(value < threshold for value in outputs) for threshold in THRESHOLDS]
        error = fmean(abs(value - middle) for value in outputs)
        lines.append(
            f"| {title}, {len(trace):,} | its own median, always short | {error:.1f} | "
            + " | ".join(f"{100 * max(share, 1 - share):.1f} %" for share in constant)
            + " |"
        )
        for way, contexts in ways.items():
            scores = prequential(trace, contexts)
            shares = " | ".join(f"{100 * scores.hits[threshold] / len(trace):.1f} %" for threshold in THRESHOLDS)
            lines.append(f"| | {way}, learned | {fmean(scores.errors):.1f} | {shares} |")
    return "\n".join(lines)


@dataclass
class Replica:
    """A server of the replay, as ``choose_server`` sees it."""

    id: str
    location: str
    gco2_per_kwh: float
    energy: EnergyProfile = FULL
    accuracy_pct: float | None = None
    limit: int = CAPACITY
    held: int = 0
    costs: ServerCosts = field(default_factory=lambda: ServerCosts(TTFT_S, TBT_S))

    @property
    def room(self) -> int:
        """How many more requests it takes."""
        return CAPACITY - self.held

    def serve(self, work: Work, now_s: float, outputs: int) -> tuple[Given, float]:
        """Count a request, and return with it how long it takes."""
        self.held += 1
        return self.costs.begin(work, now_s), TTFT_S + outputs * (TBT_S + TBT_LOAD_S * (self.held - 1))

    def end(self, given: Given, served_s: float, outputs: int) -> None:
        """Take a request out whose answer is there."""
        self.held -= 1
        self.costs.learn(given, TTFT_S, served_s, outputs)
        self.costs.end(given)


@dataclass
class Replay:
    """What came of a replay."""

    gco2: float = 0.0
    late: int = 0
    latencies_s: list[float] = field(default_factory=list[float])


def intensities(hour: int) -> dict[str, float]:
    """Return the recorded intensity of each zone in an hour of its last recorded day, gCO2/kWh."""
    found: dict[str, float] = {}
    for zone in ZONES:
        with gzip.open(RECORDINGS / f"{zone}.csv.gz", "rt", encoding="utf-8") as file:
            rows = [float(row[1]) for row in itertools.islice(csv.reader(file), 1, None)]
        found[zone] = rows[len(rows) - 24 + hour]
    return found


def replay(trace: Sequence[tuple[float, int, int]], hour: int, *, cleanest: bool) -> Replay:
    """Serve a trace in one hour's intensities: by equal weights, or by the cleanest server in time."""
    gco2 = intensities(hour)
    replicas = [Replica(f"{zone}-{number}", zone, gco2[zone]) for zone in ZONES for number in range(SERVERS_EACH)]
    by_id = {each.id: each for each in replicas}
    turns, lengths, done = WeightedRoundRobin(), AnswerLengths(), Replay()
    ends = list[tuple[float, int, Replica, Given, float, int]]()

    def end_next() -> float:
        at_s, _, replica, given, served_s, outputs = heapq.heappop(ends)
        replica.end(given, served_s, outputs)
        return at_s

    for number, (arrival_s, inputs, outputs) in enumerate(trace):
        while ends and ends[0][0] <= arrival_s:
            end_next()
        start_s = arrival_s
        while not any(each.room for each in replicas):
            start_s = end_next()
        contexts: list[object] = ["model", input_bucket(inputs)]
        expected = lengths.predict(contexts).tokens
        lengths.observe(contexts, outputs)
        work = Work(inputs, expected)
        if cleanest:
            free = [each for each in replicas if each.room]
            chosen = choose_server(free, work, LIMIT_S - (start_s - arrival_s), start_s, ZONES)
        else:
            found = turns.choose([InstanceLoad(each.id, CAPACITY, each.held) for each in replicas])
            chosen = by_id[found.id] if found else None
        assert chosen is not None
        given, served_s = chosen.serve(work, start_s, outputs)
        heapq.heappush(ends, (start_s + served_s, number, chosen, given, served_s, outputs))
        took_s = start_s - arrival_s + served_s + ZONES[chosen.location]
        done.latencies_s.append(took_s)
        done.late += took_s > LIMIT_S
        done.gco2 += outputs * chosen.energy.slot_w * chosen.energy.token_s / J_PER_KWH * chosen.gco2_per_kwh
    return done


def places_table(data: Path) -> str:
    """Return emissions and latencies by equal weights and by the cleanest server in time."""
    trace = read_trace(data, "conv")
    lines = [
        "| hour | gCO2/kWh " + ", ".join(ZONES) + " | weights, g | cleanest, g | | p50, s | p99, s | late |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    totals = [0.0, 0.0]
    for hour in HOURS:
        runs = [replay(trace, hour, cleanest=way) for way in (False, True)]
        totals = [total + run.gco2 for total, run in zip(totals, runs, strict=True)]
        p50, p99 = ([_quantile(run.latencies_s, share) for run in runs] for share in (0.5, 0.99))
        saved = f"{100 * (runs[1].gco2 / runs[0].gco2 - 1):+.1f} %"
        rates = ", ".join(f"{value:.0f}" for value in intensities(hour).values())
        grams = f"{runs[0].gco2:.0f} | {runs[1].gco2:.0f} | {saved}"
        late = f"{runs[0].late} / {runs[1].late}"
        lines.append(
            f"| {hour:02d} | {rates} | {grams} | {p50[0]:.2f} / {p50[1]:.2f} | {p99[0]:.2f} / {p99[1]:.2f} | {late} |"
        )
    lines.append(
        f"| all | | {totals[0]:.0f} | {totals[1]:.0f} | **{100 * (totals[1] / totals[0] - 1):+.1f} %** | | | |"
    )
    return "\n".join(lines)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main(page: Path, data: Path) -> None:
    """Make the tables of a page anew."""
    fill(page, {"lengths": lambda: lengths_table(data), "places": lambda: places_table(data)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
