"""A-SRPT's Lemma 2, with either machine: the one that the paper proves it for, and the one that waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.graph_placing import extremes_s, mapper_of
from services.core.domain.ids import JobId
from services.core.parallel.graph import data_parallel
from services.core.parallel.iteration import Network
from services.core.policies.asrpt.virtual_machine import VirtualJob, VirtualMachine
from services.simulator.engine import EngineOptions, simulate
from services.simulator.workload import ClusterSpec
from tests.support.workloads import START_S, a_profile, a_trace, a_workload

GPUS, SERVER_GPUS, WIDEST = 16, 4, 4
GRAPH = data_parallel(WIDEST, 7e6, 0.05)


@pytest.mark.parametrize("machine", ["runs", "waits"])
@pytest.mark.parametrize(("seed", "tau", "within_s"), [(1, 1.0, 3_000.0), (2, 0.0, 3_000.0), (3, 3.0, 30_000.0)])
def test_no_run_takes_longer_than_lemma_2_says(machine: str, seed: int, tau: float, within_s: float) -> None:
    """Sum of completions <= (1 + tau + rho G / (G - g_max)) times the virtual machine's, and the jobs' own times."""
    rng = np.random.default_rng(seed)
    at_s, work_s = np.sort(rng.uniform(0, within_s, 80)), rng.lognormal(6.0, 1.5, 80).round() + 1
    gpus = rng.choice([1, 2, 3, 4], 80)
    at_s -= at_s[0]
    profile = replace(a_profile(scaling=0.0, restart_s=0.0, checkpoint_s=0.0), graph=GRAPH)
    jobs = a_workload(list(zip(at_s.tolist(), work_s.tolist(), gpus.tolist(), strict=True)), [profile])

    result = simulate(
        "a-srpt",
        jobs,
        ClusterSpec.parse(f"{GPUS // SERVER_GPUS}x{SERVER_GPUS}:V100"),
        a_trace(),
        parameters={"machine": machine, "tau": tau},
        options=EngineOptions(rigid=True),
    )

    network = Network(server_gpus=SERVER_GPUS)
    extremes = [extremes_s(mapper_of(GRAPH, size, network)) for size in range(1, WIDEST + 1)]
    rho = max(worst_s / least_s for least_s, worst_s in extremes)
    lengths_s = work_s * gpus / GPUS
    virtual = [
        (at, VirtualJob(0, length, at, JobId(str(number)), length))
        for number, (at, length) in enumerate(zip(at_s.tolist(), lengths_s.tolist(), strict=True))
    ]
    _, ended = VirtualMachine().run(virtual, 1e9)
    factor = 1 + tau + rho * GPUS / (GPUS - WIDEST)
    own_s = result.columns.ended_s - result.columns.started_s

    assert result.completed == 80
    assert rho > 1.5  # there are gangs that wait for better servers
    assert (result.columns.started_s - START_S).sum() <= factor * sum(job.ended_s for job in ended)
    assert (own_s >= work_s - 1e-6).all()
    assert (own_s <= rho * work_s + 1e-6).all()
