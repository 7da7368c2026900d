"""What must hold over time, for every policy in the registry."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.policies.registry import POLICIES
from tests.support.builders import a_node, hourly_curve
from tests.support.harness import ACTIVE_EVERY_S, GRACE_S, Harness

DAILY = [300 + 150 * math.sin(2 * math.pi * hour / 24) for hour in range(24 * 30)]


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_job_of_a_random_day_ends_and_no_round_is_refused(name: str, data: st.DataObject) -> None:
    harness = Harness(name, nodes=[a_node("n0", gpus=4), a_node("n1", gpus=2)], curve=hourly_curve(DAILY))
    for at in range(data.draw(st.integers(1, 12))):
        low = data.draw(st.sampled_from([1, 1, 2, 6]))
        harness.submit(
            f"j{at}",
            work_s=data.draw(st.integers(60, 20_000)),
            at_s=data.draw(st.integers(0, 40_000)),
            min_gpus=low,
            max_gpus=low + data.draw(st.integers(0, 3)),
            scaling=data.draw(st.sampled_from([0.6, 0.9, 1.0])),
            gpu_power_w=data.draw(st.sampled_from([100.0, 300.0])),
        )

    harness.run_until_idle()

    assert harness.rejections == []


STARVATION_S = 4 * 3600.0


@pytest.mark.parametrize(
    ("name", "parameters", "bound_s"),
    [
        ("fifo", {}, 2 * 3600.0),
        ("green", {"starvation_s": STARVATION_S}, STARVATION_S),
        ("las", {"promote_knob": 4.0}, 4 * 3600.0),
    ],
)
@pytest.mark.parametrize("gang", [1, 4])
def test_nobody_starves_while_jobs_keep_arriving(
    name: str, parameters: dict[str, object], bound_s: float, gang: int
) -> None:
    harness = crowded(name, parameters, gang)

    harness.run(hours=40)

    long = harness.ended.get("long") or harness.jobs["long"]
    assert long.longest_wait_s <= bound_s + ACTIVE_EVERY_S + GRACE_S
    assert long.done_s > 2 * 3600


@pytest.mark.parametrize(("name", "parameters"), [("green", {"starvation_s": None}), ("las", {})])
def test_without_the_threshold_the_same_job_starves(name: str, parameters: dict[str, object]) -> None:
    harness = crowded(name, parameters, gang=4)

    harness.run(hours=40)

    assert harness.now_s - harness.jobs["long"].since_s > 2 * STARVATION_S


def crowded(name: str, parameters: dict[str, object], gang: int) -> Harness:
    """Return four GPUs with a long job and short ones that alone could fill them for two days."""
    harness = Harness(name, parameters, nodes=[a_node("n0", gpus=4)], curve=hourly_curve(DAILY))
    harness.submit("long", work_s=60 * 3600.0 * gang**0.9, min_gpus=gang)
    for at in range(400):
        harness.submit(f"short-{at:03d}", work_s=1500.0, at_s=60 + 420.0 * at)
    return harness
