"""A power limit makes jobs wait, and never the whole cluster: some job that fits below it starts at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cycle.capacity import powers_of_two
from services.core.cycle.plan import Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.arrays import Bools
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.profiling import PowerflowMemory
from services.core.policies.powerflow.view import Tables
from services.core.policies.registry import build_policy
from tests.support.powerflow_clusters import IDLE_W, PER_NODE, fitted_models, gangs_of, waiting_cluster

GANGS = gangs_of(fitted_models(np.random.default_rng(8), 4))


def least_w(snapshot: Snapshot, goes_off: Bools) -> float:
    """Return what the cluster draws at least with one job at work, its smallest gang on nodes that else are off."""
    tables, jobs = Tables(snapshot, PowerflowConfig()), snapshot.jobs
    most = np.maximum(jobs.min_gpus, np.minimum(jobs.max_gpus, snapshot.nodes.gpus.sum()))
    smallest: list[int] = powers_of_two(jobs.min_gpus, most, jobs.step_gpus)[:, 0].tolist()
    alone_w = (
        float(tables.gang(job, 0, gpus)[1].min()) + -gpus % PER_NODE * IDLE_W for job, gpus in enumerate(smallest)
    )
    return min(alone_w) + IDLE_W * float(snapshot.nodes.gpus[~goes_off].sum())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1_000),
    n_jobs=st.integers(1, 5),
    n_nodes=st.integers(1, 5),
    more=st.floats(1.0, 3.0),
    may_sleep=st.sampled_from(["none", "some", "all"]),
    params=st.fixed_dictionaries(
        {
            "profiling": st.sampled_from(["each_job", "first_run", "unknown", "never"]),
            "placement": st.sampled_from(["buddy", "consolidated"]),
            "marginal": st.sampled_from(["energy", "power"]),
            "at_limit": st.sampled_from(["stop", "skip"]),
            "power_down": st.booleans(),
            "spare_nodes": st.integers(0, 2),
        }
    ),
)
def test_no_round_leaves_the_cluster_idle_while_a_job_fits(
    seed: int, n_jobs: int, n_nodes: int, more: float, may_sleep: str, params: dict[str, object]
) -> None:
    """At the limit of the least gang and above it: in an active round, and a passive one that has its targets."""
    rng = np.random.default_rng(seed)
    snapshot = waiting_cluster(n_jobs, PER_NODE * n_nodes, GANGS, seed=seed)
    sleeps = rng.random(n_nodes) < {"none": 0.0, "some": 0.5, "all": 1.0}[may_sleep]
    asleep = sleeps & (rng.random(n_nodes) < 0.5)
    least = np.minimum(rng.choice(np.array([1, 1, 2, 3, 4, 8, 12]), n_jobs), PER_NODE * n_nodes)
    snapshot = replace(
        snapshot,
        trigger=Trigger.ACTIVE,
        measures=True,
        measuring=frozenset(),
        jobs=replace(snapshot.jobs, min_gpus=least, max_gpus=np.maximum(least, snapshot.jobs.max_gpus)),
        nodes=replace(snapshot.nodes, asleep=asleep, may_sleep=sleeps),
    )
    limit_w = more * least_w(snapshot, asleep | (sleeps & bool(params["power_down"])))
    policy = build_policy("powerflow", {**params, "power_limit_w": limit_w + 1e-6})
    memory = PowerflowMemory()
    for trigger in (Trigger.ACTIVE, Trigger.PASSIVE):
        cycle = run_cycle(policy, replace(snapshot, trigger=trigger), memory)
        memory = replace(cycle.memory, measured={}, profiled={})
        assert any(isinstance(action, Start) for action in cycle.plan.actions)
