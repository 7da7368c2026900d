"""What ``joint`` makes of what it knows: graphs of gangs, and how sure predictions and forecasts are."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from lab.recording import snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Hold
from services.core.cycle.run_cycle import CycleResult, run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.domain.prices import PriceCurve
from services.core.parallel.graph import JobGraph, data_parallel
from services.core.parallel.iteration import Network
from services.core.policies.joint.memory import JointMemory
from services.core.policies.joint.quantiles import at_quantile, left_of, length_factors
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, NodeRow, a_job, a_node, a_snapshot, hourly_curve, started, story

HOUR_S = 3600.0
HEAVY, LIGHT = data_parallel(4, 4e9, 0.1), data_parallel(4, 1e3, 0.1)
SCATTERED = [a_node(f"n{at}", gpus=4) for at in range(4)]
ONE_EACH = [a_job(f"r{at}", on={f"n{at}": (0, 1, 2)}, remaining_s=HOUR_S) for at in range(4)]


def shown(
    jobs: list[JobRow], nodes: list[NodeRow], graph: JobGraph | None, *, at_s: float = 0.0, trigger: Trigger
) -> Snapshot:
    """Return a snapshot ``at_s`` after noon in which job ``a`` has a graph."""
    snapshot = a_snapshot(jobs, nodes, now_s=NOON_S + at_s, trigger=trigger)
    graphs = {} if graph is None else {JobId("a"): graph}
    return replace(snapshot, graphs=graphs, network=Network(server_gpus=4))


def offered(
    graph: JobGraph | None, *, at_s: float = 0.0, memory: JointMemory | None = None, **parameters: object
) -> CycleResult[JointMemory]:
    """Return a round in which a gang of four finds one GPU free on each of four nodes."""
    policy = build_policy("joint", {"sleep_after_s": None, **parameters})
    gang = a_job("a", min_gpus=4, remaining_s=600.0, submitted_s=NOON_S)
    snapshot = shown([*ONE_EACH, gang], SCATTERED, graph, at_s=at_s, trigger=Trigger.PASSIVE)
    result = run_cycle(policy, snapshot, memory or policy.initial())
    assert policy.load(json.loads(json.dumps(policy.dump(result.memory)))) == result.memory
    return result


def test_a_gang_declines_gpus_it_would_crawl_on_for_as_long_as_that_would_take() -> None:
    first = offered(HEAVY)
    (hold,) = (action for action in first.plan.actions if isinstance(action, Hold))
    assert story(first.plan)["a"] == "hold better_placement"
    assert hold.expected_start_s == first.plan.look_again_s
    assert first.plan.look_again_s is not None
    delay_s = first.plan.look_again_s - NOON_S
    assert delay_s > 600.0, "it would run at less than half its speed"

    later = offered(HEAVY, at_s=delay_s / 2, memory=first.memory)
    assert later.plan.look_again_s == pytest.approx(first.plan.look_again_s), "it waits since noon"
    due = offered(HEAVY, at_s=delay_s, memory=later.memory)
    assert set(started(due.plan)) == {"a"}

    gone = a_snapshot([], SCATTERED)
    policy = build_policy("joint", {"sleep_after_s": None})
    assert not run_cycle(policy, replace(gone, graphs={JobId("b"): HEAVY}), later.memory).memory.declined_since_s


def test_those_behind_a_gang_that_declines_go_on() -> None:
    """Two of the four GPUs: the gang waits, and no GPU is idle for it; without anything known of it, they wait."""
    gang = a_job("a", min_gpus=4, remaining_s=600.0, submitted_s=NOON_S - 60.0)
    behind = [a_job(name, remaining_s=9_000.0, submitted_s=NOON_S) for name in ("b", "c")]
    policy = build_policy("joint", {"sleep_after_s": None})
    plans = {
        known: run_cycle(policy, shown([*ONE_EACH, gang, *behind], SCATTERED, graph, trigger=Trigger.ACTIVE),
                         policy.initial()).plan
        for known, graph in ((True, HEAVY), (False, None))
    }  # fmt: skip

    assert set(started(plans[True])) == {"b", "c"}
    assert story(plans[True])["a"] == "hold better_placement"
    assert set(started(plans[False])) == {"a"}


@pytest.mark.parametrize(
    ("graph", "parameters"),
    [(LIGHT, {}), (None, {}), (HEAVY, {"placement": "cluster"}), (HEAVY, {"least_speed_share": 0.0})],
    ids=["light", "unknown", "as the cluster", "whatever there is"],
)
def test_who_takes_what_there_is(graph: JobGraph | None, parameters: dict[str, object]) -> None:
    assert set(started(offered(graph, **parameters).plan)) == {"a"}


def test_a_gang_with_a_graph_sits_on_the_fewest_nodes() -> None:
    """A-SRPT sends a gang of few bytes to the emptiest nodes, and leaves whole ones to others."""
    nodes = [a_node("n0", gpus=4), a_node("n1", gpus=3), a_node("n2", gpus=4)]
    jobs = [a_job("r", on={"n0": (0, 1, 2)}), a_job("a", min_gpus=4, remaining_s=0.0)]
    snapshot = shown(jobs, nodes, LIGHT, trigger=Trigger.PASSIVE)
    sat = {}
    for name in ("joint", "a-srpt"):
        policy = build_policy(name, {})
        sat[name] = story(run_cycle(policy, snapshot, policy.initial()).plan)["a"]
    assert sat == {"joint": "start n2:0,1,2,3", "a-srpt": "start n0:3 n1:0,1,2"}


def spread_out(rows: list[JobRow], **spreads: float) -> Snapshot:
    snapshot = a_snapshot(rows, [a_node()])
    return replace(snapshot, length_spreads={JobId(name): spread for name, spread in spreads.items()})


def test_the_quantile_of_a_length_is_the_lognormal_s() -> None:
    """Nine in ten draws of that mean and standard deviation are below."""
    rows = [a_job("known", remaining_s=1_000.0), a_job("other", remaining_s=1_000.0), a_job("new")]
    snapshot = spread_out(rows, known=0.8)
    factors = length_factors(snapshot, 0.9)
    sigma = np.sqrt(np.log1p(0.8**2))
    draws = np.random.default_rng(1).lognormal(-(sigma**2) / 2, sigma, 200_000)
    assert draws.mean() == pytest.approx(1.0, rel=0.01)
    assert factors[0] == pytest.approx(np.quantile(draws, 0.9), rel=0.02)
    assert factors[1:].tolist() == [1.0, 1.0], "no spread is known of them"
    assert length_factors(snapshot, None).tolist() == [1.0, 1.0, 1.0]

    left = left_of(snapshot.jobs, np.ones(3), factors)
    assert left.left_s[:2].tolist() == pytest.approx([1_000.0 * factors[0], 1_000.0])
    assert np.isnan(left.left_s[2]), "unknown stays unknown"


def test_a_longer_length_is_longer_by_what_was_done_too() -> None:
    """Of 1,000 s 400 are done; of 2,000 s, 1,600 are left where that is counted, and 1,200 where progress tells."""
    rows = [
        a_job("held", gpus=2, min_gpus=2, attained_gpu_s=800.0, progress=np.nan, remaining_s=600.0),
        a_job("tells", gpus=1, attained_gpu_s=400.0, progress=0.4, remaining_s=600.0),
    ]
    left = left_of(a_snapshot(rows, [a_node()]).jobs, np.ones(2), np.full(2, 2.0))
    assert left.left_s.tolist() == pytest.approx([1_600.0, 1_200.0])


def test_a_prediction_of_nothing_is_none() -> None:
    """So groups that are new are predicted, and so jobs look that outlast their predictions."""
    rows = [
        a_job("new", remaining_s=0.0, deadline_s=NOON_S + 6 * HOUR_S),
        a_job("goes on", gpus=1, remaining_s=0.0, progress=0.5, attained_gpu_s=1_800.0),
    ]
    left = left_of(a_snapshot(rows, [a_node()]).jobs, np.ones(2))
    assert np.isnan(left.left_s[0])
    assert left.left_s[1] == pytest.approx(1_800.0)
    policy = build_policy("joint", {})
    greener = hourly_curve([300.0] * 25 + [100.0] * 47)
    assert set(started(run_cycle(policy, a_snapshot(rows, [a_node()], curve=greener), policy.initial()).plan)) == {
        "new"
    }


def unsure(rows: list[JobRow], *, by: float, hours: int = 72, green_h: int = 2) -> Snapshot:
    """Return a snapshot in which hours from ``green_h`` on are greener by a third, or more or less by ``by``."""
    curve = hourly_curve([300.0] * (24 + green_h) + [200.0] * (hours - 24 - green_h))
    snapshot = a_snapshot(rows, [a_node()], curve=curve)
    middle = curve.intensity_gco2_per_kwh
    ahead = np.where(curve.times_s > NOON_S, by, 0.0)
    (outlook,) = snapshot.outlooks
    return replace(snapshot, outlooks=(replace(outlook, low=middle - ahead, high=middle + ahead),))


def test_the_intensity_at_a_quantile_lies_between_the_middle_and_the_decile() -> None:
    snapshot = unsure([], by=100.0)
    (sure,), (middle,), (bold,) = (at_quantile(snapshot, each).outlooks for each in (0.75, 0.5, 0.1))
    share = NormalDist().inv_cdf(0.75) / NormalDist().inv_cdf(0.9)
    later = snapshot.outlooks[0].curve.times_s > NOON_S
    base = snapshot.outlooks[0].curve.intensity_gco2_per_kwh
    assert middle is snapshot.outlooks[0]
    assert (sure.curve.intensity_gco2_per_kwh - base)[later] == pytest.approx(100.0 * share)
    assert (bold.curve.intensity_gco2_per_kwh - base)[later] == pytest.approx(-100.0)
    assert not (sure.curve.intensity_gco2_per_kwh - base)[~later].any(), "what is measured is sure"
    with pytest.raises(DomainError, match="one low and one high"):
        CarbonOutlook("GB", snapshot.outlooks[0].signal, sure.curve, low=base[:3], high=base[:3])


@pytest.mark.parametrize(
    ("by", "parameters", "waits"),
    [(150.0, {}, True), (150.0, {"intensity_quantile": 0.9}, False), (20.0, {"intensity_quantile": 0.9}, True)],
    ids=["the middle counts", "not sure to be greener", "sure enough"],
)
def test_jobs_wait_only_for_hours_that_are_sure_enough(by: float, parameters: dict[str, object], waits: bool) -> None:
    job = a_job("a", remaining_s=HOUR_S, submitted_s=NOON_S - 60.0)
    policy = build_policy("joint", {"slack_s": 43_200.0, "slack_share": 100.0, "hour_wh": 0.0, **parameters})
    memory = run_cycle(policy, unsure([job], by=by), policy.initial()).memory
    assert memory.held == ({"a"} if waits else set())


@pytest.mark.parametrize(("ahead_s", "waits"), [(172_800.0, False), (345_600.0, True)])
def test_how_far_ahead_hours_are_compared(ahead_s: float, waits: bool) -> None:
    job = a_job("a", remaining_s=HOUR_S, submitted_s=NOON_S - 60.0, deadline_s=NOON_S + 90 * HOUR_S)
    policy = build_policy("joint", {"hour_wh": 0.0, "ahead_s": ahead_s})
    snapshot = unsure([job], by=0.0, hours=24 + 96, green_h=60)
    assert run_cycle(policy, snapshot, policy.initial()).memory.held == ({"a"} if waits else set())


def test_by_submission_the_first_go_first() -> None:
    rows = [
        a_job("old and long", remaining_s=9_000.0, submitted_s=NOON_S - 600.0),
        a_job("short", remaining_s=900.0, submitted_s=NOON_S - 60.0),
        a_job("wished", remaining_s=9_000.0, submitted_s=NOON_S, priority=1),
    ]
    policy = build_policy("joint", {"order": "submitted"})
    active = run_cycle(policy, a_snapshot(rows, [a_node(gpus=1)]), policy.initial())
    assert list(active.memory.sizes) == ["wished", "old and long", "short"]
    fresh = a_snapshot([*rows[:2], a_job("new", submitted_s=NOON_S)], [a_node(gpus=2)], trigger=Trigger.PASSIVE)
    assert set(started(run_cycle(policy, fresh, active.memory).plan)) == {"old and long", "short"}


def test_what_is_known_of_spreads_is_recorded() -> None:
    snapshot = replace(unsure([a_job("a", remaining_s=9.0)], by=30.0), length_spreads={JobId("a"): 0.4})
    again = snapshot_from_json(json.loads(json.dumps(snapshot_to_json(snapshot))))
    assert again.length_spreads == {"a": 0.4}
    (was,), (now) = snapshot.outlooks, again.outlooks
    assert (now[0].low, now[0].high) == (pytest.approx(was.low), pytest.approx(was.high))


def test_what_electricity_costs_is_recorded() -> None:
    snapshot = unsure([a_job("a", remaining_s=9.0)], by=30.0)
    prices = PriceCurve(NOON_S - NOON_S % HOUR_S, np.array([0.3, -0.1]))
    priced = replace(snapshot, outlooks=(replace(snapshot.outlooks[0], prices=prices),))
    (again,) = snapshot_from_json(json.loads(json.dumps(snapshot_to_json(priced)))).outlooks
    assert again.prices is not None
    assert (again.prices.start_s, again.prices.per_kwh.tolist()) == (prices.start_s, [0.3, -0.1])
