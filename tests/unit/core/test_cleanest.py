"""The cleanest server that answers in time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.policies.freesh.cleanest import cleanest_in_time, emissions, marginal_j, predicted_s


@dataclass(frozen=True)
class Stand:
    location: str = "here"
    held: int = 0
    room: int = 10
    gco2: float | None = 1.0
    ttft_s: float = 0.1
    tbt_s: float = 0.01


def chosen_of(servers: list[Stand], tokens: float, limit_s: float, network_s: dict[str, float]) -> Stand | None:
    return cleanest_in_time(servers, lambda each: each.gco2, tokens, limit_s, network_s)


def test_the_cleanest_is_taken_while_it_is_in_time() -> None:
    near, clean = Stand("near", gco2=3.0), Stand("far", gco2=1.0)
    network_s = {"far": 0.5}
    assert chosen_of([near, clean], 100, 2.0, network_s) is clean
    assert chosen_of([near, clean], 100, 1.5, network_s) is near


def test_if_none_is_in_time_the_fastest_is_taken_however_dirty() -> None:
    dirty, clean = Stand(gco2=9.0, tbt_s=0.01), Stand(gco2=1.0, tbt_s=0.1)
    assert chosen_of([dirty, clean], 100, 0.5, {}) is dirty


def test_a_server_without_room_is_not_taken() -> None:
    full, free = Stand(gco2=0.5, room=0), Stand(gco2=5.0)
    assert chosen_of([full, free], 1, 10, {}) is free
    assert chosen_of([full], 1, 10, {}) is None


def test_an_unknown_carbon_comes_after_a_known_one() -> None:
    unknown, known = Stand(gco2=None), Stand(gco2=100.0, held=9)
    assert chosen_of([unknown, known], 1, 10, {}) is known
    assert chosen_of([unknown], 1, 10, {}) is unknown


def test_servers_that_are_alike_share_the_load() -> None:
    busy, idle = Stand(gco2=1.0, held=5), Stand(gco2=1.04)
    assert chosen_of([busy, idle], 1, 10, {}) is idle
    assert chosen_of([busy, Stand(gco2=1.06)], 1, 10, {}) is busy


def test_below_zero_the_least_is_the_cleanest() -> None:
    gains, saves_more = Stand(gco2=-1.0), Stand(gco2=-2.0)
    assert chosen_of([gains, saves_more], 1, 10, {}) is saves_more


@pytest.mark.parametrize(
    ("power_w", "idle_w", "per_s", "expected"),
    [(400, 100, 100, 3.0), (400, 100, 0, None), (100, 100, 5, None), (50, 100, 5, None)],
)
def test_what_a_request_adds_is_drawn_beyond_idle_power(
    power_w: float, idle_w: float, per_s: float, expected: float | None
) -> None:
    assert marginal_j(power_w, idle_w, per_s) == expected


@dataclass(frozen=True)
class Site:
    id: str
    gco2_per_kwh: float | None = 100.0
    request_j: float | None = None
    request_class: str | None = None


def test_one_class_whose_profiles_are_known_is_compared_by_what_a_request_adds() -> None:
    small, large = Site("small", 300.0, 1_200.0, "SS"), Site("large", 100.0, 7_200.0, "SS")
    assert emissions([small, large]) == pytest.approx({"small": 0.1, "large": 0.2})
    assert emissions([small, large, Site("dark", None)]) == pytest.approx({"small": 0.1, "large": 0.2})


@pytest.mark.parametrize(
    "other", [Site("other", 200.0, None, "SS"), Site("other", 200.0, 9_000.0, "LL"), Site("other", 200.0)]
)
def test_what_a_request_adds_is_not_compared_with_what_is_unknown_or_of_another_class(other: Site) -> None:
    assert emissions([Site("one", 300.0, 36.0, "SS"), other]) == {"one": 300.0, "other": 200.0}


def test_below_zero_too_more_intensity_is_more_emission() -> None:
    found = emissions([Site("a", -50.0, 100.0, "SS"), Site("b", 50.0, 100.0, "SS")])
    assert found["a"] < 0 < found["b"]


SERVERS = st.builds(
    Stand,
    location=st.sampled_from(["a", "b"]),
    held=st.integers(0, 20),
    room=st.integers(0, 5),
    gco2=st.none() | st.floats(-5, 5),
    ttft_s=st.floats(0, 2),
    tbt_s=st.floats(0, 0.1),
)


@given(st.lists(SERVERS, max_size=8), st.floats(0, 500), st.floats(0, 20))
def test_what_holds_for_every_choice(servers: list[Stand], tokens: float, limit_s: float) -> None:
    network_s = {"b": 0.3}
    chosen = chosen_of(servers, tokens, limit_s, network_s)
    free = [each for each in servers if each.room > 0]
    in_time = [each for each in free if predicted_s(each, tokens, network_s) <= limit_s]
    assert (chosen is None) == (not free)
    if chosen is None:
        return
    if not in_time:
        assert predicted_s(chosen, tokens, network_s) == min(predicted_s(each, tokens, network_s) for each in free)
        return
    assert chosen in in_time
    known = [each.gco2 for each in in_time if each.gco2 is not None]
    if known:
        assert chosen.gco2 is not None
        assert chosen.gco2 <= min(known) + 0.05 * abs(min(known))
