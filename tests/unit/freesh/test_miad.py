"""Clocks that follow latency, and learned ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.serving.model_server import ModelServer
from services.core.domain.errors import DomainError
from services.core.domain.serving import TABLE_7, LatencyLimits, MiadConfig
from services.core.policies.freesh.clock_model import (
    ENOUGH_SAMPLES,
    GOOD_ERROR,
    MEMORY,
    ClockLearner,
    ClockSample,
    Unused,
    best_clock,
    fit_clocks,
    learned_clock,
    mean_power_w,
)
from services.core.policies.freesh.miad import Clocks, LatencyReport, common_clocks, miad_clock

A100 = Clocks(tuple(map(float, range(210, 1_411, 15))))
SLOW, FINE = LatencyReport(tbt_s=0.2), LatencyReport(tbt_s=0.1)
SERVER = ModelServer(40, 0.1, 0.0, 0.04, 0.0005, busy_w=1_400.0, idle_w=400.0)
LIMITS = TABLE_7["LS"]


def clocks_of(reports: list[LatencyReport], config: MiadConfig = MiadConfig(), start: float = 300.0) -> list[float]:
    found, clock = list[float](), start
    for report in reports:
        clock = miad_clock(clock, report, LIMITS, A100, config)
        found.append(clock)
    return found


def test_a_violation_doubles_the_clock_and_quiet_takes_100_mhz() -> None:
    assert clocks_of([SLOW, FINE, FINE, SLOW, SLOW, SLOW, FINE]) == [600, 495, 390, 780, 1_410, 1_410, 1_305]
    assert clocks_of([FINE] * 3, start=315.0) == [210, 210, 210]
    assert clocks_of([LatencyReport()], start=1_410.0) == [1_305]  # 1,310 is not among the supported clocks


def test_the_parameters_of_table_10() -> None:
    assert clocks_of([SLOW, FINE], MiadConfig(1.5, 10.0)) == [450, 435]
    for wrong in ((1.0, 100.0), (2.0, 0.0), (math.nan, 100.0)):
        with pytest.raises(DomainError):
            MiadConfig(*wrong)


def test_each_threshold_counts_and_one_that_was_not_seen_does_not() -> None:
    assert LatencyReport(ttft_s=0.61).exceeds(LIMITS)
    assert LatencyReport(e2e_s=10.1).exceeds(LIMITS)
    assert not LatencyReport(ttft_s=0.6, tbt_s=0.15, e2e_s=10.0).exceeds(LIMITS)
    assert not LatencyReport(ttft_s=9.0).exceeds(LatencyLimits(tbt_s=0.1))


def test_one_long_request_does_not_raise_the_clock() -> None:
    """Thresholds are for the means of an interval; here five requests end, one of them after 18 s."""
    ended_s = [18.0, 7.0, 8.0, 6.0, 9.0]

    assert max(ended_s) > (LIMITS.e2e_s or 0)
    assert clocks_of([LatencyReport(e2e_s=sum(ended_s) / 5)], start=600.0) == [495]


@given(
    st.lists(st.integers(100, 3_000), min_size=1, max_size=20, unique=True),
    st.floats(100, 3_000),
    st.booleans(),
    st.floats(1.1, 4),
    st.floats(1, 500),
)
def test_the_clock_is_supported_and_goes_the_right_way(
    supported: list[int], wanted: float, slow: bool, factor: float, step: float
) -> None:
    clocks = Clocks(tuple(float(each) for each in sorted(supported)))
    now = clocks.at_least(wanted)

    after = miad_clock(now, SLOW if slow else FINE, LIMITS, clocks, MiadConfig(factor, step))

    assert after in clocks.mhz
    at_the_end = now == (clocks.highest if slow else clocks.lowest)
    assert at_the_end or (after > now if slow else after < now)


def test_tensor_parallel_ranks_share_the_clocks_that_all_support() -> None:
    assert common_clocks([Clocks((300.0, 600.0, 900.0)), Clocks((300.0, 900.0))]).mhz == (300, 900)
    with pytest.raises(DomainError):
        common_clocks([Clocks((300.0,)), Clocks((600.0,))])
    with pytest.raises(DomainError):
        common_clocks([])


def sample(clock: float, batch: float = 20.0, busy: float = 1.0, tokens_per_s: float = 0.0) -> ClockSample:
    """What an instance reports that behaves as ``SERVER``."""
    report = LatencyReport(ttft_s=SERVER.prefill_s(0, clock), tbt_s=SERVER.step_s(batch, clock))
    return ClockSample(
        clock,
        batch,
        report,
        power_w=SERVER.power_w(clock, is_busy=True),
        tokens_per_request=100.0,
        tokens_per_s=tokens_per_s,
        busy_share=busy,
    )


def samples() -> list[ClockSample]:
    return [sample(300.0 + 45.0 * (at % 24), 5.0 + 3.0 * (at % 11)) for at in range(120)]


def test_what_a_server_does_is_learned_within_a_few_per_cent() -> None:
    fitted = fit_clocks(samples())

    assert fitted is not None
    assert fitted.error < 0.02
    for clock in (350.0, 700.0, 1_200.0):
        assert fitted.tbt_s(17.0, clock) == pytest.approx(SERVER.step_s(17.0, clock), rel=0.03)
        assert fitted.ttft_s(clock) == pytest.approx(SERVER.prefill_s(0, clock), rel=0.03)
        assert fitted.power_w(clock) == pytest.approx(SERVER.power_w(clock, is_busy=True), rel=0.03)


def test_the_learned_clock_is_the_lowest_that_keeps_the_thresholds_under_full_load() -> None:
    fitted = fit_clocks(samples())
    assert fitted is not None
    now = sample(1_410.0, batch=20.0, tokens_per_s=20.0 / SERVER.step_s(20.0, 1_410.0))

    found = best_clock(fitted, now, LIMITS, A100, capacity=40)

    assert found is not None
    assert found < 1_000
    below = A100.at_most(found - 1)
    batch = now.tokens_per_s * SERVER.step_s(40.0, below)
    e2e_s = SERVER.prefill_s(0, below) + 100 * SERVER.step_s(batch, below)
    assert batch > 38 or e2e_s > 0.85 * 10.0  # one step less is at the capacity, or at the margin of 10 s


def test_an_instance_that_is_seldom_busy_takes_the_bottom_of_the_u() -> None:
    """With a free idle state, slow tokens only prolong the time in which the floor power is drawn."""
    server = ModelServer(40, 0.1, 0.0, 0.04, 0.0005, busy_w=1_400.0, power_floor=0.4)
    many = [
        ClockSample(each.clock_mhz, each.batch, each.report, power_w=server.power_w(each.clock_mhz, is_busy=True))
        for each in samples()
    ]
    fitted = fit_clocks(many)
    assert fitted is not None
    seldom = sample(1_410.0, batch=1.0, busy=0.05)
    powers = {clock: mean_power_w(fitted, seldom, clock, 0.0) for clock in A100.mhz}

    found = best_clock(fitted, seldom, LatencyLimits(), A100, capacity=40)

    assert found == min(powers, key=lambda clock: powers[clock])
    assert found is not None
    assert A100.lowest < found


def test_miad_decides_until_enough_is_known_and_while_a_threshold_is_violated() -> None:
    learner, now = ClockLearner(), sample(900.0)
    assert learned_clock(learner, now, LIMITS, A100, 40) == 795

    for each in samples()[: ENOUGH_SAMPLES + 1]:
        learner.add(each)

    assert learner.fitted is not None
    assert learned_clock(learner, now, LIMITS, A100, 40) != 795
    slow = ClockSample(600.0, 20.0, SLOW)
    assert learned_clock(learner, slow, LIMITS, A100, 40) == 1_200
    assert learned_clock(learner, now, LatencyLimits(tbt_s=1e-6), A100, 40) == 1_410
    idle = ClockSample(600.0, 0.0, LatencyReport())
    assert learned_clock(learner, idle, LIMITS, A100, 40) == 495


def test_an_instance_that_stays_at_its_best_clock_does_not_forget_the_others() -> None:
    learner = ClockLearner(samples())
    for _ in range(3 * MEMORY):
        learner.add(sample(780.0))

    assert learner.known == len(learner.samples) == MEMORY
    assert learner.clocks == len({780.0} | {each.clock_mhz for each in samples()})
    assert learner.fitted is not None
    assert learner.unused(sample(780.0), LIMITS) is None


def test_a_learner_says_why_it_does_not_decide() -> None:
    learner = ClockLearner()
    assert learner.unused(sample(900.0), LIMITS) is Unused.FEW_SAMPLES
    assert not learner.add(ClockSample(600.0, 0.0, LatencyReport()))
    for _ in range(ENOUGH_SAMPLES):
        assert learner.add(sample(900.0))
    assert learner.unused(sample(900.0), LIMITS) is Unused.FEW_CLOCKS

    learner = ClockLearner(samples())
    assert learner.unused(ClockSample(600.0, 20.0, SLOW), LIMITS) is Unused.EXCEEDED
    assert learner.unused(ClockSample(600.0, 0.0, LatencyReport()), LIMITS) is Unused.NO_REQUESTS


def test_a_model_that_predicts_badly_is_not_used() -> None:
    learner = ClockLearner()
    for at in range(ENOUGH_SAMPLES + 1):
        report = LatencyReport(ttft_s=0.1, tbt_s=0.02 if at % 2 else 0.1)
        learner.add(ClockSample(300.0 + 45 * (at % 7), 10.0, report, power_w=1_000.0))

    assert learner.fitted is not None
    assert learner.fitted.error > GOOD_ERROR
    assert learner.unused(sample(900.0), LIMITS) is Unused.ERROR
    assert learned_clock(learner, sample(900.0), LIMITS, A100, 40) == 795
    with pytest.raises(DomainError):
        learned_clock(learner, sample(900.0), LIMITS, A100, 0)


def test_too_few_clocks_teach_nothing() -> None:
    assert fit_clocks([sample(900.0)] * 50) is None
    assert fit_clocks([ClockSample(300.0 + 15 * at, 5.0, FINE) for at in range(50)]) is None  # no power was measured
