"""``joint`` as it comes on 20 pairs of workload and cluster: ``python -m lab.reproductions.joint_pairs PAGE DATA OUT``.

DATA is a folder with ``jobs/philly.csv.gz``, ``jobs/gaia_pai_100k.csv.gz``, ``jobs/alibaba_openb_pods_2023.csv.gz`` and
``jobs/sia_workloads``. Every simulation leaves a file in OUT, and a second run makes only those that are missing; then
the tables ``joint-pairs``, ``joint-pairs-rows`` and ``joint-pairs-misses`` of PAGE are made anew, in a minute.

Each pair takes ``JOBS`` jobs that follow each other in their trace, none longer than ``LONGEST_S``, and stretches or
shortens the time between them so that they ask for ``load`` times the GPU seconds that the cluster has until the last
of them comes, at the sizes and batches that their users asked for.

========= ====================== ================================================= ==========================
trace     GPUs asked for         model and batch                                   a policy may use
========= ====================== ================================================= ==========================
Philly    as in the trace        by the job's length, drawn (recipe ``green``)     1 to 8 GPUs, or as asked
PAI       drawn as Philly's      the same (recipe ``green-users``)                 1 to 8
Alibaba   as in the trace        the same (recipe ``green``)                       1 to 8
Sia       as in the trace        as in the trace (recipe ``sia``)                  1 to 64
GREEN     one                    by the job's length, drawn (recipe ``green``)     1 to 8
========= ====================== ================================================= ==========================

``CHOSE`` are the pairs that ``joint``'s defaults were looked at on; ``JUDGES`` had no part in them. The split was made
before any pair was run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.experiments.runner import write_json
from lab.recipes.sia import sia
from lab.reproductions.marked import fill
from services.kit.policies import load_policies
from services.simulator.bundles import bundled_jobs
from services.simulator.catalogue import catalogue
from services.simulator.engine import EngineOptions, simulate
from services.simulator.raw import RawJobs
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_raw
from services.simulator.readers.text import utc_s
from services.simulator.training import predicted
from services.simulator.workload import ClusterSpec, Workload

JOBS, LONGEST_S, SEED = 400, 48 * 3_600.0, 1
ASLEEP = {"power_down_after_s": 300.0}
GRID_DAYS = 40.0
P99_MOST = 20.0  #: How much longer than under LAS the 99th percentile may be, per cent


@dataclass(frozen=True)
class Pair:
    """A workload on a cluster: which jobs of a trace, from which on, and the grid."""

    trace: str
    file: str  #: Below DATA, or the name of a bundled trace
    recipe: str
    first: int  #: The job it begins with
    cluster: str
    load: float
    zone: str
    start: str

    @property
    def name(self) -> str:
        """For a row and a file."""
        return f"{self.trace}, {self.cluster}, load {self.load:g}, {self.zone}"


PHILLY = ("Philly", "jobs/philly.csv.gz", "green")
PAI = ("PAI", "jobs/gaia_pai_100k.csv.gz", "green-users")
ALIBABA = ("Alibaba", "jobs/alibaba_openb_pods_2023.csv.gz", "green")
GREEN = ("GREEN", "green-year", "green")


def _sia(name: str) -> tuple[str, str, str]:
    return f"Sia {name}", f"jobs/sia_workloads/{name}.csv", "sia"


CHOSE = (
    Pair(*PHILLY, 30_000, "8x4:A100", 0.6, "US-CAL-CISO", "2023-05-08"),
    Pair(*PAI, 20_000, "16x2:A100", 0.9, "GB", "2023-02-06"),
    Pair(*_sia("philly_01"), 0, "8x8:A100", 0.9, "GB", "2023-08-01"),
    Pair(*GREEN, 0, "16x2:V100", 0.6, "GB", "2023-07-01"),
)
JUDGES = (
    Pair(*PHILLY, 10_000, "16x2:V100", 0.3, "GB", "2023-03-06"),
    Pair(*PHILLY, 50_000, "6x8:V100", 0.9, "PL", "2023-09-04"),
    Pair(*PHILLY, 70_000, "3x16:H100", 1.2, "CA-ON", "2023-10-02"),
    Pair(*PAI, 40_000, "8x4:V100", 1.2, "SE", "2023-04-03"),
    Pair(*PAI, 60_000, "4x16:A100", 0.6, "US-CAL-CISO", "2023-06-05"),
    Pair(*PAI, 80_000, "6x8:H100", 0.3, "PL", "2023-11-06"),
    Pair(*ALIBABA, 1_000, "4x8:V100", 0.3, "US-CAL-CISO", "2023-01-09"),
    Pair(*ALIBABA, 2_500, "2x16:A100", 1.2, "SE", "2023-02-13"),
    Pair(*ALIBABA, 4_000, "16x2:H100", 0.6, "GB", "2023-05-15"),
    Pair(*ALIBABA, 5_500, "8x4:V100", 0.9, "CA-ON", "2023-09-11"),
    Pair(*_sia("newtrace_02"), 300, "8x4:V100", 0.6, "PL", "2023-03-13"),
    Pair(*_sia("philly_05"), 0, "4x16:H100", 0.3, "SE", "2023-06-12"),
    Pair(*_sia("newtrace_03"), 0, "16x2:V100", 1.2, "GB", "2023-10-09"),
    Pair(*GREEN, 40_160, "8x4:H100", 0.9, "SE", "2023-04-10"),
    Pair(*GREEN, 90_240, "6x8:A100", 1.2, "US-CAL-CISO", "2023-08-21"),
    Pair(*GREEN, 120_080, "4x16:V100", 0.3, "CA-ON", "2023-11-13"),
)


@dataclass(frozen=True)
class Row:
    """A policy as it runs on each pair."""

    policy: str
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, Any] = field(default_factory=dict[str, Any])


ALL, NONE = {"batch_tuning": "all"}, {"batch_tuning": "none"}
LAS, ZEUS, POLLUX, JOINT = "LAS", "Zeus + LAS", "Pollux", "joint"
NO_BATCHES, NO_SLEEP, NO_LIMITS = ", no batches", ", no sleep", ", no limits"
ROWS = {
    LAS: Row("las", options=ASLEEP),
    ZEUS: Row("zeus+las", options=ASLEEP),
    POLLUX: Row("pollux", options=ASLEEP),
    JOINT: Row("joint", options=ALL),
    POLLUX + NO_BATCHES: Row("pollux", options={**ASLEEP, **NONE}),
    JOINT + NO_BATCHES: Row("joint", options=NONE),
    LAS + NO_SLEEP: Row("las"),
    ZEUS + NO_SLEEP: Row("zeus+las"),
    POLLUX + NO_SLEEP: Row("pollux"),
    JOINT + NO_SLEEP: Row("joint", {"sleep_after_s": None}, ALL),
    JOINT + NO_LIMITS: Row("joint", {"limits": False}, ALL),
}
RIVALS = {
    JOINT: (LAS, ZEUS, POLLUX),
    JOINT + NO_BATCHES: (LAS, ZEUS, POLLUX + NO_BATCHES),
    JOINT + NO_SLEEP: (LAS + NO_SLEEP, ZEUS + NO_SLEEP, POLLUX + NO_SLEEP),
    JOINT + NO_LIMITS: (LAS, POLLUX),
}
"""Whose carbon a row of ``joint`` has to be below, all on its terms: LAS first, whose completion times count, too."""
SHOWN = ("carbon_kg", "avg_jct_s", "p99_jct_s")
Figures = Mapping[str, float]
Found = Mapping["Pair", Mapping[str, Figures]]


@cache
def _raw(data: Path, file: str) -> RawJobs:
    bundle = catalogue().jobs.get(file)
    return bundled_jobs(file, bundle) if bundle is not None else read_raw(data / file)


def workload_of(pair: Pair, data: Path) -> Workload:
    """Return the jobs of a pair, at its load."""
    raw, cluster = _raw(data, pair.file), ClusterSpec.parse(pair.cluster)
    (group,) = cluster.groups
    rows = np.flatnonzero(~(raw.duration_s > LONGEST_S))
    jobs = raw.take(rows[rows >= pair.first][:JOBS])
    make = sia if pair.recipe == "sia" else next(each for each in catalogue().recipes if each.name == pair.recipe).make
    made = make(jobs, SEED)
    asked = made.requested_gpus
    speed = np.ones(len(jobs))
    for kind, profile in enumerate(made.profiles):
        of = made.profile == kind
        if (truth := profile.truth(group.model.name)) is not None:
            speed[of] = truth.speed_at(asked[of])
    gpu_s = float((made.work_s / speed * asked).sum())
    since_s = made.submitted_s - made.submitted_s[0]
    stretch = gpu_s / pair.load / cluster.gpus / float(since_s[-1])
    return replace(made, submitted_s=utc_s(pair.start, "start") + since_s * stretch)


def run(pair: Pair, row: Row, data: Path) -> dict[str, float]:
    """Return one simulation's figures."""
    elastic = row.policy in ("joint", "pollux")
    jobs, forecast = workload_of(pair, data), "issued" if row.policy == "joint" else "perfect"
    grid = read_carbon(pair.zone, start=pair.start, days=GRID_DAYS, forecast=forecast)
    options = EngineOptions(rigid=not elastic, seed=SEED, **row.options)
    cluster = ClusterSpec.parse(pair.cluster)
    jobs = predicted("none" if row.policy == "joint" else "perfect", jobs)
    summary = simulate(row.policy, jobs, cluster, grid, parameters=row.params, options=options).summary()
    if summary["completed"] != summary["jobs"]:
        raise RuntimeError(f"{pair.name}, {row.policy}: {summary['completed']} of {summary['jobs']} jobs ended")
    return {name: summary[name] for name in ("carbon_kg", "energy_kwh", "avg_jct_s", "p99_jct_s", "makespan_s")}


def figures(pairs: tuple[Pair, ...], data: Path, out: Path) -> dict[Pair, dict[str, Figures]]:
    """Return every row's figures on these pairs; each simulation is run once and kept in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[Pair, dict[str, Figures]] = {}
    for pair in pairs:
        for label, row in ROWS.items():
            file = out / f"{pair.name} -- {label}.json"
            if not file.exists():
                write_json(file, run(pair, row, data))
            found.setdefault(pair, {})[label] = json.loads(file.read_text(encoding="utf-8"))
    return found


def change(figures: Mapping[str, Figures], label: str, name: str, base: str = LAS) -> float:
    """Return a figure of a row relative to that of ``base``, per cent."""
    return 100.0 * (figures[label][name] / figures[base][name] - 1.0)


def missed(figures: Mapping[str, Figures], label: str = JOINT) -> list[str]:
    """Return which goals a row of ``joint`` misses on a pair, in words."""
    base, *_ = RIVALS[label]
    least = min(RIVALS[label], key=lambda rival: figures[rival]["carbon_kg"])
    over, jct, p99 = (change(figures, label, name, of) for name, of in zip(SHOWN, (least, base, base), strict=True))
    found = [f"carbon {over:+.1f} % against {least.split(',')[0]}"] if over >= 0 else []
    found += [f"mean JCT {jct:+.1f} %"] if jct > 0 else []
    return found + ([f"p99 {p99:+.1f} %"] if p99 > P99_MOST else [])


def pairs_table(found: Found) -> str:
    """Return a row per pair: ``joint`` against LAS, the rivals' carbon and mean JCT, and whether the goals are met."""
    head = ["pair", "role", "joint: carbon", "mean JCT", "p99 JCT"]
    head += [f"{rival}: {figure}" for rival in (ZEUS, POLLUX) for figure in ("carbon", "mean JCT")]
    lines = [f"| {' | '.join(head)} | goals |", f"|---|---|{'---:|' * (len(head) - 2)}---|"]
    for pair, of in found.items():
        cells = [f"{change(of, JOINT, name):+.1f} %" for name in SHOWN]
        cells += [f"{change(of, rival, name):+.1f} %" for rival in (ZEUS, POLLUX) for name in SHOWN[:2]]
        role = "chose" if pair in CHOSE else "judges"
        lines.append(f"| {pair.name} | {role} | {' | '.join(cells)} | {'; '.join(missed(of)) or 'met'} |")
    return "\n".join(lines)


def rows_table(found: Found) -> str:
    """Return a row per policy: means over the judges and over all pairs, and on how many of each the goals are met."""
    judges = {pair: of for pair, of in found.items() if pair in JUDGES}
    parts = {"judges": judges, "all": dict(found)} if judges else {"all": dict(found)}
    head = [f"{part}: {figure}" for part in parts for figure in ("carbon", "mean JCT", "p99 JCT", "goals met")]
    lines = [f"| row | {' | '.join(head)} |", f"|---|{'---:|' * len(head)}"]
    for label in ROWS:
        base, cells = LAS + NO_SLEEP * label.endswith(NO_SLEEP), list[str]()
        for some in parts.values():
            every = some.values()
            cells += [f"{np.mean([change(of, label, name, base) for of in every]):+.1f} %" for name in SHOWN]
            met = sum(not missed(of, label) for of in every if label in RIVALS)
            cells.append(f"{met} of {len(some)}" if label in RIVALS else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def misses_table(found: Found) -> str:
    """Return every goal that a row of ``joint`` misses on a pair."""
    lines = ["| row | pair | missed |", "|---|---|---|"]
    for label in RIVALS:
        why = ((pair, missed(of, label)) for pair, of in found.items())
        lines += [f"| {label} | {pair.name} | {'; '.join(each)} |" for pair, each in why if each]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Found], str]] = {
    "joint-pairs": pairs_table,
    "joint-pairs-rows": rows_table,
    "joint-pairs-misses": misses_table,
}


def main(page: str, data: str, out: str) -> None:
    """Make the tables of ``page`` anew from the traces in ``data``; ``out`` keeps what was simulated."""
    load_policies()
    found = figures(CHOSE + JUDGES, Path(data), Path(out))
    fill(Path(page), {name: partial(make, found) for name, make in TABLES.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
