"""What holds for every allocation of PowerFlow: devices, whole gangs, the limit, and more for a higher limit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.core.policies.powerflow.config import PowerflowConfig
from tests.support.powerflow import IDLE_W, greedily, random_choices

seeds = st.integers(0, 2**32 - 1)
configs = st.builds(
    PowerflowConfig,
    marginal=st.sampled_from(["energy", "energy_and_gpu", "power"]),
    queue=st.sampled_from(["submitted", "shortest"]),
    at_limit=st.sampled_from(["stop", "skip"]),
)


@given(seeds, st.integers(0, 12), st.integers(1, 40), st.floats(0.0, 1.2), configs)
def test_gangs_are_whole_powers_of_two_within_devices_and_limit(
    seed: int, n_jobs: int, gpus: int, share: float, config: PowerflowConfig
) -> None:
    rng = np.random.default_rng(seed)
    choices, work_s = random_choices(rng, n_jobs), rng.lognormal(8.0, 2.0, n_jobs)
    limit_w = gpus * (IDLE_W + share * 350.0)

    given_out = greedily(choices, work_s, gpus, limit_w, config)

    assert given_out.gpus.sum() <= gpus
    assert given_out.power_w <= limit_w * (1 + 1e-9)
    assert all(size.bit_count() <= 1 and size <= 8 for size in given_out.gpus.tolist())
    assert ((given_out.settings >= 0) == (given_out.gpus > 0)).all()
    again = greedily(choices, work_s, gpus, limit_w, config)
    assert (again.gpus == given_out.gpus).all()
    assert (again.settings == given_out.settings).all()


@given(seeds, st.integers(1, 12), st.integers(1, 40), st.tuples(st.floats(0.0, 1.2), st.floats(0.0, 1.2)))
def test_a_higher_limit_takes_no_gpu_from_anybody(
    seed: int, n_jobs: int, gpus: int, shares: tuple[float, float]
) -> None:
    """As printed, the allocation is a prefix of one order of steps, where each job alone is within the limit."""
    rng = np.random.default_rng(seed)
    choices, work_s = random_choices(rng, n_jobs), rng.lognormal(8.0, 2.0, n_jobs)
    low, high = (400.0 + gpus * (IDLE_W + share * 350.0) for share in sorted(shares))

    less, more = (greedily(choices, work_s, gpus, limit_w).gpus for limit_w in (low, high))

    assert (more >= less).all()
