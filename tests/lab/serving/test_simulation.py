"""Requests through queues, instances, plans and clocks, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.serving.plans import Forecast, HalfHour, PlannedInstance, make_plans
from lab.serving.rates import PlaceRates
from lab.serving.requests import RequestTrace, read_requests
from lab.serving.run import ServingRun
from lab.serving.simulation import (
    ClocksSee,
    Frequency,
    Outcome,
    Placement,
    Prefill,
    ServingOptions,
    ServingSimulation,
    predicted_lengths,
)
from lab.serving.site import Site, papers_pools
from services.contracts.pools import PoolsResult
from services.contracts.serving import PoolSpec
from services.core.domain.errors import DomainError
from services.core.policies.freesh.laxity import Order
from services.core.policies.freesh.pool_planning import plan_pools
from services.simulator.raw import TraceFormatError

FIXED = ServingOptions(order=Order.FCFS, frequency=Frequency.FIXED)
RATES = PlaceRates(300.0, np.array([[400.0], [100.0]]), ("here", "there"))


def a_site(max_qps: float = 1.0, **terms: Any) -> Site:
    """Two places, and one mode of one GPU: 20 ms between tokens of ten requests, 100 ms to the first."""
    profile = {"mode": "one", "max_qps": max_qps, "power_w": 400, "latency_s": 10, "ttft_ms": 100, "tbt_ms": 20}
    document = {
        "places": [{"name": name, "zone": name, "gpus": {"A100-SXM4-40GB": 4}} for name in ("here", "there")],
        "modes": [
            {"name": "one", "gpu_model": "A100-SXM4-40GB", "gpus": 1, "command": ["serve"], "start_wh": 0} | terms
        ],
        "partitions": [{"name": "all", "classes": [{"name": "any", "profiles": [profile]}]}],
    }
    return Site(PoolSpec.model_validate(document))


def a_trace(*requests: tuple[float, int]) -> RequestTrace:
    arrivals, tokens = np.array([each[0] for each in requests]), np.array([each[1] for each in requests])
    return RequestTrace("made up", arrivals, np.full(len(requests), 100), tokens.astype(np.int64))


def a_plan(*instances: tuple[str, int], from_s: float = 0.0) -> HalfHour:
    result = PoolsResult.model_validate({"status": "optimal", "solver": "highs"})
    planned = tuple(PlannedInstance(place, "any", "one", count) for place, count in instances)
    return HalfHour(from_s, "all", planned, result)


def simulated(
    trace: RequestTrace, *plans: HalfHour, options: ServingOptions = FIXED, site: Site | None = None
) -> Outcome:
    return ServingSimulation(site or a_site(), RATES, trace, plans or [a_plan(("here", 1))], options).run()


def step_s(batch: int) -> float:
    return 0.020 * (1 + 0.010 * (batch - 1)) / (1 + 0.010 * 9)


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    found = simulated(a_trace((0.0, 101)))

    assert found.served.ttft_s[0] == pytest.approx(0.1)
    assert found.served.e2e_s[0] == pytest.approx(0.1 + 100 * step_s(1))
    assert found.energy_j == pytest.approx(400 * (0.1 + 100 * step_s(1)))
    assert found.carbon_g == pytest.approx(found.energy_j / 3.6e6 * 400)
    assert found.served.latency_s[0] == pytest.approx(0.1 + 101 * 0.020)


def test_two_at_once_slow_each_other_down_until_one_ends() -> None:
    found = simulated(a_trace((0.0, 11), (0.0, 21)))

    first = 0.1 + 10 * step_s(2)
    assert found.served.finish_s.tolist() == pytest.approx([first, first + 10 * step_s(1)])


def with_prompts(trace: RequestTrace, *input_tokens: int, blocks: tuple[tuple[int, ...], ...] = ()) -> RequestTrace:
    return replace(trace, input_tokens=np.array(input_tokens, dtype=np.int64), blocks=blocks)


BY_LENGTH = replace(FIXED, prefill=Prefill.LENGTH)


def test_prefills_by_length_keep_the_profiles_time_at_the_mean_prompt() -> None:
    trace = with_prompts(a_trace((0.0, 1), (50.0, 1)), 100, 700)

    found = simulated(trace, options=BY_LENGTH)

    assert found.served.ttft_s.tolist() == pytest.approx([0.1 * (212 + each) / (212 + 400) for each in (100, 700)])
    assert simulated(trace).served.ttft_s.tolist() == pytest.approx([0.1, 0.1])


def test_a_beginning_that_was_read_before_is_not_read_again() -> None:
    blocks = ((1, 2), (1, 2, 3), (7,))
    trace = with_prompts(a_trace((0.0, 1), (50.0, 1), (90.0, 1)), 1_024, 1_400, 500, blocks=blocks)
    options = replace(BY_LENGTH, prefix_cache_tokens=10_000)

    found = simulated(trace, options=options)

    per_token_s = 0.1 / (212 + (1_024 + 1_400 + 500) / 3)
    assert found.served.ttft_s.tolist() == pytest.approx([per_token_s * (212 + each) for each in (1_024, 376, 500)])
    assert (found.cached_tokens, found.read_tokens) == (1_024, 2_924)
    assert simulated(trace, options=replace(options, prefix_cache_tokens=100)).cached_tokens == 0


def test_a_prompt_goes_where_its_beginning_is_as_the_router_has_it() -> None:
    blocks = ((1,), (5,), (5,), (1,), (1,))
    rows = ((0.0, 1), (0.0, 1), (10.0, 100), (10.1, 100), (20.0, 100))
    trace = with_prompts(a_trace(*rows), *[600] * 5, blocks=blocks)
    options = replace(BY_LENGTH, prefix_cache_tokens=1_024, placement=Placement.CARBON)
    plan = a_plan(("here", 2))

    assert simulated(trace, plan, options=options).cached_tokens == 3 * 512
    assert simulated(trace, plan, options=replace(options, placement=Placement.WEIGHTS)).cached_tokens < 3 * 512
    one_each = simulated(trace, plan, options=options, site=a_site(max_qps=0.1))
    assert one_each.cached_tokens == 3 * 512


def test_by_carbon_requests_go_to_the_cleaner_place_until_it_is_late_there() -> None:
    trace = a_trace(*[(0.0, 500)] * 8)
    plan = a_plan(("here", 1), ("there", 1))

    def dirty_share(**terms: Any) -> float:
        run = ServingSimulation(a_site(**terms), RATES, trace, [plan], replace(FIXED, placement=Placement.CARBON))
        run.run()
        by_rate = sorted(run._instances, key=lambda each: each.rate)
        return by_rate[1].steps / (by_rate[0].steps + by_rate[1].steps)

    assert dirty_share() == 0
    assert dirty_share(max_qps=0.4) > 0, "four places each"


def test_a_request_waits_until_memory_is_free_though_there_is_a_place() -> None:
    """Weights of 35 GiB leave 1 GiB of 36: 1,024 tokens of 1 MiB."""
    options = replace(FIXED, weights_gib=35.0, kv_kib_per_token=1_024.0)
    trace = with_prompts(a_trace((0.0, 101), (1.0, 101), (1.5, 21)), 500, 500, 100)

    found = simulated(trace, options=options)

    first, second, third = found.served.finish_s
    assert found.waited_for_memory == 1, "the third would fit, and is not the first in line"
    assert found.dispatched_s.tolist() == pytest.approx([0.0, first, first])
    assert third < second
    assert simulated(trace).dispatched_s.tolist() == [0.0, 1.0, 1.5]


def test_a_request_larger_than_memory_runs_alone() -> None:
    options = replace(FIXED, weights_gib=35.0, kv_kib_per_token=1_024.0)
    found = simulated(with_prompts(a_trace((0.0, 11), (0.1, 11)), 5_000, 5_000), options=options)

    assert found.unserved == 0
    assert found.dispatched_s[1] == pytest.approx(found.served.finish_s[0])


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 200), st.integers(1, 900)), min_size=1, max_size=25),
    st.sampled_from(list(Order)),
)
def test_memory_is_never_overbooked_and_every_request_ends(rows: list[tuple[float, int, int]], order: Order) -> None:
    rows.sort()
    trace = with_prompts(a_trace(*((at, tokens) for at, tokens, _ in rows)), *(prompt for *_, prompt in rows))
    options = ServingOptions(order=order, frequency=Frequency.FIXED, weights_gib=35.0, kv_kib_per_token=1_024.0)
    simulation = ServingSimulation(a_site(), RATES, trace, [a_plan(("here", 2))], options)
    most = list[int]()
    send = simulation._send

    def watched(request: Any, instance: Any, now: float) -> None:
        send(request, instance, now)
        if instance.held > 1:
            most.append(instance.kv_held)

    simulation._send = watched  # type: ignore[method-assign]
    found = simulation.run()

    assert found.unserved == 0
    assert max(most, default=0) <= 1_024
    assert all(each.kv_held == 0 for each in simulation._instances)


def test_what_has_not_ended_when_the_run_ends_is_not_counted() -> None:
    trace = a_trace((0.0, 101), (5.0, 5_001))

    cut = simulated(trace, options=replace(FIXED, latest_s=1.0))

    assert (len(cut.served), cut.unserved, cut.ends_s) == (1, 1, 6.0)
    assert cut.energy_j == pytest.approx(400 * 6.0)
    assert simulated(trace).unserved == 0
    with pytest.raises(DomainError, match="latest_s"):
        replace(FIXED, latest_s=-1.0)


def test_weights_that_do_not_fit_are_refused_by_the_name_of_the_mode() -> None:
    with pytest.raises(DomainError, match=r"mode one: 131\.4 GiB of weights leave no room"):
        simulated(a_trace((0.0, 1)), options=replace(FIXED, kv_kib_per_token=320.0))
    for wrong in ({"kv_kib_per_token": -1.0}, {"weights_gib": float("nan")}, {"prefix_cache_tokens": 5}):
        with pytest.raises(DomainError):
            replace(FIXED, **wrong)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 300)), min_size=1, max_size=10))
def test_events_give_what_going_from_change_to_change_gives(rows: list[tuple[float, int]]) -> None:
    """No more requests than the instance decodes together, so that none waits."""
    trace = a_trace(*sorted(rows))
    joins, left = (trace.arrival_s + 0.1).tolist(), (trace.output_tokens - 1.0).tolist()
    now, end = 0.0, dict[int, float]()
    while len(end) < len(trace):
        inside = [at for at in range(len(trace)) if at not in end and joins[at] <= now + 1e-12]
        for at in [each for each in inside if left[each] <= 1e-9]:
            end[at] = now
            inside.remove(at)
        later_s = [joins[at] - now for at in range(len(trace)) if joins[at] > now + 1e-12]
        passed_s = min([left[at] * step_s(len(inside)) for at in inside] + later_s, default=0.0)
        for at in inside:
            left[at] -= passed_s / step_s(len(inside))
        now += passed_s

    found = simulated(trace)

    assert found.served.finish_s.tolist() == pytest.approx([end[at] for at in range(len(trace))], abs=1e-6)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400)), min_size=1, max_size=60),
    st.sampled_from(list(Order)),
    st.sampled_from(list(Frequency)),
)
def test_every_request_is_served_once_whatever_the_order(
    rows: list[tuple[float, int]], order: Order, frequency: Frequency
) -> None:
    trace = a_trace(*sorted(rows))
    options = ServingOptions(order=order, frequency=frequency, length_mae=50.0)

    found = simulated(trace, options=options)
    again = simulated(trace, options=options)

    assert (len(found.served), found.unserved) == (len(trace), 0)
    assert bool((found.served.e2e_s >= 0.1 + (trace.output_tokens - 1) * step_s(1) - 1e-6).all())
    assert found.energy_j <= 400 * found.ends_s + 1e-6
    assert again.served.finish_s.tolist() == found.served.finish_s.tolist()


def test_the_eleventh_waits_for_one_of_ten_to_end() -> None:
    found = simulated(a_trace(*[(0.0, 101)] * 10, (1.0, 11)))

    ten_end = 0.1 + 100 * step_s(10)
    assert found.dispatched_s[10] == pytest.approx(ten_end)
    assert found.served.first_token_s[10] == pytest.approx(ten_end + 0.1)


def test_llf_takes_a_place_for_the_urgent_and_the_other_goes_on_where_it_was() -> None:
    long, short = 500, 5
    trace = a_trace(*[(0.0, long)] * 10, (1.0, short))

    llf = simulated(trace, options=replace(FIXED, order=Order.LLF))
    patient = simulated(trace, options=replace(FIXED, order=Order.LLF, preempt=False))

    assert llf.preemptions > patient.preemptions == 0
    assert llf.served.e2e_s[10] == pytest.approx(0.1 + (short - 1) * step_s(10), rel=0.05)
    assert patient.served.e2e_s[10] > 5
    # whoever loses its place waits at least for the short one's service, and reads its prompt again
    assert llf.longest_gap_s.max() > 0.1 + (short - 1) * step_s(10)
    assert patient.longest_gap_s.max() == 0
    # equals then displace each other in turns, second by second: that is least laxity first, and costs prefills
    assert llf.served.finish_s[:10].mean() > patient.served.finish_s[:10].mean()


def test_fcfs_preempts_nobody() -> None:
    trace = a_trace(*[(0.1 * at, 20 if at > 20 else 300) for at in range(40)])

    assert simulated(trace).preemptions == 0
    assert simulated(trace, options=replace(FIXED, order=Order.SRTF)).preemptions > 0


def two_classes(max_qps: float) -> tuple[Site, HalfHour]:
    """Two classes, by the length of the answer, with an instance each."""
    profile = {"mode": "one", "max_qps": max_qps, "power_w": 400, "latency_s": 10, "ttft_ms": 100, "tbt_ms": 20}
    document = a_site().spec.model_dump(mode="json")
    classes = [{"name": name, "profiles": [profile]} for name in ("SS", "SL", "LS", "LL")]
    thresholds = {"input_tokens": 1_000, "output_tokens": 100}
    document["partitions"] = [{"name": "all", "classes": classes, "thresholds": thresholds}]
    instances = (PlannedInstance("here", "SS", "one", 1), PlannedInstance("here", "SL", "one", 1))
    return Site(PoolSpec.model_validate(document)), HalfHour(0.0, "all", instances, a_plan().result)


def test_in_one_queue_a_class_that_is_full_holds_up_all_others() -> None:
    site, plan = two_classes(max_qps=0.1)  # an instance holds one request
    trace = a_trace((0.0, 500), (1.0, 400), (2.0, 11), (3.0, 300), (4.0, 12))
    per_class = ServingSimulation(site, RATES, trace, [plan], FIXED).run().dispatched_s
    strict = ServingSimulation(site, RATES, trace, [plan], replace(FIXED, one_queue=True)).run().dispatched_s

    assert per_class[2] == 2.0, "its instance is free"
    assert strict[1] == per_class[1] > 5.0, "the first two are of one class"
    assert strict[2] == strict[1], "and whoever comes after them waits for the second"
    assert list(strict) == sorted(strict), "in order of arrival, strictly"
    with pytest.raises(DomainError, match="one_queue"):
        ServingOptions(order=Order.LLF, one_queue=True)


def test_clocks_that_see_the_server_are_not_raised_by_waits() -> None:
    limits = {"max_ttft_ms": 500}
    document = a_site(max_qps=0.1).spec.model_dump(mode="json")
    document["partitions"][0]["classes"][0] |= limits
    site = Site(PoolSpec.model_validate(document))
    trace = a_trace(*[(0.0, 101)] * 10)
    miad = replace(FIXED, frequency=Frequency.MIAD)

    client = simulated(trace, options=miad, site=site)
    server = simulated(trace, options=replace(miad, clocks_see=ClocksSee.SERVER), site=site)

    assert client.served.ttft_s.max() > 5
    assert server.clock_mhz < client.clock_mhz - 100


def test_an_instance_that_starts_serves_when_it_has_and_nobody_leaves_before() -> None:
    trace = a_trace((0.0, 2), (20.0, 2), (40.0, 2), (2_000.0, 2))
    plans = [a_plan(("here", 1)), a_plan(("there", 1), from_s=10.0)]

    at_once = simulated(trace, *plans)
    found = simulated(trace, *plans, options=replace(FIXED, start_s=25.0))

    assert found.served.e2e_s.tolist() == at_once.served.e2e_s.tolist(), "one or the other serves"
    assert found.energy_j - at_once.energy_j == pytest.approx(400 * 25.0), "both draw power until then"
    assert found.carbon_g - at_once.carbon_g == pytest.approx(400 * 25.0 / 3.6e6 * 400)
    growing = [a_plan(("here", 1)), a_plan(("here", 2), from_s=10.0)]
    waits = simulated(
        a_trace((0.0, 5_000), (1.0, 2)), *growing, options=replace(FIXED, start_s=15.0), site=a_site(max_qps=0.1)
    )
    assert waits.dispatched_s[1] == 25.0, "the first instance holds one request"
    again = [a_plan(("here", 1)), a_plan(("there", 1), from_s=10.0), a_plan(("here", 1), from_s=20.0)]
    assert simulated(trace, *again, options=replace(FIXED, start_s=15.0)).unserved == 0


def test_a_margin_keeps_equals_from_displacing_each_other() -> None:
    trace = a_trace(*[(0.01 * at, 300) for at in range(30)])
    options = replace(FIXED, order=Order.LLF)

    eager = simulated(trace, options=replace(options, preempt_margin_s=0.0))
    patient = simulated(trace, options=replace(options, preempt_margin_s=2.0))

    assert patient.preemptions < 0.5 * eager.preemptions
    assert patient.served.e2e_s.mean() < eager.served.e2e_s.mean()


def test_a_plan_moves_the_requests_and_drains_what_it_does_not_have() -> None:
    trace = a_trace((0.0, 401), (9.0, 401), (2_000.0, 2))
    plans = [a_plan(("here", 1)), a_plan(("there", 1), from_s=10.0)]

    found = simulated(trace, *plans)

    # both requests end where they began, the second after 9.1 s + 400 steps; then all power is drawn in the other place
    ends = 9.1 + 400 * step_s(2)
    assert found.served.finish_s[1] == pytest.approx(ends, rel=0.05)
    here_j = 400 * found.served.finish_s[1]
    there_j = 400 * (found.ends_s - 10.0)
    assert found.energy_j == pytest.approx(here_j + there_j, rel=1e-6)
    assert found.carbon_g == pytest.approx((here_j * 400 + there_j * 100) / 3.6e6, rel=1e-6)


def test_a_start_costs_its_energy_and_what_stays_starts_nothing() -> None:
    trace = a_trace((0.0, 2), (3_000.0, 2))
    site = a_site(start_wh=100.0)
    same = simulated(trace, a_plan(("here", 1)), a_plan(("here", 1), from_s=1_800.0), site=site)
    more = simulated(trace, a_plan(("here", 1)), a_plan(("here", 2), from_s=1_800.0), site=site)

    assert more.energy_j - same.energy_j == pytest.approx(360_000 + 400 * (more.ends_s - 1_800))


def test_clocks_follow_latency() -> None:
    """The class has no limits: the clock falls by 100 MHz a second to the lowest, and power with it."""
    trace = a_trace((0.0, 2), (60.0, 2))

    fixed, miad = simulated(trace), simulated(trace, options=replace(FIXED, frequency=Frequency.MIAD))

    assert fixed.clock_mhz == 1_410
    # 12 seconds on the way down, 48 at 300 MHz
    assert 300 < miad.clock_mhz < 560
    assert miad.energy_j < 0.5 * fixed.energy_j


def test_intensity_changes_with_the_hour() -> None:
    rates = PlaceRates(300.0, np.array([[400.0, 0.0], [100.0, 100.0]]), ("here", "there"))
    trace = a_trace((0.0, 2), (599.9, 1))

    found = ServingSimulation(a_site(), rates, trace, [a_plan(("here", 1))], FIXED).run()

    assert found.carbon_g == pytest.approx(400 * 300 / 3.6e6 * 400, rel=1e-6)


def test_predicted_lengths_have_the_error_they_should() -> None:
    tokens = np.full(20_000, 2_000)

    assert float(np.abs(predicted_lengths(tokens, 110.0, 1) - tokens).mean()) == pytest.approx(110, rel=0.05)
    assert predicted_lengths(tokens, 0.0, 1).tolist() == tokens.tolist()
    assert float(predicted_lengths(np.ones(1_000), 110.0, 1).min()) >= 1


def paper() -> tuple[Site, RequestTrace, dict[str, Any]]:
    site, trace = Site(papers_pools()), read_requests("azure-2023-conv")
    names = [part.name for part in site.spec.partitions]
    return site, trace, {name: site.classes_of(name, trace.input_tokens, trace.output_tokens) for name in names}


def test_plans_are_the_planners_for_the_peaks_that_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "lab.serving.plans.plan_pools", lambda problem, *a, **k: asked.append(problem) or plan_pools(problem)
    )
    site, trace, classes = paper()
    rates = PlaceRates(1_800.0, np.array([[900.0, 100.0], [500.0, 500.0], [700.0, 700.0]]), ("loc1", "loc2", "loc3"))

    perfect = make_plans(site, rates, trace, classes)
    last = make_plans(site, rates, trace, classes, forecast=Forecast.LAST)
    held = make_plans(site, rates, trace, classes, replan=False)

    assert [plan.from_s for plan in perfect] == [0, 1_800]
    assert [plan.from_s for plan in held] == [0]
    assert asked[0].rates[:, 0].tolist() == [900, 500, 700]
    assert asked[1].rates[:, 0].tolist() == [100, 500, 700]
    assert asked[1].running.sum() == sum(each.count for each in perfect[0].instances)
    first, then = (problem.partitions[1].demand_qps for problem in asked[:2])
    assert asked[3].partitions[1].demand_qps[:, 0].tolist() == first.max(axis=1).tolist()
    assert then.tolist() != first.tolist()
    assert last[0].instances == perfect[0].instances


def test_rates_that_do_not_fit_five_minutes_are_refused() -> None:
    site, trace, classes = paper()
    with pytest.raises(TraceFormatError, match="do not divide"):
        make_plans(site, PlaceRates(70.0, np.ones((3, 100)), ("a", "b", "c")), trace, classes)


def test_the_papers_ordering_of_clocks_holds() -> None:
    run = ServingRun("azure-2023-conv", carbon_hour=11.5, qps_scale=0.4)
    inputs = run.inputs()
    fixed = replace(run, options=replace(run.options, frequency=Frequency.FIXED)).of(*inputs)
    miad = run.of(*inputs)

    assert fixed["requests"] == miad["requests"] == pytest.approx(0.4 * 19_366, rel=0.02)
    assert 0.4 < miad["energy_wh"] / fixed["energy_wh"] < 0.7
    assert miad["e2e_mean_s"] > fixed["e2e_mean_s"]
    assert miad["violation_rate"] < 0.02


def test_an_unknown_partition_is_named() -> None:
    with pytest.raises(TraceFormatError, match="has no partition 'c'; it has a, b"):
        ServingRun("azure-2023-conv", partition="c").inputs()
