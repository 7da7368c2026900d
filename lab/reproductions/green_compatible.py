"""GREEN's figure 11: ``python -m lab.reproductions.green_compatible PAGE``.

GREEN against what is not model-agnostic, on the day and on 150 of its jobs: Pollux, and Zeus + Tiresias without and
with its batch half. The 150 are drawn, as the paper does not print those that it adjusted by hand. Zeus' bandit finds
each recurring job's batch over several runs; here a job has the batch of the greatest goodput at its user's gang from
its first run on, which is more than Zeus knows. Makes the table ``green-compatible`` of PAGE anew, in some minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.policies.zeus.combined import ZeusLasConfig, zeus_las
from lab.policies.zeus.wrapper import ZeusMemory
from lab.reproductions.marked import fill
from services.core.cycle.plan import Plan
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import Snapshot
from services.core.policies.baselines.las import LasMemory
from services.core.policies.batches import with_batches
from services.core.policies.registry import build_policy
from services.kit.policies import load_policies
from services.simulator.engine import EngineOptions, SimulationResult
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.workload import ClusterSpec, Workload

START, CLUSTER, ZONES = "2023-08-08", "32x2:RTX3090", ("GB", "PL", "SE", "US-CAL-CISO")
SEEDS: dict[int | None, tuple[int, ...]] = {150: (1, 2, 3), None: (1,)}  #: By the number of jobs; None: all of them
LAS, GREEN, POLLUX, ZEUS = "Tiresias (LAS)", "GREEN", "Pollux", "Zeus + Tiresias"
ZEUS_BATCHES = "Zeus + Tiresias, with batches"
RIVALS = (POLLUX, ZEUS, ZEUS_BATCHES)
PAPER = {POLLUX: "-23.9 %; +17.2 %; +13.4 %", ZEUS_BATCHES: "-12.7 %; similar; -"}
"""Carbon, mean and tail completion time of GREEN against them (section 8.2.3)."""


class ZeusBatches:
    """Zeus + Tiresias where the batch of each gang that starts is the one of the greatest goodput."""

    name = "pollux"  #: The engine treats it as that: jobs tune their batches

    def __init__(self) -> None:
        self._zeus = zeus_las(ZeusLasConfig())
        self.initial, self.dump, self.load = self._zeus.initial, self._zeus.dump, self._zeus.load

    def decide(self, snapshot: Snapshot, memory: ZeusMemory[LasMemory]) -> tuple[Plan, ZeusMemory[LasMemory]]:
        """Return the plan of both, with batches."""
        plan, memory = self._zeus.decide(snapshot, memory)
        return with_batches(snapshot, plan), memory


def policy_of(name: str) -> Policy[Any]:
    """Return a new policy by the name of its row."""
    if name == ZEUS_BATCHES:
        return ZeusBatches()
    return build_policy({LAS: "las", GREEN: "green", POLLUX: "pollux", ZEUS: "zeus+las"}[name], {})


def drawn(jobs: Workload, count: int, seed: int) -> Workload:
    """Return this many of the jobs, drawn."""
    some = np.sort(np.random.default_rng(seed).choice(len(jobs), count, replace=False))
    columns = {name: column[some] for name, column in vars(jobs).items() if isinstance(column, np.ndarray)}
    ids, tenants = (tuple(np.array(each)[some].tolist()) for each in (jobs.ids, jobs.tenants))
    return replace(jobs, ids=ids, tenants=tenants, **columns)


def run(name: str, count: int | None, zone: str, seed: int) -> SimulationResult:
    """Return what comes of the day's jobs, or of a number of them."""
    jobs = read_jobs("green-day", recipe="green", start=START, days=1, seed=seed)
    of = jobs if count is None else drawn(jobs, count, seed)
    options = EngineOptions(rigid=name in (LAS, ZEUS, ZEUS_BATCHES), seed=seed)
    grid = read_carbon(zone, start=START, days=7)
    return Simulation(policy_of(name), of, ClusterSpec.parse(CLUSTER), grid, options).run({})


def figures(count: int | None, zone: str, seed: int) -> dict[str, tuple[float, ...]]:
    """Return carbon, energy, mean and tail completion time by row."""
    results = {name: run(name, count, zone, seed) for name in (LAS, GREEN, *RIVALS)}
    return {
        name: (each.carbon_kg, each.energy_kwh, each.avg_jct_s, float(np.percentile(each.columns.jct_s, 99)))
        for name, each in results.items()
    }


def compatible_table(zones: Sequence[str] = ZONES, counts: Mapping[int | None, tuple[int, ...]] = SEEDS) -> str:
    """Return a row per set of jobs and policy: against Tiresias, and what GREEN is against it."""
    lines = ["| jobs | policy | carbon | energy | mean JCT | p99 JCT | GREEN against it: carbon; mean; p99 | paper |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|")
    for count, seeds in counts.items():
        name = f"{count} drawn" if count else "all 791"
        runs = [figures(count, zone, seed) for zone in zones for seed in seeds]
        for policy in (GREEN, *RIVALS):
            own = changes([each[policy] for each in runs], [each[LAS] for each in runs])
            carbon, _, mean, tail = changes([each[GREEN] for each in runs], [each[policy] for each in runs])
            against = ["", ""] if policy == GREEN else [f"{carbon}; {mean}; {tail}", PAPER.get(policy, "")]
            lines.append("| " + " | ".join((name, policy, *own, *against)) + " |")
    return "\n".join(lines)


def changes(of: list[tuple[float, ...]], to: list[tuple[float, ...]]) -> list[str]:
    """Return the mean changes of figures."""
    return [f"{100 * each:+.1f} %" for each in np.mean(np.divide(of, to) - 1, axis=0).tolist()]


if __name__ == "__main__":
    load_policies()
    fill(Path(sys.argv[1]), {"green-compatible": compatible_table})
