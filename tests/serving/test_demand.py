"""From a log of requests to the peaks that are planned for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.contracts.serving import DemandForecast, PoolPartition
from services.serving.planning.demand import DAY_WINDOWS, RequestLog, predict_demand
from tests.serving.pools import a_spec

END_S = 1_800_000_000.0


def a_part(**assumed: float) -> PoolPartition:
    return a_spec().partitions[0].model_copy(update={"assumed_qps": assumed})


def a_log(counts: list[int] | np.ndarray, silent: slice | None = None) -> RequestLog:
    known = np.ones(len(counts), np.bool_)
    if silent is not None:
        known[silent] = False
    return RequestLog(np.where(known, counts, 0)[:, None].astype(np.int64), known, END_S)


def predicted(
    log: RequestLog, part: PoolPartition | None = None, now_s: float = END_S + 2, **options: Any
) -> DemandForecast:
    defaults = {"from_s": END_S + 60, "head_room": 1.1, "max_age_s": 600.0}
    return predict_demand(part or a_part(), log, now_s=now_s, **{**defaults, **options})


def test_little_history_is_planned_for_as_its_greatest_peak_or_as_assumed() -> None:
    log = a_log([10] * 119 + [30])
    found = predicted(log)
    assert found.peaks_qps == {"all": [6.0] * 6}
    assert (found.is_assumed, found.method, found.history_s) == (True, "greatest peak so far", 600.0)
    assert predicted(log, a_part(all=9.0)).peaks_qps == {"all": [9.0] * 6}
    assert "last peak" in found.left_out


def test_less_than_a_step_of_history_counts_too() -> None:
    found = predicted(a_log([0] * 10 + [20]))
    assert (found.peaks_qps["all"][0], found.method) == (4.0, "greatest peak of the last day known")


def test_nothing_is_predicted_from_a_log_that_has_stopped() -> None:
    log = a_log([50] * DAY_WINDOWS)
    assert predicted(log, now_s=END_S + 599).method != "greatest peak of the last day known"
    stale = predicted(log, now_s=END_S + 601)
    assert (stale.is_assumed, stale.method) == (True, "greatest peak of the last day known")
    assert stale.peaks_qps == {"all": [10.0] * 6}
    assert set(stale.left_out.values()) == {"the log ended 601 s ago"}
    assert predicted(log, a_part(all=11.0), now_s=END_S + 601).method == "assumed"
    old_peak = a_log([500] * 60 + [5] * DAY_WINDOWS)
    assert predicted(old_peak, now_s=END_S + 601).peaks_qps["all"][0] == 1.0, "of the last day alone"


def test_where_nothing_is_known_nothing_is_planned_for_unless_assumed() -> None:
    nothing = a_log([0] * 600, silent=slice(None))
    found = predicted(nothing)
    assert (found.peaks_qps, found.history_s) == ({"all": [0.0] * 6}, 0.0)
    assert (found.is_assumed, found.method) == (True, "none reported, none assumed")
    assumed = predicted(nothing, a_part(all=3.0))
    assert (assumed.peaks_qps, assumed.method) == ({"all": [3.0] * 6}, "assumed")


def test_classes_that_are_not_assumed_have_what_was_seen() -> None:
    part = a_spec().partitions[1].model_copy(update={"assumed_qps": {"SS": 2.0}})
    counts = np.array([[5, 0, 20, 0]] * 30)
    found = predict_demand(
        part,
        RequestLog(counts, np.ones(30, np.bool_), END_S),
        from_s=END_S,
        now_s=END_S,
        head_room=1.1,
        max_age_s=600,
    )
    assert {name: peaks[0] for name, peaks in found.peaks_qps.items()} == {"SS": 2.0, "SL": 0.0, "LS": 4.0, "LL": 0.0}


def test_short_silence_means_no_requests_and_long_silence_is_as_the_day_before() -> None:
    counts = np.full(2 * DAY_WINDOWS, 10)
    counts[:300] = 50
    short = predicted(a_log(counts, silent=slice(-100, -1)))
    assert short.history_s == 2 * 86_400
    long = predicted(a_log(counts, silent=slice(DAY_WINDOWS, DAY_WINDOWS + 300)), now_s=END_S + 601)
    assert (long.history_s, long.peaks_qps["all"][0]) == (2 * 86_400, 10.0), "50 of the day before lie a day back"
    first_day = predicted(a_log(counts, silent=slice(1_000, 1_300)))
    assert first_day.history_s == pytest.approx(5 * (2 * DAY_WINDOWS - 1_300)), "no day before it is known"


def test_demand_is_predicted_from_history() -> None:
    minute = np.arange(3 * DAY_WINDOWS) * 5 / 60
    rate = 20 + 15 * np.sin(2 * np.pi * minute / 1_440)
    counts = np.random.default_rng(7).poisson(5 * rate)
    found = predicted(a_log(counts))
    assert not found.is_assumed
    assert found.history_s == 3 * 86_400
    assert all(15 < peak < 40 for peak in found.peaks_qps["all"]), found.peaks_qps


def test_steps_of_the_plan_have_the_peaks_of_the_forecasts_steps_that_they_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.learning import demand

    def rising(*_: Any, **__: Any) -> Any:
        peaks = np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
        return demand.Demand(peaks, "rising", {}, {}, assumed=False)

    monkeypatch.setattr(demand, "forecast_demand", rising)
    log = a_log([1] * 120)
    assert predicted(log, from_s=END_S).peaks_qps["all"] == [1, 2, 3, 4, 5, 6]
    assert predicted(log, from_s=END_S + 120).peaks_qps["all"] == [2, 3, 4, 5, 6, 6]
    assert predicted(log, from_s=END_S + 300).peaks_qps["all"] == [2, 3, 4, 5, 6, 6]
    assert predicted(log, from_s=END_S + 720).peaks_qps["all"] == [4, 5, 6, 6, 6, 6]


def test_a_higher_quantile_is_never_less_and_a_plan_has_the_steps_it_is_for() -> None:
    counts = np.random.default_rng(4).poisson(20, 60 * 70)
    low, high = (predicted(a_log(counts), quantile=share, steps=2).peaks_qps["all"] for share in (0.5, 0.95))
    assert (len(low), len(high)) == (2, 2)
    assert sum(high) > sum(low)


def test_the_mean_load_is_a_share_of_the_peaks() -> None:
    found = predicted(a_log(([10] * 30 + [20] * 30) * 3))
    assert found.mean_shares == {"all": pytest.approx(0.75)}
    assert predicted(a_log([0] * 120)).mean_shares == {}
