"""Which server answers: what it takes and adds there, and what holds whatever the servers and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.core.policies.freesh.server_choice import (
    ADAPTER_S,
    ALIKE,
    BALANCE_REQUESTS,
    BALANCE_SHARE,
    EnergyProfile,
    Given,
    ServerCosts,
    Work,
    added_carbon,
    choose_server,
    energy_profile,
    even,
    with_accuracy,
)
from tests.support.server_choice import plain_carbon, plain_choice

WORK = Work(800, 100.0)
PROFILE = EnergyProfile(slot_w=10.0, read_s=0.001, token_s=0.05)


@dataclass
class Stand:
    gco2_per_kwh: float | None = 100.0
    location: str = "here"
    limit: int = 64
    energy: EnergyProfile | None = None
    accuracy_pct: float | None = None
    costs: ServerCosts = field(default_factory=lambda: ServerCosts(0.2, 0.03))

    def holding(self, *works: Work, now_s: float = -1e9) -> Stand:
        """Return it with requests that it has read long ago."""
        for work in works:
            self.costs.begin(work, now_s)
        return self


def end_s(each: Stand | ServerCosts, work: Work, now_s: float = 0.0) -> float:
    costs = each if isinstance(each, ServerCosts) else each.costs
    return costs.end_s(work, now_s, costs.cached_tokens(work))


def chosen(servers: Sequence[Stand], work: Work = WORK, limit_s: float = 30.0, **away_s: float) -> Stand | None:
    return choose_server(servers, work, limit_s, 0.0, away_s)


def test_the_cleanest_is_taken_while_it_is_in_time() -> None:
    near, clean = Stand(300.0, "near"), Stand(100.0, "far")
    assert chosen([near, clean], limit_s=4.0, far=0.5) is clean
    assert chosen([near, clean], limit_s=3.5, far=0.5) is near


def test_a_clean_server_is_left_once_what_it_holds_makes_it_late() -> None:
    dirty, clean = Stand(300.0), Stand(100.0)
    assert chosen([dirty, clean], limit_s=5.0) is clean
    clean.costs.begin(Work(10_000, 10.0), 0.0)
    assert chosen([dirty, clean], limit_s=5.0) is dirty, "the prompt that it reads takes 2 s"
    assert chosen([dirty, clean], limit_s=9.0) is clean


def test_if_none_is_in_time_the_first_to_answer_is_taken_however_dirty() -> None:
    dirty, clean = Stand(900.0), Stand(100.0, costs=ServerCosts(0.2, 0.3))
    assert chosen([dirty, clean], limit_s=0.5) is dirty


def test_an_unknown_intensity_comes_after_a_known_one_and_nothing_is_chosen_of_nothing() -> None:
    unknown, known = Stand(None), Stand(900.0).holding(*[WORK] * 9)
    assert chosen([unknown, known]) is known
    assert chosen([unknown]) is unknown
    assert chosen([unknown, Stand(None)]) is unknown
    assert chosen([]) is None


def test_servers_that_are_alike_share_the_load() -> None:
    busy, idle = Stand(100.0).holding(*[WORK] * 5), Stand(104.0)
    assert chosen([busy, idle]) is idle
    assert chosen([busy, Stand(106.0)]) is busy


def test_below_zero_the_least_is_the_cleanest() -> None:
    gains, saves_more = Stand(-10.0), Stand(-20.0)
    assert chosen([gains, saves_more]) is saves_more
    frugal = Stand(-20.0, energy=PROFILE)
    assert chosen([frugal, Stand(-20.0, energy=PROFILE._replace(slot_w=20.0))]) is not frugal


def test_a_prompt_that_is_cached_is_worth_the_time_to_read_it() -> None:
    history = Work(8_000, 100.0, tuple(range(62)))
    has_it, empty = Stand().holding(history), Stand()
    again = history._replace(input_tokens=8_200)
    saved_s = end_s(empty, again) - end_s(has_it, again)
    assert saved_s == pytest.approx(62 * 128 * 0.0002, rel=0.2)
    assert chosen([empty, has_it], again) is has_it
    has_it.costs.begin(Work(9_000, 10.0), 0.0)
    assert chosen([empty, has_it], again) is empty, "to wait there takes longer"


def test_a_session_goes_on_where_it_was_and_an_adapter_where_it_is_loaded() -> None:
    one, two = Stand(), Stand()
    of_session = Work(8_000, 100.0, session="s")
    with_adapter = Work(100, 10.0, adapter="german")
    one.costs.end(one.costs.begin(of_session, -100.0))
    two.costs.end(two.costs.begin(with_adapter, -100.0))
    assert [chosen([two, one], of_session), chosen([one, two], with_adapter)] == [one, two]
    assert end_s(one, with_adapter) - end_s(two, with_adapter) == pytest.approx(ADAPTER_S)
    for number in range(4):
        two.costs.begin(Work(1, 1.0, adapter=f"other {number}"), -100.0)
    assert chosen([one, two], with_adapter) is one, "the oldest adapter has given way"


def test_what_a_server_says_of_itself_counts() -> None:
    quiet, others = Stand(), Stand()
    others.costs.tell(held=0, running=4, queued=2, kv_use=0.5)
    assert end_s(others, WORK) > 1.5 * end_s(quiet, WORK)
    assert chosen([others, quiet]) is quiet
    others.costs.tell(held=4, running=4, queued=0, kv_use=0.99)
    assert end_s(others, WORK) == pytest.approx(1.25 * end_s(quiet, WORK)), "its memory is full"
    others.costs.tell(held=4, running=4, queued=0, kv_use=0.5)
    assert end_s(others, WORK) == end_s(quiet, WORK), "all of it is ours"


def test_what_a_profile_says_of_energy() -> None:
    found = energy_profile(700.0, 300.0, 2.0, 10.0, 0.5, 0.05)
    assert found == EnergyProfile(20.0, 0.0005, 0.05)
    assert found is not None
    assert found.added_j(Work(788, 190.0)) == pytest.approx(20.0 * (0.5 + 9.5)), "700 - 300 W, divided by 2 a second"
    assert energy_profile(700.0, None, 2.0, 10.0, 0.5, 0.05) == EnergyProfile(21.0, 0.0005, 0.05)
    assert energy_profile(300.0, 300.0, 2.0, 10.0, 0.5, 0.05) is None
    assert energy_profile(700.0, 300.0, 0.0, 10.0, 0.5, 0.05) is None
    assert energy_profile(700.0, 300.0, 2.0, None, 0.5, 0.05) is None


def test_carbon_is_compared_in_one_unit() -> None:
    frugal, hungry = Stand(300.0, energy=PROFILE), Stand(200.0, energy=PROFILE._replace(slot_w=20.0))
    grams = 10.0 * (1_012 * 0.001 + 5.0) / 3.6e6 * 300.0
    assert added_carbon([frugal, hungry], WORK) == pytest.approx([grams, grams * 4 / 3])
    assert added_carbon([frugal, hungry, Stand(250.0)], WORK) == [300.0, 200.0, 250.0]
    dark = added_carbon([frugal, hungry, Stand(None)], WORK)
    assert dark[:2] == pytest.approx([grams, grams * 4 / 3]), "what has no intensity changes no unit"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_servers_pace_is_learned_whatever_it_holds_meanwhile(is_stream: bool) -> None:
    for beside in (0, 20):
        costs = Stand().holding(*[WORK] * beside).costs
        for at in range(200):
            given = costs.begin(WORK, 1e3 * at)
            first_s = 2.0 if is_stream else None
            step_s = 0.06 * (1 + 0.01 * beside * WORK.tokens / 1_300)
            costs.learn(given, first_s, (2.0 if is_stream else given.first_s) + 99 * step_s, 100)
            costs.end(given)
        assert costs.token_s == pytest.approx(0.06, rel=0.02)
        assert costs.read_s == pytest.approx(2.0 / 1_012 if is_stream else 0.0002, rel=0.01)
    costs.fade()
    before_s = costs.token_s
    costs.fade()
    assert costs.token_s == before_s, "it holds requests"
    idle = ServerCosts(0.2, 0.03)
    idle.token_s = 1.0
    for _ in range(60):
        idle.fade()
    assert idle.token_s == pytest.approx(0.03, rel=0.1)


def test_a_server_that_reads_sooner_than_predicted_has_less_to_read() -> None:
    costs = ServerCosts(0.2, 0.03)
    given_all = [costs.begin(Work(9_788, 0.0), 0.0) for _ in range(5)]
    lone_s = 2.0
    assert end_s(costs, given_all[0].work, 0.0) == pytest.approx(6 * lone_s)
    costs.has_read(given_all[2], 1.0)
    assert end_s(costs, given_all[0].work, 1.0) == pytest.approx(3 * lone_s)
    costs.has_read(given_all[0], 1.5)
    assert end_s(costs, given_all[0].work, 1.5) == pytest.approx(2.5 * lone_s + 0.5), "it was read before the third"
    costs.has_read(given_all[4], 50.0)
    assert end_s(costs, given_all[0].work, 50.0) == pytest.approx(lone_s)
    assert costs.begin(given_all[0].work, 50.0).first_s == pytest.approx(lone_s)


STEPS = st.tuples(st.sampled_from("bbbeer"), st.integers(1, 6), st.sampled_from([0.0, 0.1, 0.3, 2.0]))


@example([("b", 1, 0.0), ("b", 1, 0.0), ("b", 1, 0.0), ("r", 3, 0.1), ("e", 2, 0.0)])
@given(st.lists(STEPS, min_size=4, max_size=20))
def test_what_ends_unread_leaves_nothing_behind(steps: list[tuple[str, int, float]]) -> None:
    """The state is that of a server which was only ever given the requests that it holds or has read."""
    costs, given_all = ServerCosts(0.2, 0.03), list[Given]()
    done, began, read, held = list[tuple[str, int, float]](), 0, set[int](), list[int]()
    unread_ends, now_s = set[int](), 0.0
    for what, which, pause_s in steps:
        now_s += pause_s
        if what == "b":
            given_all.append(costs.begin(Work(5_000 * which, 100.0), now_s))
            done.append(("b", began, now_s))
            held.append(began)
            began += 1
        elif held:
            at = held[which % len(held)]
            done.append((what, at, now_s))
            if what == "r":
                costs.has_read(given_all[at], now_s)
                read |= set(range(at + 1))
            else:
                costs.end(given_all[at])
                held.remove(at)
                unread_ends |= {at} - read
    alone, again = ServerCosts(0.2, 0.03), dict[int, Given]()
    for what, at, at_s in done:
        if at in unread_ends:
            continue
        if what == "b":
            again[at] = alone.begin(given_all[at].work, at_s)
        elif what == "r":
            alone.has_read(again[at], at_s)
        else:
            alone.end(again[at])
    assert costs.load_tokens == alone.load_tokens
    assert end_s(costs, WORK, now_s) == pytest.approx(end_s(alone, WORK, now_s))
    for at, each in again.items():
        if at in held and at not in read:
            assert given_all[at].first_s == pytest.approx(each.first_s)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5), st.floats(0, 100), st.floats(0.1, 50), st.floats(0, 900))
def test_a_less_accurate_server_never_looks_better_than_an_equal_one_and_its_worth_grows_with_the_grid(
    accuracies: list[float], least: float, point: float, rate: float
) -> None:
    servers = [Stand(rate, energy=PROFILE, accuracy_pct=each) for each in [*accuracies, least]]
    found = with_accuracy(servers, WORK, added_carbon(servers, WORK), point)
    for one, adds in zip(servers, found, strict=True):
        assert all(
            adds <= more
            for other, more in zip(servers, found, strict=True)
            if (other.accuracy_pct or 0.0) <= (one.accuracy_pct or 0.0)
        )
    saving = replace(servers[0], energy=PROFILE._replace(slot_w=0.1 * PROFILE.slot_w), accuracy_pct=60.0)
    best = replace(servers[0], accuracy_pct=70.0)
    is_small = chosen_with_worth([best, saving], point) is saving
    threshold = 10.0 * point / 0.9  # (E - 0.1 E) x intensity = 10 points x their worth x E
    assert is_small == (rate > threshold) or abs(rate - threshold) <= 0.1 * threshold


def chosen_with_worth(servers: Sequence[Stand], point: float) -> Stand | None:
    return choose_server(servers, WORK, 30.0, 0.0, {}, point)


def test_what_was_seen_of_two_equal_servers_prefers_none_and_twice_as_fast_does() -> None:
    history = Work(500, 100.0, (1, 2, 3))
    has_it = Stand()
    has_it.costs.end(has_it.costs.begin(history, -1e9))
    assert chosen([Stand(costs=ServerCosts(0.17, 0.026)), has_it], history) is has_it
    assert chosen([Stand(costs=ServerCosts(0.2, 0.015)), has_it], history) is not has_it


SYSTEM = tuple(range(1, 230))
"""The blocks of a system prompt of some 29,000 tokens."""


@pytest.mark.parametrize("blocks", [(), SYSTEM[:2], SYSTEM])
@pytest.mark.parametrize("pause_s", [0.0, 0.05, 30.0])
def test_one_system_prompt_is_spread_over_equal_servers(blocks: tuple[int, ...], pause_s: float) -> None:
    servers = [Stand() for _ in range(3)]
    servers[0].costs.end(servers[0].costs.begin(Work(30_000, 10.0, SYSTEM), -1e6))
    held = [0, 0, 0]
    for number in range(45):
        work = Work(128 * len(blocks) + 100, 200.0, blocks)
        found = choose_server(servers, work, 60.0, number * pause_s, {})
        at = next(at for at, each in enumerate(servers) if each is found)
        servers[at].costs.begin(work, number * pause_s)
        held[at] += 1
    assert max(held) - min(held) <= BALANCE_SHARE * min(held) + BALANCE_REQUESTS + 1, held
    if len(blocks) < 9:
        assert held == pytest.approx([15] * 3, abs=1)


WORKS = st.builds(
    Work,
    st.integers(0, 20_000),
    st.floats(0, 2_000),
    st.text("01", max_size=6).map(lambda path: tuple(int("1" + path[:at], 2) for at in range(len(path)))),
    st.none() | st.integers(0, 2),
    st.none() | st.sampled_from(["a", "b"]),
    st.floats(0, 4_000),
)


@st.composite
def costs_of(draw: st.DrawFn) -> ServerCosts:
    costs = ServerCosts(draw(st.floats(0.01, 2)), draw(st.floats(0.005, 0.2)))
    for work in draw(st.lists(WORKS, max_size=5)):
        costs.begin(work, draw(st.floats(-60, 0)))
    costs.tell(0, draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.floats(0, 1)))
    return costs


STANDS = st.builds(
    Stand,
    st.none() | st.floats(-50, 900),
    st.sampled_from(["a", "b"]),
    st.integers(1, 64),
    st.none() | st.builds(EnergyProfile, st.floats(0.1, 50), st.floats(1e-5, 1e-3), st.floats(0.01, 0.2)),
    costs_of(),
)


RATES = st.none() | st.sampled_from([-20.0, 0.0, 100.0, 104.0, 106.0, 300.0])
ALIKE_STANDS = st.builds(Stand, RATES, st.sampled_from(["a", "b"]), st.sampled_from([8, 64]), energy=st.just(PROFILE))


class Compared(float):
    """An intensity that counts how often one is compared."""

    times = 0

    def __lt__(self, other: float) -> bool:
        Compared.times += 1
        return super().__lt__(other)

    def __le__(self, other: float) -> bool:
        Compared.times += 1
        return super().__le__(other)


def test_a_choice_where_none_is_in_time_takes_no_comparison_of_each_server_with_each() -> None:
    def compared(count: int) -> int:
        servers = [Stand(Compared(7 * at % count), "ab"[at % 2]) for at in range(count)]
        Compared.times = 0
        assert chosen(servers, limit_s=0.0, b=0.1) is servers[0]
        return Compared.times

    assert compared(1_000) < 20 * compared(100)


@given(
    st.lists(STANDS | ALIKE_STANDS, max_size=8) | st.lists(ALIKE_STANDS, max_size=8),
    st.lists(st.tuples(WORKS, st.floats(0, 5), st.floats(0, 30), st.booleans(), st.booleans()), max_size=12),
    st.sampled_from([{}, {"b": 0.3}, {"a": 0.1, "b": 0.1}]),
)
def test_the_quick_choice_is_the_plain_one_whatever_happened_before(
    servers: list[Stand], steps: list[tuple[Work, float, float, bool, bool]], away_s: dict[str, float]
) -> None:
    now_s, given_all = 0.0, list[tuple[Stand, Given]]()
    for work, pause_s, limit_s, ends, tells in steps:
        now_s += pause_s
        assert added_carbon(servers, work) == plain_carbon(servers, work)
        found = choose_server(servers, work, limit_s, now_s, away_s)
        assert found is plain_choice(servers, work, limit_s, now_s, away_s)
        if found is None:
            continue
        given_all.append((found, found.costs.begin(work, now_s)))
        if ends:
            server, oldest = given_all.pop(0)
            server.costs.has_read(oldest, now_s)
            server.costs.learn(oldest, None, now_s - oldest.at_s + 0.5, oldest.work.output_tokens)
            server.costs.end(oldest)
        if tells:
            servers[0].costs.tell(len(given_all), work.input_tokens % 7, work.input_tokens % 3, 0.5)
            servers[-1].costs.fade()


@given(st.lists(STANDS, min_size=1, max_size=6), WORKS, st.floats(0, 60), WORKS, st.data())
def test_more_load_makes_no_server_look_cleaner_or_be_chosen(
    servers: list[Stand], work: Work, limit_s: float, more: Work, data: st.DataObject
) -> None:
    before, carbon = chosen(servers, work, limit_s, b=0.3), added_carbon(servers, work)
    loaded = data.draw(st.sampled_from(servers))
    loaded.costs.begin(more._replace(blocks=(), session=None, adapter=None), 0.0)
    assert added_carbon(servers, work) == carbon
    after = chosen(servers, work, limit_s, b=0.3)
    assert after is not loaded or before is loaded


@given(st.lists(STANDS, min_size=1, max_size=6), WORKS, st.floats(0, 60))
def test_none_that_is_as_good_and_clearly_less_full_is_passed_over(
    servers: list[Stand], work: Work, limit_s: float
) -> None:
    found = chosen(servers, work, limit_s, b=0.3)
    assert found is not None
    carbon = {id(each): adds for each, adds in zip(servers, added_carbon(servers, work), strict=True)}
    pace_s = dict(zip(map(id, servers), even([each.costs.token_s for each in servers]), strict=True))
    away_s = {"a": 0.0, "b": 0.3}
    for other in servers:
        if carbon[id(other)] <= carbon[id(found)] and away_s[other.location] <= away_s[found.location]:
            ours, others = ((each.costs.held_tokens + each.costs.others_tokens) / each.limit for each in (found, other))
            spare = BALANCE_REQUESTS * work.tokens / found.limit
            assert ours * pace_s[id(found)] <= pace_s[id(other)] * (1 + BALANCE_SHARE) * others + (
                spare * pace_s[id(found)] + 1e-9
            )


@given(st.lists(WORKS, min_size=1, max_size=40), st.integers(2, 5), st.floats(0, 5), st.floats(0, 60))
def test_equal_servers_stay_balanced_whatever_the_prompts(
    works: list[Work], count: int, pause_s: float, limit_s: float
) -> None:
    servers = [Stand() for _ in range(count)]
    for number, work in enumerate(works):
        found = choose_server(servers, work, limit_s, number * pause_s, {})
        assert found is not None
        least = min(each.costs.held_tokens for each in servers)
        assert found.costs.held_tokens <= (1 + BALANCE_SHARE) * least + BALANCE_REQUESTS * work.tokens
        found.costs.begin(work, number * pause_s)


@given(st.lists(st.floats(-50, 900), min_size=1, max_size=6), WORKS, costs_of(), st.booleans())
def test_intensity_decides_where_all_else_is_equal(
    rates: list[float], work: Work, costs: ServerCosts, has_profile: bool
) -> None:
    servers = [Stand(rate, energy=PROFILE if has_profile else None, costs=costs) for rate in rates]
    found = chosen(servers, work, 1e9)
    assert found is not None
    assert found.gco2_per_kwh is not None
    assert found.gco2_per_kwh <= min(rates) + ALIKE * abs(min(rates)) + 1e-9


@given(st.lists(STANDS, min_size=2, max_size=6), WORKS)
def test_no_order_depends_on_who_states_a_profile(servers: list[Stand], work: Work) -> None:
    servers.append(Stand(500.0))
    plain = [replace(each, energy=None) for each in servers]
    assert added_carbon(servers, work) == added_carbon(plain, work)


@given(st.lists(WORKS, max_size=12))
def test_what_is_given_and_ended_leaves_nothing(works: list[Work]) -> None:
    costs = ServerCosts()
    given_all: list[Given] = [costs.begin(each, 0.0) for each in works]
    for each in given_all:
        costs.end(each)
    assert costs.held_tokens == 0
