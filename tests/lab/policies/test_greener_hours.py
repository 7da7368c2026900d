"""When policies that wait for greener hours start jobs, in several zones, and what they tell of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.core.cycle.run_cycle import run_cycle
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, a_job, a_snapshot, held, story
from tests.unit.core.test_expected_starts import CURVE, expected_h
from tests.unit.core.test_zones import HOUR_S, decided, two_zones


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [("ecovisor", {}), ("gaia", {"mean_length_s": HOUR_S}), ("wait-awhile", {"unknown_s": HOUR_S})],
)
def test_a_job_waits_for_the_hours_of_the_nodes_it_may_use(policy: str, parameters: dict[str, object]) -> None:
    """At noon zone 0 gets greener in two hours, and zone 1 is at its best."""
    jobs = [a_job(f"{model}", models=(model,), submitted_s=NOON_S) for model in ("A100", "V100")]

    assert story(decided(policy, two_zones(*jobs), parameters)) == {"A100": "hold greener_hours", "V100": "start n1:0"}


@pytest.mark.parametrize(
    ("name", "parameters", "deadline_h", "start_h"),
    [
        pytest.param("gaia", {"mean_length_s": HOUR_S}, np.inf, 1.0, id="the start that was planned"),
        pytest.param("wait-awhile", {"unknown_s": HOUR_S}, 4.0, 1.0, id="the greenest hour before the deadline"),
        pytest.param("wait-awhile", {"unknown_s": HOUR_S}, 6.0, None, id="hours beyond the forecast may be greener"),
        pytest.param("ecovisor", {"percentile": 4.0, "longest_wait_s": 6 * HOUR_S}, np.inf, 5.0, id="at the latest"),
        pytest.param("ecovisor", {"percentile": 4.0, "longest_wait_s": None}, np.inf, None, id="nobody knows"),
    ],
)
def test_jobs_that_wait_for_greener_hours_are_told_when_they_come(
    name: str, parameters: dict[str, Any], deadline_h: float, start_h: float | None
) -> None:
    policy, deadline_s = build_policy(name, parameters), NOON_S + deadline_h * HOUR_S
    submitted_s = NOON_S if name == "gaia" else NOON_S - HOUR_S
    snapshot = a_snapshot([a_job("a", submitted_s=submitted_s, deadline_s=deadline_s)], curve=CURVE)
    plan = run_cycle(policy, snapshot, policy.initial()).plan

    assert held(plan) == {"a": "greener_hours"}
    assert expected_h(plan) == {"a": start_h}
