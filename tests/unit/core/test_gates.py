"""Which queued jobs must not start yet."""

import pytest

from services.core.cycle.gates import GatedJob, Need, never_met, withheld
from services.core.domain.dependencies import Condition, Ends, Verdict, verdict


def _task(index: int, *, holds: bool = False, ran: bool = False, array: str | None = "A") -> GatedJob:
    return GatedJob(f"t{index}", array, index, holds, ran or holds)


def _need(dependent: str, needed: str, condition: Condition, live: int, not_ok: int) -> Need:
    return Need(dependent, needed, condition, f"name of {needed}", Ends(live, not_ok))


@pytest.mark.parametrize(
    ("condition", "live", "not_ok", "expected"),
    [
        (Condition.OK, 1, 0, Verdict.OPEN),
        (Condition.OK, 0, 0, Verdict.MET),
        (Condition.OK, 3, 1, Verdict.IMPOSSIBLE),  # one task of an array failed, others still run
        (Condition.ANY, 1, 1, Verdict.OPEN),
        (Condition.ANY, 0, 1, Verdict.MET),
        (Condition.ANY, 0, 0, Verdict.MET),
        (Condition.NOT_OK, 2, 1, Verdict.OPEN),
        (Condition.NOT_OK, 0, 1, Verdict.MET),
        (Condition.NOT_OK, 0, 0, Verdict.IMPOSSIBLE),
    ],
)
def test_what_a_dependency_says(condition: Condition, live: int, not_ok: int, expected: Verdict) -> None:
    assert verdict(condition, Ends(live, not_ok)) is expected


def test_an_array_offers_what_its_limit_leaves_lowest_index_first() -> None:
    jobs = [_task(0, holds=True), *(_task(index) for index in (10, 9, 2))]
    assert [each.id for each in withheld(jobs, {"A": 2}, [])] == ["t10", "t9"]
    assert withheld(jobs, {"A": 4}, []) == withheld(jobs, {}, []) == []


def test_a_preempted_task_keeps_its_turn() -> None:
    jobs = [_task(0), _task(1), _task(7, ran=True)]
    assert [each.id for each in withheld(jobs, {"A": 1}, [])] == ["t0", "t1"]


def test_an_array_that_runs_more_than_its_limit_offers_nothing() -> None:
    jobs = [_task(0, holds=True), _task(1, holds=True), _task(2)]
    assert [each.id for each in withheld(jobs, {"A": 1}, [])] == ["t2"]


def test_a_dependency_says_what_it_waits_for() -> None:
    needs = [_need("x", "y", Condition.OK, 1, 0), _need("x", "z", Condition.ANY, 0, 0)]
    (found,) = withheld([_task(0, array=None), GatedJob("x", None, 0, False, False)], {}, needs)
    assert (found.id, found.reason, found.detail) == ("x", "dependency", "It waits for name of y (y) to succeed.")


def test_the_dependencies_of_an_array_are_those_of_its_tasks_and_take_no_room() -> None:
    jobs = [_task(0), _task(1), _task(2)]
    needs = [_need("A", "y", Condition.ANY, 1, 0)]
    assert {each.reason for each in withheld(jobs, {"A": 1}, needs)} == {"dependency"}
    needs = [_need("t0", "y", Condition.ANY, 1, 0)]
    assert [(each.id, each.reason) for each in withheld(jobs, {"A": 1}, needs)] == [
        ("t0", "dependency"),
        ("t2", "array_limit"),
    ]


def test_what_its_engine_does_not_start_is_left_out_and_says_why() -> None:
    jobs = [GatedJob("x", None, 0, False, False, "QOSMaxGRESPerUser"), GatedJob("y", None, 0, True, True, "Licenses")]
    (found,) = withheld(jobs, {}, [])
    assert (found.id, found.reason) == ("x", "engine_limit")
    assert found.detail == "Its engine does not start it: QOSMaxGRESPerUser."


def test_what_can_never_start_is_found_through_a_chain() -> None:
    needs = [
        _need("b", "a", Condition.OK, 0, 1),
        _need("c", "b", Condition.OK, 1, 0),
        _need("d", "c", Condition.NOT_OK, 1, 0),
        _need("e", "c", Condition.ANY, 1, 0),
        _need("f", "g", Condition.OK, 1, 0),
    ]
    found = never_met(needs)
    assert set(found) == {"b", "c"}  # d starts, as c was cancelled
    assert found["b"].words() == "It was to start only if name of a (a) succeeds, and that did not succeed."
