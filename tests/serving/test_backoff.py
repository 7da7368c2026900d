"""Places and modes whose instances fail are left alone for longer and longer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from services.serving.controller.diff import LONGEST_S, Failures, Life, failures

AT = ("here", "one")
START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def life(made_s: float, *, ready_s: float | None = None, failed_s: float | None = None) -> Life:
    return Life(AT, at(made_s), None if ready_s is None else at(ready_s), None if failed_s is None else at(failed_s))


@pytest.mark.parametrize(("count", "wait_s"), [(1, 5), (2, 10), (3, 20), (6, 160), (7, 300), (5_000, 300)])
def test_the_wait_doubles_up_to_five_minutes(count: int, wait_s: float) -> None:
    assert Failures(count, START).retry_at == at(wait_s)


def test_failures_in_a_row_count_from_the_newest() -> None:
    newest_first = [life(30, failed_s=40), life(10, failed_s=25), life(0, ready_s=5)]
    assert failures(newest_first) == {AT: Failures(2, at(40))}


def test_instances_made_together_fail_once() -> None:
    assert failures([life(0, failed_s=9), life(0, failed_s=3)]) == {AT: Failures(1, at(9))}


def test_one_that_serves_ends_the_count_and_one_that_loads_says_nothing() -> None:
    assert failures([life(20, ready_s=25), life(0, failed_s=5)]) == {}
    assert failures([life(20), life(0, failed_s=5)]) == {AT: Failures(1, at(5))}


def test_one_that_served_for_long_fails_for_the_first_time() -> None:
    served = life(10, ready_s=20, failed_s=20 + LONGEST_S)
    assert failures([served, life(0, failed_s=5)]) == {AT: Failures(1, at(20 + LONGEST_S))}


def test_one_that_dies_soon_after_it_is_ready_goes_on_failing() -> None:
    assert failures([life(20, ready_s=21, failed_s=24), life(0, ready_s=1, failed_s=4)])[AT].count == 2
