"""Shares between tenants over time, and what simulations tell of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab.report import run_page
from services.core.domain.errors import DomainError
from services.core.policies.registry import FAIR, POLICIES, entry_of
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.workload import ClusterSpec, Workload
from tests.support.workloads import START_S, a_trace, a_workload, a_year

HOUR_S = 3_600.0
DAY_S = 86_400.0
CLUSTER = ClusterSpec.parse("2x4:A100")


def backlog(gangs: Mapping[str, Sequence[int]], work_s: float = 2 * HOUR_S) -> Workload:
    """Return jobs that are all there at once: per tenant one of each of these sizes."""
    rows = [(tenant, size) for tenant, sizes in gangs.items() for size in sizes]
    workload = a_workload([(0.0, work_s * size, size) for _, size in rows])
    return replace(workload, tenants=tuple(tenant for tenant, _ in rows))


def run(policy: str, workload: Workload, parameters: dict[str, Any] | None = None, **options: Any) -> SimulationResult:
    """Return the result of a day on eight GPUs."""
    entry = entry_of(policy)
    assert entry is not None
    given: dict[str, Any] = {"rigid": not entry.elastic, "until_s": START_S + DAY_S, **options}
    return simulate(policy, workload, CLUSTER, a_trace(), parameters=parameters or {}, options=EngineOptions(**given))


def gpu_hours(result: SimulationResult, workload: Workload) -> dict[str, float]:
    """Return the GPU time of each tenant."""
    found = dict.fromkeys(workload.tenants, 0.0)
    for tenant, gpu_s in zip(workload.tenants, result.columns.gpu_s.tolist(), strict=True):
        found[tenant] += gpu_s / HOUR_S
    return found


@pytest.mark.parametrize("policy", ["fifo", "las", "green", "joint"])
def test_tenants_that_always_wait_get_gpu_time_by_their_weights(policy: str) -> None:
    workload = backlog({"early": [1] * 200, "late": [1] * 200})

    alone = gpu_hours(run(policy, workload), workload)
    shared = run(FAIR + policy, workload, tenant_weights={"late": 3.0})
    hours = gpu_hours(shared, workload)

    assert hours["late"] / hours["early"] == pytest.approx(3.0, rel=0.1)
    assert sum(hours.values()) >= 0.98 * sum(alone.values()), "no GPU is idle for it"
    assert shared.jain > 0.98


def test_a_gang_wider_than_its_share_gets_its_share_of_the_time() -> None:
    workload = backlog({"wide": [8] * 40, "narrow": [1] * 400})

    hours = gpu_hours(run("fair+las", workload), workload)

    assert hours["wide"] / sum(hours.values()) == pytest.approx(0.5, abs=0.1)


def test_idle_shares_are_borrowed_and_what_was_borrowed_is_given_back() -> None:
    workload = backlog({"a": [1] * 200, "b": [1] * 200})
    later_s = np.repeat([0.0, 12 * HOUR_S], 200)
    workload = replace(workload, submitted_s=workload.submitted_s + later_s)

    hours = gpu_hours(run("fair+las", workload), workload)

    assert sum(hours.values()) == pytest.approx(8 * 24, rel=0.02)
    assert hours["b"] == pytest.approx(4 * 12, rel=0.1), "a keeps its share whatever it had before"


@pytest.mark.parametrize("policy", POLICIES)
def test_with_one_tenant_it_is_the_policy_itself(policy: str) -> None:
    workload = a_year(60, days=0.5, gpus=8, load=1.2)

    inner, worn = (run(name, workload, until_s=None).summary() for name in (policy, FAIR + policy))

    own = {"policy", "rounds", "active_rounds"}  # it looks at every change
    assert {key: value for key, value in worn.items() if key not in own} == {
        key: value for key, value in inner.items() if key not in own
    }
    assert (worn["jain"], worn["tenants"]) == (None, {})


def test_reports_say_how_evenly_tenants_were_served_where_there_are_several() -> None:
    shared, single = backlog({"a": [1] * 80, "b": [1] * 20}), backlog({"a": [1] * 100})
    of_two, of_one = (run("fifo", workload) for workload in (shared, single))
    assert 0.5 < of_two.jain < 1.0
    assert f"<td>{of_two.jain:.3f}</td>" in run_page.render([of_two], "two", [], "", run_page.Bound(None))
    assert "Jain" not in run_page.render([of_one], "one", [], "", run_page.Bound(None))


def test_weights_are_above_zero() -> None:
    with pytest.raises(DomainError, match="above 0"):
        EngineOptions(tenant_weights={"a": 0.0})
