"""Five zones with a fifth of the GPUs each: ``python -m lab.reproductions.joint_zones PAGE DATA``.

A week of GREEN's year and 400 jobs of PAI, which had no part in choosing anything, with forecasts as issued, no lengths
and nodes that sleep. *At home* each job runs in one zone, drawn for it; *anywhere* in all. Makes the table
``joint-zones`` of PAGE anew, in a minute; DATA as for ``joint_pairs``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from lab.bounds.zones import Stretch, filled_kg, least_kg, planned_kg, stretches_of
from lab.reproductions.joint_pairs import PAI, Pair, workload_of
from lab.reproductions.marked import fill
from services.core.domain.transfers import Transfer
from services.core.policies.registry import build_policy
from services.kit.policies import load_policies
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.engine import EngineOptions
from services.simulator.engine.grid import Grid
from services.simulator.engine.result import SimulationResult
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import predicted
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

START, SEED = "2023-10-02", 1
ASLEEP = 300.0


def workloads(data: Path) -> dict[str, tuple[Workload, str]]:
    """Return the jobs of each row, and the nodes of each zone."""
    pai = workload_of(Pair(*PAI, 40_000, "30x2:V100", 0.6, "GB", START), data)
    return {
        "GREEN, a week, 6x2 RTX 3090 a zone": (read_jobs("green-year", start=START, days=7), "6x2:RTX3090"),
        "PAI, 400 jobs, 6x2 V100 a zone": (pai, "6x2:V100"),
    }


@dataclass(frozen=True)
class Ran:
    """A run, and when its gangs drew what."""

    result: SimulationResult
    stretches: list[Stretch]
    grids: list[Grid]
    transfer: Transfer

    @cached_property
    def gpus(self) -> list[int]:
        return [int(of_zone["gpus"]) for of_zone in self.result.zones.values()]

    @cached_property
    def least_kg(self) -> float:
        return least_kg(self.stretches, self.grids, self.gpus, self.transfer.energy_kwh)

    @cached_property
    def filled_kg(self) -> float:
        return filled_kg(self.stretches, self.grids, self.gpus)

    @cached_property
    def planned_kg(self) -> float:
        return planned_kg(self.stretches, self.grids, self.gpus, self.transfer)


def ran(
    policy: str,
    jobs: Workload,
    cluster: ClusterSpec,
    traces: Sequence[CarbonTrace],
    prepare: Callable[[Simulation], None] = lambda run: None,
    lengths: str | None = None,
    transfer: Transfer = Transfer(),
) -> Ran:
    """Return what came of the jobs in the zones of ``traces``.

    Args:
        lengths: Who predicts them; None: nobody for ``joint``.
    """
    options = EngineOptions(rigid=policy == "las", seed=SEED, power_down_after_s=ASLEEP, transfer=transfer)
    of = predicted(lengths or ("none" if policy == "joint" else "perfect"), jobs)
    run = Simulation(build_policy(policy, {}), of, cluster, traces[0], options, elsewhere=traces[1:])
    prepare(run)
    stretches = stretches_of(run)
    result = run.run({})
    if result.completed != result.jobs:
        raise RuntimeError(f"{policy}: {result.completed} of {result.jobs} jobs ended")
    grids = [Grid(trace, options.history_s, options.horizon_s) for trace in traces]
    return Ran(result, stretches, grids, transfer)


def zones_table(data: Path) -> str:
    """Return a row per workload and way, with its carbon, its times and how far it is above its bound."""
    lines = ["| jobs | policy | where | carbon, kg | mean JCT, h | checkpoints moved | above the least by place |"]
    lines.append("|---|---|---|---:|---:|---:|---:|")
    traces = [read_carbon(zone, start=START, days=40.0, forecast="issued") for zone in BUNDLED_ZONES]
    for name, (jobs, nodes) in workloads(data).items():
        home = tuple(np.array(BUNDLED_ZONES)[np.random.default_rng(SEED).integers(0, 5, len(jobs))].tolist())
        five = ClusterSpec.parse(",".join(f"{zone}={nodes}" for zone in BUNDLED_ZONES))
        for policy in ("las", "joint"):
            for where, some in (("at home", replace(jobs, zone=home)), ("anywhere", jobs)):
                found = ran(policy, some, five, traces)
                result, least = found.result, found.least_kg
                moved = sum(int(of_zone["checkpoints"]) for of_zone in result.zones.values())
                figures = f"{result.carbon_kg:.1f} | {result.avg_jct_s / 3_600.0:.2f} | {moved}"
                above = f"{100 * (result.carbon_kg / least - 1):+.0f} %"
                lines.append(f"| {name} | {policy} | {where} | {figures} | {above} |")
    return "\n".join(lines)


if __name__ == "__main__":
    load_policies()
    fill(Path(sys.argv[1]), {"joint-zones": lambda: zones_table(Path(sys.argv[2]))})
