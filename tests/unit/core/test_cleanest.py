"""The cleanest server that answers in time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.policies.freesh.cleanest import cleanest_in_time, marginal_gco2_per_token, predicted_s


@dataclass(frozen=True)
class Stand:
    location: str = "here"
    held: int = 0
    room: int = 10
    gco2_per_token: float | None = 1.0
    ttft_s: float = 0.1
    tbt_s: float = 0.01


def test_the_cleanest_is_taken_while_it_is_in_time() -> None:
    near, clean = Stand("near", gco2_per_token=3.0), Stand("far", gco2_per_token=1.0)
    network_s = {"far": 0.5}
    assert cleanest_in_time([near, clean], 100, 2.0, network_s) is clean
    assert cleanest_in_time([near, clean], 100, 1.5, network_s) is near


def test_if_none_is_in_time_the_fastest_is_taken_however_dirty() -> None:
    dirty, clean = Stand(gco2_per_token=9.0, tbt_s=0.01), Stand(gco2_per_token=1.0, tbt_s=0.1)
    assert cleanest_in_time([dirty, clean], 100, 0.5, {}) is dirty


def test_a_server_without_room_is_not_taken() -> None:
    full, free = Stand(gco2_per_token=0.5, room=0), Stand(gco2_per_token=5.0)
    assert cleanest_in_time([full, free], 1, 10, {}) is free
    assert cleanest_in_time([full], 1, 10, {}) is None


def test_an_unknown_carbon_comes_after_a_known_one() -> None:
    unknown, known = Stand(gco2_per_token=None), Stand(gco2_per_token=100.0, held=9)
    assert cleanest_in_time([unknown, known], 1, 10, {}) is known
    assert cleanest_in_time([unknown], 1, 10, {}) is unknown


def test_servers_that_are_alike_share_the_load() -> None:
    busy, idle = Stand(gco2_per_token=1.0, held=5), Stand(gco2_per_token=1.04)
    assert cleanest_in_time([busy, idle], 1, 10, {}) is idle
    assert cleanest_in_time([busy, Stand(gco2_per_token=1.06)], 1, 10, {}) is busy


def test_below_zero_the_least_is_the_cleanest() -> None:
    gains, saves_more = Stand(gco2_per_token=-1.0), Stand(gco2_per_token=-2.0)
    assert cleanest_in_time([gains, saves_more], 1, 10, {}) is saves_more


def test_a_token_emits_what_it_draws_beyond_idle_power() -> None:
    # 300 W more for 100 tokens/s are 3 J a token; at 1.2 and 360 gCO2/kWh: 3 * 1.2 / 3.6e6 * 360.
    assert marginal_gco2_per_token(400, 100, 100, 360, 1.2) == pytest.approx(3.6e-4)
    assert marginal_gco2_per_token(400, 100, 0, 360, 1.2) is None
    assert marginal_gco2_per_token(400, 100, 100, -360, 1.2) == pytest.approx(-3.6e-4)


SERVERS = st.builds(
    Stand,
    location=st.sampled_from(["a", "b"]),
    held=st.integers(0, 20),
    room=st.integers(0, 5),
    gco2_per_token=st.none() | st.floats(-5, 5),
    ttft_s=st.floats(0, 2),
    tbt_s=st.floats(0, 0.1),
)


@given(st.lists(SERVERS, max_size=8), st.floats(0, 500), st.floats(0, 20))
def test_what_holds_for_every_choice(servers: list[Stand], tokens: float, limit_s: float) -> None:
    network_s = {"b": 0.3}
    chosen = cleanest_in_time(servers, tokens, limit_s, network_s)
    free = [each for each in servers if each.room > 0]
    in_time = [each for each in free if predicted_s(each, tokens, network_s) <= limit_s]
    assert (chosen is None) == (not free)
    if chosen is None:
        return
    if not in_time:
        assert predicted_s(chosen, tokens, network_s) == min(predicted_s(each, tokens, network_s) for each in free)
        return
    assert chosen in in_time
    known = [each.gco2_per_token for each in in_time if each.gco2_per_token is not None]
    if known:
        assert chosen.gco2_per_token is not None
        assert chosen.gco2_per_token <= min(known) + 0.05 * abs(min(known))
