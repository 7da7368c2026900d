"""Times and power of a model server."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.serving.model_server import LLAMA_70B, ModelServer
from lab.serving.profiled import for_prompts, kv_tokens, profiled_server
from services.core.domain.errors import DomainError
from services.core.policies.freesh.server_choice import PREFILL_BASE_TOKENS

PROFILE = {"max_qps": 2.61, "latency_s": 7.027, "ttft_ms": 195.58, "tbt_ms": 67.85}
"""FREESH's profile of class LS on two A100s, partition a."""


def profiled(**terms: float) -> ModelServer:
    values = {**PROFILE, "busy_w": 747.2, "idle_w": 700.0, "highest_clock_mhz": 1_410.0, **terms}
    return profiled_server(**values)


def test_a_profiled_server_does_at_its_capacity_what_the_profile_says() -> None:
    server = profiled()

    assert server.capacity == 18  # 2.61/s for 7.03 s
    assert server.step_s(18, 1_410) == pytest.approx(0.06785)
    assert server.step_s(1, 1_410) == pytest.approx(0.06785 / 1.17)
    assert server.prefill_s(5_000, 1_410) == pytest.approx(0.19558)


def test_times_and_power_follow_the_clock() -> None:
    server = profiled()

    assert server.slowdown(1_410) == 1
    assert server.slowdown(300) == pytest.approx(4.33, abs=0.01)  # Table 10: 122.68 / 28.19 = 4.35
    assert server.power_w(1_410, is_busy=True) == pytest.approx(747.2)
    assert server.power_w(300, is_busy=True) == pytest.approx(209, abs=1)  # appendix B.2: about 200 W
    assert server.power_w(300, is_busy=False) < server.power_w(300, is_busy=True)
    assert server.slowdown(10) == server.slowdown(300)
    assert server.slowdown(5_000) == 1


@given(st.floats(300, 1_400), st.floats(1, 60))
def test_a_higher_clock_is_faster_and_draws_more(clock: float, batch: float) -> None:
    server = profiled()

    assert server.step_s(batch, clock + 10) < server.step_s(batch, clock) < server.step_s(batch + 1, clock)
    assert server.power_w(clock + 10, is_busy=True) > server.power_w(clock, is_busy=True)


@pytest.mark.parametrize("wrong", [{"max_qps": 0.0}, {"tbt_ms": 0.0}, {"latency_s": float("nan")}, {"busy_w": -1.0}])
def test_a_profile_that_serves_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DomainError):
        profiled(**wrong)


def test_shares_and_clocks_have_ranges() -> None:
    for terms in ({"clock_share": 1.1}, {"lowest_clock_mhz": 2_000.0}, {"decode_base_s": 0.0}, {"capacity": 0}):
        with pytest.raises(DomainError):
            ModelServer(
                **{
                    "capacity": 1,
                    "prefill_base_s": 0,
                    "prefill_s_per_token": 0,
                    "decode_base_s": 0.1,
                    "decode_s_per_request": 0,
                    **terms,
                }
            )  # type: ignore[arg-type]


def test_prefills_by_length_take_the_profiles_time_at_the_mean() -> None:
    server = for_prompts(profiled(), 1_000)

    assert server.prefill_s(1_000, 1_410) == pytest.approx(0.19558)
    assert server.prefill_s(2_000, 1_410) / server.prefill_s(0, 1_410) == pytest.approx(2_212 / 212)
    assert server.step_s(18, 1_410) == profiled().step_s(18, 1_410)
    measured = [each.prefill_base_s / each.prefill_s_per_token for each in LLAMA_70B.values()]
    assert median(measured) == pytest.approx(PREFILL_BASE_TOKENS, abs=1)
    with pytest.raises(DomainError):
        for_prompts(profiled(), -1)


def test_memory_holds_what_the_weights_leave() -> None:
    """Two A100s of 80 GB with Llama-3-70B in 16 bits, 80 layers of 8 heads of 128 for keys and values."""
    per_token_kib = 2 * 80 * 8 * 128 * 2 / 1_024

    assert per_token_kib == 320
    assert kv_tokens(160, 131.4, per_token_kib) == pytest.approx((144 - 131.4) * 2**30 / (320 * 1_024))
    for memory, weights, kib in ((160, 144, 320), (160, 100, 0), (160, -1, 320), (float("nan"), 1, 320)):
        with pytest.raises(DomainError):
            kv_tokens(memory, weights, kib)


def test_a_request_fits_beside_others_or_alone() -> None:
    limited = replace(profiled(), kv_tokens=1_000)

    assert limited.has_memory(600, 400)
    assert not limited.has_memory(600, 401)
    assert limited.has_memory(0, 5_000)
    assert profiled().has_memory(1e9, 1e9)
