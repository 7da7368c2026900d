"""Orders of the grid, simulated by the live layer: ``python -m lab.reproductions.orders PAGE``.

``notice``: a week of GREEN's year on a full cluster whose jobs save at intervals alone, under an order a day that is
announced so long before. ``ten-hours``: 1,024 GPUs with half of the power flexible, and an order of 10 hours. Makes
both tables of PAGE anew, in ten minutes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.reproductions.marked import fill
from services.core.domain.carbon import CarbonCurve, Signal
from services.core.policies.registry import build_policy
from services.kit.policies import load_policies
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.engine.orders import SimulatedOrder
from services.simulator.engine.simulation import Simulation
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import predicted
from services.simulator.workload import ANY_MODEL, Behaviour, CarbonTrace, ClusterSpec, JobProfile, Workload

START, DAYS, CUT, HOUR_S = "2023-10-02", 7, 0.35, 3_600.0
CLUSTER = "12x2:RTX3090"
NOTICES_S = (0.0, 600.0, 1_800.0, 3_600.0)
POLICIES = ("fifo", "joint")


def of_notice(policy: str, notice_s: float) -> str:
    """Return a row of the first table."""
    trace = read_carbon("GB", start=START, days=DAYS + 33.0, forecast="issued")
    jobs = predicted("none", read_jobs("green-year", start=START, days=DAYS))
    jobs = replace(jobs, flex=np.where(np.arange(len(jobs)) % 2, 0.25, 0.0))
    first_s = float(np.datetime64(START, "s").astype(np.int64)) + 17 * HOUR_S
    orders = tuple(
        SimulatedOrder(first_s + 24 * HOUR_S * day, 3 * HOUR_S, CUT, notice_s=notice_s) for day in range(DAYS)
    )
    options = EngineOptions(interval_jobs=1.0, orders=orders)
    result = Simulation(build_policy(policy, {}), jobs, ClusterSpec.parse(CLUSTER), trace, options).run({})
    above, rebound = (100 * max(each[name] for each in result.orders) for name in ("above_most", "rebound"))
    lost = f"{result.lost_gpu_hours:.1f} | {result.preemptions:,} | {above:.1f} % | {rebound:.1f} %"
    return f"| {policy} | {notice_s / 60:.0f} | {lost} | {result.carbon_kg:.1f} | {result.avg_jct_s / HOUR_S:.2f} |"


def notices() -> str:
    """Return a row per policy and notice."""
    head = "| policy | notice, min | lost, GPU h | stops | worst five minutes | rebound | carbon, kg | mean JCT, h |"
    rows = [of_notice(policy, notice_s) for policy in POLICIES for notice_s in NOTICES_S]
    return "\n".join([head, "|---|---:|---:|---:|---:|---:|---:|---:|", *rows])


def coming_and_going(nodes: int, hours: float) -> Workload:
    """Return gangs of eight GPUs: of class 0 on half of the nodes for so long, and of class 25 on the others.

    The latter take an hour and a half to six hours and draw 250, 300 or 350 W a GPU; four times as many wait.
    """
    n_jobs, dice = nodes // 2 * 5, np.random.default_rng(1)
    hard = np.arange(n_jobs) < nodes // 2
    behaviours = [Behaviour(np.array([8]), np.ones(1), np.full(1, watts)) for watts in (250.0, 300.0, 350.0)]
    kinds = tuple(JobProfile(f"k{at}", {ANY_MODEL: each}, restart_s=30.0) for at, each in enumerate(behaviours))
    return Workload(
        ids=tuple(f"j{at:04}" for at in range(n_jobs)),
        tenants=("t",) * n_jobs,
        submitted_s=np.arange(n_jobs, dtype=np.float64),
        work_s=np.where(hard, hours, dice.uniform(1.5, 6.0, n_jobs)) * HOUR_S,
        requested_gpus=np.full(n_jobs, 8),
        min_gpus=np.full(n_jobs, 8),
        max_gpus=np.full(n_jobs, 8),
        step_gpus=np.ones(n_jobs, dtype=np.int64),
        profile=np.arange(n_jobs) % 3,
        profiles=kinds,
        flex=np.where(hard, 0.0, 0.25),
    )


def ordered(policy: str, nodes: int, hours: float) -> tuple[SimulationResult, SimulationResult]:
    """Return what comes of a cluster of nodes of eight A100 without and with an order of so many hours."""
    jobs, order = coming_and_going(nodes, hours + 6), SimulatedOrder(4 * HOUR_S, hours * HOUR_S, CUT)
    trace = CarbonTrace("XX", Signal.AVERAGE_DIRECT, CarbonCurve(np.zeros(1), np.full(1, 300.0), 1e6))
    cluster = ClusterSpec.parse(f"{nodes}x8:A100")
    without, under = (
        simulate(policy, jobs, cluster, trace, options=EngineOptions(orders=orders, metered=True))
        for orders in ((), (order,))
    )
    return without, under


def of_hours(policy: str) -> str:
    """Return a row of the second table."""
    without, under = ordered(policy, 128, 10.0)
    (kept,) = under.orders
    slower = under.columns.gpu_s / without.columns.gpu_s - 1
    spared = 100 * float(slower[:64].max())
    limits = f"{kept['baseline_w'] / 1e3:.1f} | {kept['limit_w'] / 1e3:.1f} | {kept['mean_w'] / 1e3:.1f}"
    shares = f"{100 * kept['above_most']:.1f} % | {100 * kept['below_most']:.1f} % | {100 * kept['rebound']:.1f} %"
    return f"| {policy} | {limits} | {kept['reached_s']:.0f} | {shares} | {spared:.2f} % |"


def ten_hours() -> str:
    """Return a row per policy."""
    head = "| policy | baseline, kW | limit, kW | mean, kW | reached, s | five minutes above | below | rebound |"
    head += " class 0 slower by |"
    rows = [of_hours(policy) for policy in ("fifo", "las", "joint")]
    return "\n".join([head, "|---|---:|---:|---:|---:|---:|---:|---:|---:|", *rows])


TABLES = {"notice": notices, "ten-hours": ten_hours}

if __name__ == "__main__":
    load_policies()
    fill(Path(sys.argv[1]), {name: TABLES[name] for name in sys.argv[2:] or TABLES})
