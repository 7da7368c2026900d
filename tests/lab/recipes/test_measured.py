"""The measured models: what the tables say of them, and that the product has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.recipes.measured import Assumed, dynamic_fraction, for_the_product, profile
from lab.recipes.measured import tuning_profile as made
from services.core.domain.gpus import GPU_MODELS
from services.simulator.recipes.measured import FILE, KINDS, tuning_profile
from services.simulator.workload import Behaviour


def test_the_file_of_the_product_is_made_from_the_tables() -> None:
    with np.load(FILE) as stored:
        found = for_the_product()
        assert set(stored) == set(found)
        for name, values in found.items():
            np.testing.assert_allclose(stored[name], values, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(("model", "batch"), KINDS)
def test_the_product_reads_the_models_as_they_are_made(model: str, batch: int) -> None:
    def columns(behaviour: Behaviour | None) -> list[Any]:
        assert behaviour is not None
        curves = [getattr(curve, name) for curve in behaviour.controls.values() for name in vars(curve)]
        of_gang = (behaviour.speed, behaviour.gpu_power_w, behaviour.spread_speed, behaviour.spread_power_w)
        return [behaviour.gpus, *of_gang, behaviour.batches, *curves]

    read, own = tuning_profile(model, batch), made(model, batch, batch)
    assert (read.name, read.batch_range, read.slice_speeds) == (own.name, own.batch_range, own.slice_speeds)
    assert read.host_power_w == own.host_power_w
    assert read.adaptive is not None
    assert own.adaptive is not None
    for board in (*GPU_MODELS, "a board that nobody knows"):
        pairs = [(read.truth(board), own.truth(board)), *zip(read.adaptive(board), own.adaptive(board), strict=True)]
        assert len(pairs) == 11
        for found, wanted in pairs:
            for one, other in zip(columns(found), columns(wanted), strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    np.testing.assert_allclose(one, other, rtol=1e-12)


def test_power_follows_the_measured_fraction() -> None:
    assert dynamic_fraction("shufflenet", 64) == pytest.approx((90.8 - 36) / 214, abs=0.001)
    assert dynamic_fraction("resnet50", 115) == pytest.approx((223 - 36) / 214, abs=0.02)
    assert dynamic_fraction("gpt2", 4) == pytest.approx((502.1 - 83.8) / 616.2, abs=0.001)


def test_fast_links_change_speed_ups_and_leave_one_gpu_as_it_is() -> None:
    fast, own = (profile("bert", 4, Assumed(fast_links=links)).true["RTX3090"] for links in (True, False))
    a100 = profile("bert", 4).true["A100-SXM4-40GB"]

    assert (fast.speed[0], fast.gpu_power_w[0]) == (own.speed[0], own.gpu_power_w[0])
    assert fast.speed[1] == pytest.approx(float(a100.speed[1] / a100.speed[0]))
    assert fast.speed[1] > own.speed[1]
