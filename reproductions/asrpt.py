"""A-SRPT against its paper as tables: ``python -m reproductions.asrpt PAGE RESULTS``.

RESULTS is a folder with what ``wattshift simulate experiment`` left of the experiments in ``TABLES``, each in a folder
of that name; what is missing leaves its table as it is, and of an experiment that was stopped, what is there counts. In
PAGE, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made anew; the
text around it is by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from reproductions.marked import fill
from reproductions.powerflow_day import rows_of
from services.core.cycle.graph_placing import extremes_s, mapper_of
from services.core.parallel.iteration import Network
from services.core.policies.asrpt.policy import AsrptConfig
from services.core.policies.bounds.completion import Promise, least_total_completion_s
from services.simulator.engine import EngineOptions
from services.simulator.experiments.cell import workload_of
from services.simulator.experiments.plan import Trace
from services.simulator.workload import ClusterSpec, Workload

TABLES = ("a-srpt-jobs", "a-srpt-jobs-150k", "a-srpt-single", "a-srpt-bandwidth", "a-srpt-predictors")
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
    def workload(self) -> Workload:
        """The jobs."""
        return _jobs(json.dumps(self.inputs["trace"], sort_keys=True), int(self.inputs["seed"]))

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
    """Return mean completion times by policy and trace, and what A-SRPT makes of the sum against each baseline."""
    traces = list(dict.fromkeys(run.trace for run in runs))
    of = {(run.label, run.trace): run for run in runs}
    head = ["policy", *(f"{trace}: mean JCT" for trace in traces), *(f"{trace}: a-srpt's sum" for trace in traces)]
    rows: list[list[str]] = []
    for label in dict.fromkeys(run.label for run in runs):
        found = [of.get((label, trace)) for trace in traces]
        means = ["-" if run is None else f"{run.summary['avg_jct_s'] / HOUR_S:.2f} h" for run in found]
        rows.append([label, *means, *(_against(of.get((OURS, run.trace)) if run else None, run) for run in found)])
    return rows_of(head, rows)


def _against(ours: Run | None, other: Run | None) -> str:
    if ours is None or other is None or ours is other:
        return "-"
    return f"{100 * (ours.total_s / other.total_s - 1):+.0f} %"


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
        if run.inputs["choice"]["policy"] != OURS or "machine_speed" in params:
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


def main() -> None:
    """Make the tables of a page anew."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    found = {name: runs_of(results / name) for name in TABLES if (results / name / "index.json").exists()}
    makers = {name: predictors if name == "a-srpt-predictors" else compared for name in found}
    tables = {name: partial(makers[name], runs) for name, runs in found.items()}
    if found:
        tables["a-srpt-theorem"] = partial(theorem, [run for runs in found.values() for run in runs])
    fill(page, tables)


if __name__ == "__main__":
    main()
