"""When a server is given requests, and when not."""

import pytest

from services.router.breaker import FAILURES, LONGEST_PAUSE_S, Breaker, BreakerState


def test_three_failures_in_a_row_eject_and_one_that_is_certain_does_at_once() -> None:
    patient = Breaker()
    assert [patient.failed(0.0) for _ in range(FAILURES)] == [False, False, True]
    assert Breaker().failed(0.0, is_certain=True)


def test_an_answer_in_between_begins_the_count_again() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_after_the_pause_one_request_tries_it_and_only_one() -> None:
    breaker = Breaker()
    breaker.failed(10.0, is_certain=True)
    assert (breaker.state(10.5), breaker.passes(10.5)) == (BreakerState.OPEN, False)
    assert (breaker.state(11.0), breaker.passes(11.0)) == (BreakerState.HALF_OPEN, True)
    breaker.sent("trial")
    assert not breaker.passes(11.0)
    breaker.succeeded()
    assert breaker.passes(11.0)
    assert breaker.state(11.0) is BreakerState.CLOSED


def test_each_trial_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    breaker, now_s, pauses = Breaker(), 0.0, []
    breaker.failed(now_s, is_certain=True)
    for _ in range(8):
        pauses.append(breaker.pause_s)
        now_s += breaker.pause_s
        assert breaker.passes(now_s)
        breaker.sent("trial")
        assert breaker.failed(now_s, "trial")
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


@pytest.mark.parametrize("is_tried", [False, True])
def test_what_was_sent_before_the_ejection_does_not_count_as_the_trial(is_tried: bool) -> None:
    breaker = Breaker()
    breaker.sent("before")
    breaker.failed(0.0, is_certain=True)
    if is_tried:
        breaker.sent("trial")
    breaker.abandoned("before")
    assert not breaker.failed(0.5, "before")
    assert not breaker.failed(0.5)
    assert breaker.pause_s == 1.0
    assert breaker.passes(1.0) is not is_tried


def test_a_trial_whose_client_left_may_be_repeated() -> None:
    breaker = Breaker()
    breaker.failed(0.0, is_certain=True)
    breaker.sent("trial")
    breaker.abandoned("trial")
    assert breaker.passes(1.0)


def test_a_probe_that_is_answered_ends_the_pause() -> None:
    breaker = Breaker()
    breaker.failed(0.0, is_certain=True)
    breaker.reachable(0.2)
    assert breaker.state(0.2) is BreakerState.HALF_OPEN
