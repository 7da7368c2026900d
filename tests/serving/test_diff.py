"""What is to change so that a pool is as planned: for any plan and any instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.contracts.serving import InstanceState
from services.serving.controller.diff import STAYING, Combination, Difference, Member, Target, diff, recalled

READY, STARTING, WANTED = STAYING
HERE: Combination = ("here", "one")

combinations = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["one", "two"]))
classes = st.sampled_from([None, "SS", "SL", "LS"])
targets = st.dictionaries(combinations, st.dictionaries(classes, st.integers(0, 3), max_size=4), max_size=4)


@st.composite
def standings(draw: st.DrawFn) -> list[Member]:
    each = st.builds(
        Member,
        *(st.just(""), combinations, classes, st.sampled_from(STAYING), st.booleans()),
        st.integers(0, 5).map(float),
    )
    return [replace(found, id=str(index)) for index, found in enumerate(draw(st.lists(each, max_size=12)))]


def applied(members: Sequence[Member], changes: Difference) -> list[Member]:
    made = [Member(f"new-{n}", at, name, WANTED, True, 0.0) for n, (at, name) in enumerate(changes.make)]
    return made + [
        replace(each, request_class=changes.reassign.get(each.id, each.request_class))
        for each in members
        if each.id not in changes.leave
    ]


def an_instance(
    name: str, *, state: InstanceState = READY, of: str | None = "SS", up_s: float = 0, is_current: bool = True
) -> Member:
    return Member(name, HERE, of, state, is_current, up_s)


@given(targets, standings(), st.sets(combinations))
def test_applied_again_it_changes_nothing(target: Target, members: list[Member], backing_off: set[Combination]) -> None:
    changes = diff(target, members, backing_off)
    again = diff(target, applied(members, changes), backing_off)
    assert again == Difference(make=(), wait=changes.wait, reassign={}, leave=())


@given(targets, standings())
def test_then_every_class_has_its_instances(target: Target, members: list[Member]) -> None:
    after = applied(members, diff(target, members))
    assert all(each.is_current for each in after)
    have = Counter((each.at, each.request_class) for each in after)
    for at, counts in target.items():
        assert all(have[at, name] == count for name, count in counts.items() if name is not None)
        assert have[at, None] <= counts.get(None, 0)
    assert {each.at for each in after} <= {at for at, counts in target.items() if any(counts.values())}


@given(targets, standings(), st.sets(combinations))
def test_backing_off_only_delays_what_would_be_made(
    target: Target, members: list[Member], backing_off: set[Combination]
) -> None:
    free, held = diff(target, members), diff(target, members, backing_off)
    assert sorted(held.make + held.wait) == sorted(free.make)
    assert {at for at, _ in held.wait} <= backing_off
    assert not {at for at, _ in held.make} & backing_off
    assert (held.reassign, held.leave) == (free.reassign, free.leave)


@given(targets, standings(), st.randoms())
def test_the_order_of_the_rows_does_not_matter(target: Target, members: list[Member], random: object) -> None:
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert diff(target, shuffled) == diff(target, members)


@given(targets, standings())
def test_as_many_as_possible_keep_their_class(target: Target, members: list[Member]) -> None:
    changes = diff(target, members)
    stay = [each for each in members if each.id not in changes.leave]
    for at in {each.at for each in stay}:
        before = Counter(each.request_class for each in stay if each.at == at)
        kept = Counter(each.request_class for each in stay if each.at == at and each.id not in changes.reassign)
        for name, count in target.get(at, {}).items():
            if name is not None:
                assert kept[name] == min(before[name], count)


def test_an_instance_goes_on_for_another_class() -> None:
    changes = diff({HERE: {"LL": 1}}, [an_instance("i")])
    assert changes == Difference(make=(), wait=(), reassign={"i": "LL"}, leave=())


def test_one_that_is_only_kept_serves_before_another_is_made() -> None:
    changes = diff({HERE: {"SS": 1, None: 1}}, [an_instance("i", of=None)])
    assert changes == Difference(make=(), wait=(), reassign={"i": "SS"}, leave=())
    assert diff({HERE: {None: 2}}, []) == Difference(make=(), wait=(), reassign={}, leave=())


def test_of_too_many_the_unready_leave_first_and_then_the_oldest() -> None:
    members = [
        an_instance("old", up_s=900),
        an_instance("young", up_s=60),
        an_instance("loads", state=STARTING, up_s=50),
        an_instance("loads since just now", state=STARTING, up_s=5),
        an_instance("wanted", state=WANTED, up_s=1),
    ]
    order = ("wanted", "loads since just now", "loads", "old", "young")
    for count in range(6):
        assert diff({HERE: {"SS": count}}, members).leave == order[: 5 - count]


def test_what_was_made_on_other_terms_is_replaced() -> None:
    changes = diff({HERE: {"SS": 2}}, [an_instance("i", is_current=False), an_instance("j")])
    assert changes == Difference(make=((HERE, "SS"),), wait=(), reassign={}, leave=("i",))


@given(st.lists(st.tuples(combinations, classes.map(str)), max_size=6), standings())
def test_no_more_are_recalled_than_are_missing(missing: list[tuple[Combination, str]], draining: list[Member]) -> None:
    back = recalled(missing, draining)
    assert len({each.id for each in back}) == len(back)
    assert all(each.is_current for each in back)
    wanted, could = Counter(at for at, _ in missing), Counter(each.at for each in draining if each.is_current)
    assert Counter(each.at for each in back) == wanted & could
