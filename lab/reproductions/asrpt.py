"""A-SRPT against its paper as tables: ``python -m lab.reproductions.asrpt PAGE RESULTS``.

RESULTS is a folder with what ``wattshift lab experiment`` left of the experiments in ``TABLES``, each in a folder
of that name; what is missing leaves its table as it is, and of an experiment that was stopped, what is there counts.
Some rows are runs of another experiment: 10 Gb/s is the 0 % on one GPU, tau 1 and the group's median are the defaults.
In PAGE, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made anew; the text around it is by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from lab.bounds.completion import Promise, least_total_completion_s
from lab.experiments.cell import workload_of
from lab.experiments.plan import Trace
from lab.reproductions.marked import fill
from lab.reproductions.powerflow_day import rows_of
from services.core.cycle.graph_placing import extremes_s, mapper_of
from services.core.parallel.iteration import Network
from services.core.policies.asrpt.policy import AsrptConfig
from services.simulator.engine import EngineOptions
from services.simulator.workload import ClusterSpec, Workload

TABLES = (
    "a-srpt-jobs",
    "a-srpt-jobs-150k",
    "a-srpt-small",
    "a-srpt-single",
    "a-srpt-bandwidth",
    "a-srpt-tau",
    "a-srpt-predictors",
    "a-srpt-passing",
)
OURS = "a-srpt"
HOUR_S = 3_600.0


@dataclass(frozen=True)
class Run:
    """One cell: its inputs and figures as the experiment left them."""

    inputs: dict[str, Any]
    summary: dict[str, Any]
    predictions: dict[str, float]

    @property
    def label(self) -> str:
        """Of the policy."""
        return str(self.inputs["choice"]["label"])

    @property
    def trace(self) -> str:
        """Label of the trace."""
        return str(self.inputs["trace"]["label"])

    @property
    def seed(self) -> int:
        """Of the workload."""
        return int(self.inputs["seed"])

    def named(self, label: str, trace: str | None = None) -> Run:
        """Return the run under other labels, as another experiment would have it."""
        choice = {**self.inputs["choice"], "label": label}
        own = {**self.inputs["trace"], "label": self.trace if trace is None else trace}
        return Run({**self.inputs, "choice": choice, "trace": own}, self.summary, self.predictions)

    @property
    def workload(self) -> Workload:
        """The jobs."""
        return _jobs(json.dumps(self.inputs["trace"], sort_keys=True), self.seed)

    @property
    def flow_s(self) -> float:
        """Sum of completion times, each from the job's submission."""
        return float(self.summary["avg_jct_s"]) * int(self.summary["completed"])

    @property
    def total_s(self) -> float:
        """Sum of completion times, all from the first submission: what the paper minimises (eq. 8)."""
        submitted_s = self.workload.submitted_s
        return self.flow_s + float((submitted_s - submitted_s[0]).sum())


@lru_cache(maxsize=4)
def _jobs(trace: str, seed: int) -> Workload:
    return workload_of(Trace(**json.loads(trace)), seed)


def runs_of(folder: Path) -> list[Run]:
    """Return the cells of an experiment that are there, in the order of its file."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    files = [folder / "cells" / f"{key}.json" for key, *_ in index]
    cells = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    # Results of an earlier version have the errors of predictions under another name.
    return [Run(cell["inputs"], cell["summary"], cell.get("predictions") or cell["foretold"]) for cell in cells]


def compared(runs: list[Run]) -> str:
    """Return mean completion times by policy and trace, seed by seed, and what A-SRPT makes of each baseline's.

    The last columns are of the sum of completion times that all count from the first submission.
    """
    traces = list(dict.fromkeys(run.trace for run in runs))
    seeds = list(dict.fromkeys(run.seed for run in runs))
    of = {(run.label, run.trace, run.seed): run for run in runs}
    head = ["policy"]
    for what in ("mean JCT", "a-srpt's mean against it", "a-srpt's sum"):
        head += [f"{trace}: {what}" for trace in traces]
    rows: list[list[str]] = []
    for label in dict.fromkeys(run.label for run in runs):
        found = [[of.get((label, trace, seed)) for seed in seeds] for trace in traces]
        ours = [[of.get((OURS, trace, seed)) for seed in seeds] for trace in traces]
        means = [", ".join(f"{run.summary['avg_jct_s'] / HOUR_S:.2f}" for run in each if run) for each in found]
        rows.append([label, *(f"{each} h" if each else "-" for each in means)])
        for amount in (attrgetter("flow_s"), attrgetter("total_s")):
            rows[-1] += [_against(*both, amount) for both in zip(ours, found, strict=True)]
    return rows_of(head, rows)


def _against(ours: list[Run | None], others: list[Run | None], amount: Callable[[Run], float]) -> str:
    """Return what A-SRPT makes of a baseline, from the best seed to the worst."""
    pairs = [(one, other) for one, other in zip(ours, others, strict=True) if one and other and one is not other]
    changes = sorted({f"{100 * (amount(one) / amount(other) - 1):+.0f}" for one, other in pairs}, key=float)
    return " to ".join(dict.fromkeys((changes[0], changes[-1]))) + " %" if changes else "-"


def waits_for_servers(runs: list[Run]) -> str:
    """Return what it costs to wait longer or shorter for better servers."""
    head = ["tau", "mean JCT", "last job ends after"]
    ordered = sorted(runs, key=lambda run: run.inputs["choice"]["params"].get("tau", AsrptConfig.tau))
    return rows_of(
        head,
        (
            [
                f"{run.inputs['choice']['params'].get('tau', AsrptConfig.tau):g}",
                f"{run.summary['avg_jct_s'] / HOUR_S:.1f} h",
                f"{run.summary['makespan_s'] / 86_400:.0f} days",
            ]
            for run in ordered
        ),
    )


def passing(runs: list[Run]) -> str:
    """Return what it does if others pass a gang that waits for better servers, trace by trace."""
    head = ["trace", "policy", "mean JCT", "p99 JCT", "last job ends after"]
    return rows_of(
        head,
        (
            [
                run.trace,
                run.label,
                *(f"{run.summary[name] / HOUR_S:.1f} h" for name in ("avg_jct_s", "p99_jct_s")),
                f"{run.summary['makespan_s'] / 86_400:.1f} days",
            ]
            for run in sorted(runs, key=lambda run: run.trace)
        ),
    )


def predictors(runs: list[Run]) -> str:
    """Return how good each prediction was, and what it was worth."""
    head = ["policy, prediction", "exact", "within a tenth", "mean error, iterations", "mean JCT", "makespan"]
    return rows_of(
        head,
        (
            [
                run.label,
                f"{100 * run.predictions['exact']:.0f} %",
                f"{100 * run.predictions['within_tenth']:.0f} %",
                f"{run.predictions['mean_error']:,.0f}",
                f"{run.summary['avg_jct_s'] / HOUR_S:.2f} h",
                f"{run.summary['makespan_s'] / 86_400:.1f} days",
            ]
            for run in runs
        ),
    )


def theorem(runs: Iterable[Run]) -> str:
    """Return A-SRPT's measured ratio to the bound, and what Theorem 1 allows, run by run."""
    head = ["run", "rho", "g_max", "mean error, iterations", "sum over the bound", "Theorem 1, perfect", "Theorem 1"]
    rows: list[list[str]] = []
    for run in runs:
        params = run.inputs["choice"]["params"]
        if run.inputs["choice"]["policy"] != OURS or run.seed != 1:
            continue
        jobs, cluster = run.workload, ClusterSpec.parse(run.inputs["cluster"])
        promise = _promise(run, float(params.get("tau", AsrptConfig.tau)))
        bound_s = least_total_completion_s(jobs.submitted_s, jobs.work_s, jobs.min_gpus, cluster.gpus)
        perfect = Promise(promise.rho, promise.widest, promise.spread, 0.0, promise.tau).ratio(cluster.gpus)
        rows.append(
            [
                f"{run.label}; {run.trace}",
                f"{promise.rho:.1f}",
                str(promise.widest),
                f"{promise.error:,.0f}",
                f"{run.total_s / bound_s:.2f}",
                f"{perfect:,.0f}",
                f"{promise.ratio(cluster.gpus):.1e}",
            ]
        )
    return rows_of(head, rows)


def _promise(run: Run, tau: float) -> Promise:
    options = {**run.inputs["options"], **run.inputs["trace"]["options"], **run.inputs["choice"]["options"]}
    jobs, cluster = run.workload, ClusterSpec.parse(run.inputs["cluster"])
    engine = EngineOptions(**{name: options[name] for name in ("inter_gbps", "intra_gbytes") if name in options})
    widest = max(group.gpus for group in cluster.groups)
    network = Network(engine.inter_gbps * 1e9 / 8, engine.intra_gbytes * 1e9, widest)
    present = {(int(kind), int(gpus)) for kind, gpus in zip(jobs.profile, jobs.min_gpus, strict=True)}
    extremes = np.array([extremes_s(mapper_of(jobs.profiles[kind].graph, gpus, network)) for kind, gpus in present])
    least_s, worst_s = extremes.T
    return Promise(
        rho=float((worst_s / least_s).max()),
        widest=int(jobs.min_gpus.max()),
        spread=float(worst_s.max() / least_s.min()),
        error=run.predictions["mean_error"],
        tau=tau,
    )


def with_shared_runs(found: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """Return the experiments' runs, each with those that another experiment did for it; see the module."""
    of = {name: list(found.get(name, ())) for name in TABLES}
    slow, fast = ([run for run in of["a-srpt-bandwidth"] if run.trace == trace] for trace in ("1 Gb/s", "50 Gb/s"))
    paper = [run.named(run.label, "10 Gb/s") for run in of["a-srpt-single"] if run.trace == "0 %"]
    of["a-srpt-bandwidth"] = slow + paper + fast
    of["a-srpt-tau"] += [run for run in slow if run.label == OURS]
    median = [run.named(f"{run.label}, median") for run in of["a-srpt-jobs"] if run.seed == 1]
    by_policy = ("a-srpt, median", "spwf, median", "wcs-duration, median")
    of["a-srpt-predictors"] += [run for run in median if run.label in by_policy]
    of["a-srpt-predictors"].sort(key=lambda run: (run.inputs["choice"]["policy"], -run.predictions["exact"]))
    return {name: of[name] for name in found}


def main() -> None:
    """Make the tables of a page anew."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    there = {name: runs_of(results / name) for name in TABLES if (results / name / "index.json").exists()}
    found = with_shared_runs(there)
    makers = {"a-srpt-predictors": predictors, "a-srpt-tau": waits_for_servers, "a-srpt-passing": passing}
    tables = {name: partial(makers.get(name, compared), runs) for name, runs in found.items()}
    if found:
        tables["a-srpt-theorem"] = partial(theorem, [run for runs in there.values() for run in runs])
    fill(page, tables)


if __name__ == "__main__":
    main()
