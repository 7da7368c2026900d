"""``joint`` as it comes, on work that its parameters were not chosen on: users who ask for wide gangs on 8-GPU nodes.

``wide_gangs.csv`` was made for this test: a hundred jobs of Sia's applications over eight hours, drawn from a seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.training import predicted
from services.simulator.workload import ClusterSpec

JOBS = Path(__file__).with_name("wide_gangs.csv")


def the_result(policy: str, *, rigid: bool = False, **parameters: Any) -> SimulationResult:
    jobs = predicted("none", read_jobs(str(JOBS), recipe="sia", start="2023-08-01", seed=1))
    grid = read_carbon("GB", start="2023-08-01")
    options = EngineOptions(power_down_after_s=300.0, rigid=rigid)
    return simulate(policy, jobs, ClusterSpec.parse("8x8:A100"), grid, parameters=parameters, options=options)


@pytest.fixture(scope="module")
def las() -> SimulationResult:
    return the_result("las", rigid=True)


def figures(result: SimulationResult) -> tuple[float, float]:
    """Return carbon, kg, and mean completion time, seconds."""
    summary = result.summary()
    assert summary["completed"] == summary["jobs"] == 100
    return summary["carbon_kg"], summary["avg_jct_s"]


@pytest.mark.usefixtures("the_lab")
def test_the_defaults_carry_over_to_work_they_were_not_chosen_on(las: SimulationResult) -> None:
    carbon_kg, jct_s = figures(the_result("joint"))
    assert jct_s <= 1.05 * figures(las)[1]
    assert carbon_kg < figures(the_result("zeus+las", rigid=True))[0]


def test_the_worth_of_an_hour_of_another_cluster_does_not(las: SimulationResult) -> None:
    """What the defaults were: those of gangs of two on RTX 3090."""
    _, jct_s = figures(the_result("joint", widest_gpus=2, hour_wh=60.0, host_w=60.0))
    assert jct_s > 1.5 * figures(las)[1]
