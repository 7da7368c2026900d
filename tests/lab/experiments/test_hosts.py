"""Hosts charged by job: what the engine and its policies make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.experiments.hosts import LabOptions
from services.core.domain.errors import DomainError
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.behaviour import GangTables
from services.simulator.workload import ClusterSpec
from tests.support.workloads import a_profile, a_trace, a_workload


def test_a_host_may_be_charged_to_each_job_on_it() -> None:
    """Two jobs share a node of two GPUs, each paying its host whole; a gang over two nodes pays both."""
    profile = a_profile(gpu_w=200.0, host_power_w=50.0, restart_s=0.0)
    jobs = a_workload([(0.0, 3_600.0, 1), (0.0, 3_600.0, 1)], [profile])
    wide = a_workload([(0.0, 3_600.0, 4)], [profile])
    options = LabOptions(host_per_job_w=100.0, rigid=True)

    shared = simulate("fifo", jobs, ClusterSpec.parse("1x2:RTX3090"), a_trace(), options=options)
    spread = simulate("fifo", wide, ClusterSpec.parse("2x2:RTX3090"), a_trace(), options=options)

    assert shared.energy_kwh == pytest.approx(2 * 0.3)
    assert spread.peak_power_w == pytest.approx(4 * 200.0 + 2 * 100.0)

    once = replace(options, host_per_job_once=True)
    shared = simulate("fifo", jobs, ClusterSpec.parse("1x2:RTX3090"), a_trace(), options=once)
    spread = simulate("fifo", wide, ClusterSpec.parse("2x2:RTX3090"), a_trace(), options=once)

    assert shared.energy_kwh == pytest.approx(2 * 0.3), "two jobs, two charges"
    assert spread.peak_power_w == pytest.approx(4 * 200.0 + 100.0), "one job, one charge"


def test_policies_see_the_host_charge_that_counts() -> None:
    profile = a_profile(gpu_w=200.0, host_power_w=50.0)
    jobs, cluster = a_workload([(0.0, 3_600.0, 4)], [profile]), ClusterSpec.parse("2x2:RTX3090")

    def drawn_w(options: EngineOptions) -> list[float]:
        table = GangTables(jobs, cluster, (cluster.groups[0].model.name,), options).shown(({},))[0][0]
        return table.power_w[:, 0].tolist()

    assert drawn_w(LabOptions()) == [250.0, 500.0, 1_000.0]
    assert drawn_w(LabOptions(host_per_job_w=100.0)) == [300.0, 500.0, 1_000.0]
    assert drawn_w(LabOptions(host_per_job_w=100.0, host_per_job_once=True)) == [300.0, 500.0, 900.0]


def test_a_charge_once_per_job_needs_its_watts() -> None:
    with pytest.raises(DomainError, match="needs host_per_job_w"):
        LabOptions(host_per_job_once=True)
