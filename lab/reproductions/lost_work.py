"""Work lost to stops, with what spares it and without: ``python -m lab.reproductions.lost_work PAGE``.

A week of GREEN's year, on its cluster and on one that is full, whose nodes fail once in ``MTBF_S`` each, under the
product's policies that stop jobs. Jobs save their work when they are asked to stop, or at intervals alone, so that a
stop kills what they have done since. Makes the tables ``lost-work`` and ``lost-saves`` of PAGE anew, in five minutes;
``lost-saves-year``, for a page that has a place for it, is of eleven months on the paper's cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

from lab.reproductions.marked import fill
from services.core.policies.registry import build_policy
from services.kit.policies import load_policies
from services.simulator.engine import EngineOptions
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import predicted
from services.simulator.workload import ClusterSpec

START, DAYS, MTBF_S = "2023-10-02", 7, 14 * 86_400.0
CLUSTERS = ("32x2:RTX3090", "12x2:RTX3090")
PREEMPTING = ("green", "joint", "las", "powerflow")
RUNS_S = (0.0, 3_600.0)
WAYS = {
    "killed at once": EngineOptions(interval_jobs=1.0, save_wait_s=0.0),
    "waited for": EngineOptions(interval_jobs=1.0),
}
TOLD = [*product(CLUSTERS[:1], PREEMPTING), (CLUSTERS[1], "las")]
"""Where jobs save at intervals alone. On the full cluster, GREEN's stops then kill nearly all that is done."""
YEAR = "2023-01-01", 331  #: As far as the grid is known a month later


def row(cluster: str, policy: str, named: str, options: EngineOptions, start: str = START, days: float = DAYS) -> str:
    """Return a line of the table: stops, what each cost, and what the whole emitted and took."""
    trace = read_carbon("GB", start=start, days=days + 33.0, forecast="issued")
    options = replace(options, node_mtbf_s=MTBF_S, rigid=policy == "las")
    jobs = predicted("none", read_jobs("green-year", start=start, days=days))
    run = Simulation(build_policy(policy, {}), jobs, ClusterSpec.parse(cluster), trace, options)
    result, gangs = run.run({}), run.gangs
    if result.completed != result.jobs:
        raise RuntimeError(f"{policy}: {result.completed} of {result.jobs} jobs ended")
    lost_s = gangs.lost_gpu_s / max(gangs.stopped_gpus, 1)
    figures = f"{result.preemptions:,} | {result.failures} | {lost_s:.1f} | {gangs.lost_gpu_s / 3_600:.1f}"
    head = f"| {cluster.removesuffix(':RTX3090')} | {policy} | {named}"
    return f"{head} | {figures} | {result.carbon_kg:.1f} | {result.avg_jct_s / 3_600:.3f} |"


def table(what: str, rows: Iterable[str]) -> str:
    """Return these rows with their head."""
    head = f"| nodes | policy | {what} | stops by it | by lost nodes | lost, s per GPU and stop |"
    head += " GPU h in all | carbon, kg | mean JCT, h |"
    return "\n".join([head, "|---|---|---:|---:|---:|---:|---:|---:|---:|", *rows])


def of_run(cluster: str, policy: str, run_s: float) -> str:
    """Return a row of the first table."""
    return row(cluster, policy, f"{run_s:,.0f}", EngineOptions(min_run_s=run_s))


def of_way(cluster: str, policy: str, way: str) -> str:
    """Return a row of the second table."""
    return row(cluster, policy, way, WAYS[way])


def by_run() -> str:
    """Return a row per cluster, policy and guaranteed run."""
    return table("run, s", (of_run(*each) for each in product(CLUSTERS, PREEMPTING, RUNS_S)))


def by_way() -> str:
    """Return a row per cluster, policy and way to stop jobs that save at intervals."""
    return table("such jobs", (of_way(nodes, policy, way) for (nodes, policy), way in product(TOLD, WAYS)))


def of_year() -> str:
    """Return a row per policy and way to stop jobs that save at intervals, over a year; PowerFlow takes too long."""
    ways = product(PREEMPTING[:3], WAYS)
    return table("such jobs", (row(CLUSTERS[0], policy, way, WAYS[way], *YEAR) for policy, way in ways))


if __name__ == "__main__":
    load_policies()
    tables = {"lost-work": by_run, "lost-saves": by_way, "lost-saves-year": of_year}
    fill(Path(sys.argv[1]), {name: tables[name] for name in sys.argv[2:] or list(tables)[:2]})
