"""Make before break: nobody leaves for what may not come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.serving.controller.diff import ANY_GPUS, Gpus, Outlook, Pending, drainable

A, B = ("DE", "A100"), ("GB", "A100")
COMES, WAITS, STUCK = Outlook.COMES, Outlook.WAITS, Outlook.STUCK

gpus = st.builds(Gpus, st.sampled_from([A, B]), st.integers(1, 8))
leavings = st.lists(gpus, max_size=8).map(lambda found: [(str(index), each) for index, each in enumerate(found)])
pendings = st.lists(st.builds(Pending, gpus, st.sampled_from(Outlook)), max_size=5)


def leaving(*kinds: tuple[str, str], count: int = 1) -> list[tuple[str, Gpus]]:
    return [(str(index), Gpus(kind, count)) for index, kind in enumerate(kinds)]


def pending(outlook: Outlook, kind: tuple[str, str] = B, count: int = 1) -> Pending:
    return Pending(Gpus(kind, count), outlook)


def test_all_leave_once_nothing_is_awaited() -> None:
    assert drainable(leaving(A, B), []) == ("0", "1")


def test_nobody_leaves_while_one_is_on_its_way() -> None:
    assert drainable(leaving(A, B), [pending(COMES), pending(STUCK)]) == ()


def test_who_holds_the_gpus_that_are_waited_for_leaves_at_once() -> None:
    assert drainable(leaving(A, B, B, B), [pending(WAITS, count=2), pending(COMES)]) == ("1", "2")
    assert drainable(leaving(A, A), [pending(WAITS), pending(COMES)]) == ()
    assert drainable(leaving(A, A), [pending(WAITS, ANY_GPUS), pending(COMES)]) == ("0",)


def test_gpus_that_are_given_up_already_count() -> None:
    waits = [pending(WAITS, count=2), pending(COMES)]
    assert drainable(leaving(B, B), waits, [Gpus(B, 1)]) == ("0",)
    assert drainable(leaving(B, B), waits, [Gpus(B, 2), Gpus(A, 8)]) == ()


def test_what_is_stuck_keeps_as_much_as_it_would_replace() -> None:
    assert drainable(leaving(A, A, A), [pending(STUCK, count=2)]) == ("0",)
    assert drainable(leaving(A, A, count=4), [pending(STUCK, count=5)]) == ()


@given(leavings, pendings, st.lists(gpus, max_size=4))
def test_what_goes_on_is_worth_what_is_awaited(
    leavers: list[tuple[str, Gpus]], awaited: list[Pending], releasing: list[Gpus]
) -> None:
    drained = drainable(leavers, awaited, releasing)
    assert len(set(drained)) == len(drained)
    if not any(each.outlook is WAITS for each in awaited):
        left = sum(each.count for name, each in leavers if name not in drained)
        worth = sum(each.count for _, each in leavers)
        assert left >= min(worth, sum(each.gpus.count for each in awaited))
    if not awaited:
        assert drained == tuple(name for name, _ in leavers)
