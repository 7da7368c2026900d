"""Given a ranking and a cluster, this plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle import sifting
from services.core.cycle.plan import Hold, Plan
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.cycle.validate import check_plan
from tests.support.builders import a_job, a_node, a_snapshot, story

NOW, LATER, NEVER = Preemption.NOW, Preemption.LATER, Preemption.NEVER


def plan_for(snapshot: Snapshot, wanted: Sequence[tuple[str, int]], preemption: Preemption, **options: bool) -> Plan:
    """Reconcile a ranking given as (job, size) pairs, and check the plan."""
    index = {job_id: at for at, job_id in enumerate(snapshot.jobs.ids)}
    order = np.array([index[name] for name, _ in wanted], dtype=np.int64)
    sizes = np.array([size for _, size in wanted], dtype=np.int64)
    plan = reconcile(snapshot, Ranking(order, sizes), preemption=preemption, **options)
    check_plan(snapshot, plan)
    return plan


def test_free_devices_are_filled_in_rank_order() -> None:
    snapshot = a_snapshot([a_job("a"), a_job("b", min_gpus=2), a_job("c", min_gpus=2)], [a_node(gpus=4)])

    plan = plan_for(snapshot, [("c", 2), ("a", 1), ("b", 2)], NOW)

    assert story(plan) == {"c": "start n0:0,1", "a": "start n0:2", "b": "hold not_enough_free_gpus"}


def test_a_gang_that_does_not_fit_is_skipped_and_lower_ranks_fill_in() -> None:
    snapshot = a_snapshot([a_job("run", gpus=2, preemptible=False), a_job("wide", min_gpus=3), a_job("slim")])

    plan = plan_for(snapshot, [("wide", 3), ("slim", 1), ("run", 2)], NOW)

    assert story(plan) == {"wide": "hold not_enough_free_gpus", "slim": "start n0:2"}


def test_without_backfill_nothing_starts_below_a_waiting_gang() -> None:
    snapshot = a_snapshot([a_job("run", gpus=2), a_job("wide", min_gpus=3), a_job("slim")])

    plan = plan_for(snapshot, [("wide", 3), ("slim", 1)], NEVER, backfill=False)

    assert story(plan) == {"wide": "hold not_enough_free_gpus", "slim": "hold not_enough_free_gpus"}


def test_without_backfill_other_gpu_models_stay_open() -> None:
    nodes = [a_node("n0", gpus=1, model="A100"), a_node("n1", gpus=2, model="V100")]
    jobs = [
        a_job("run", on={"n0": (0,)}),
        a_job("a", models=("A100",)),
        a_job("b", models=("V100",)),
        a_job("c", models=("A100", "V100")),
    ]

    plan = plan_for(a_snapshot(jobs, nodes), [("a", 1), ("b", 1), ("c", 1)], NEVER, backfill=False)

    assert story(plan) == {"a": "hold not_enough_free_gpus", "b": "start n1:0", "c": "start n1:1"}


def test_a_job_that_stops_may_claim_another_gpu_model_from_jobs_behind_it() -> None:
    nodes = [a_node("n0", gpus=1, model="A100"), a_node("n1", gpus=2, model="V100")]
    stopping = a_job("a", models=("A100", "V100"), phase=Phase.PREEMPTING, on={"n0": (0,)})
    snapshot = a_snapshot([stopping, a_job("run", gpus=2, on={"n1": (0, 1)})], nodes)

    assert story(plan_for(snapshot, [("a", 1), ("run", 2)], NOW)) == {"run": "preempt outranked -> 2"}


def test_an_active_round_preempts_what_is_outranked() -> None:
    snapshot = a_snapshot([a_job("low", gpus=3), a_job("high", min_gpus=2), a_job("mid", gpus=1)])

    plan = plan_for(snapshot, [("high", 2), ("mid", 1), ("low", 3)], NOW)

    assert story(plan) == {"low": "preempt outranked -> 3", "high": "hold waiting_for_release"}


def test_a_passive_round_leaves_everything_that_holds_gpus() -> None:
    snapshot = a_snapshot([a_job("low", gpus=3), a_job("high", min_gpus=2), a_job("slim")], trigger=Trigger.PASSIVE)

    plan = plan_for(snapshot, [("high", 2), ("slim", 1), ("low", 3)], LATER)

    assert story(plan) == {"slim": "start n0:3", "high": "hold waiting_for_round"}


def test_a_job_that_would_not_get_in_at_the_next_round_either_is_short_of_gpus() -> None:
    snapshot = a_snapshot([a_job("best", gpus=3), a_job("wide", min_gpus=2), a_job("low", gpus=1)])

    assert story(plan_for(snapshot, [("best", 3), ("wide", 2), ("low", 1)], LATER)) == {
        "wide": "hold not_enough_free_gpus"
    }
    assert story(plan_for(snapshot, [("best", 3), ("wide", 2), ("low", 1)], NEVER)) == {
        "wide": "hold not_enough_free_gpus"
    }


def test_released_devices_are_claimed_in_rank_order_before_they_are_free() -> None:
    jobs = [
        a_job("stopping", gpus=2, phase=Phase.PREEMPTING),
        a_job("run", gpus=1),
        a_job("first", min_gpus=3),
        a_job("second"),
    ]
    snapshot = a_snapshot(jobs, trigger=Trigger.PASSIVE)

    plan = plan_for(snapshot, [("first", 3), ("second", 1), ("run", 1), ("stopping", 2)], NEVER)

    assert story(plan) == {"first": "hold waiting_for_release", "second": "hold not_enough_free_gpus"}


def test_a_lower_rank_starts_if_the_release_covers_the_gang_that_waits() -> None:
    jobs = [a_job("stopping", gpus=3, phase=Phase.PREEMPTING), a_job("first", min_gpus=3), a_job("second")]

    plan = plan_for(a_snapshot(jobs), [("first", 3), ("second", 1), ("stopping", 3)], LATER)

    assert story(plan) == {"first": "hold waiting_for_release", "second": "start n0:3"}


def test_a_stopping_job_claims_its_next_size_at_its_rank() -> None:
    jobs = [a_job("growing", gpus=2, max_gpus=3, phase=Phase.PREEMPTING), a_job("arrival", min_gpus=2)]

    plan = plan_for(a_snapshot(jobs), [("growing", 3), ("arrival", 2)], LATER)

    assert story(plan) == {"arrival": "hold not_enough_free_gpus"}


def test_a_job_that_stops_for_good_claims_nothing() -> None:
    jobs = [a_job("cancelled", gpus=4, phase=Phase.PREEMPTING, models=()), a_job("next", min_gpus=4)]
    snapshot = a_snapshot(jobs, trigger=Trigger.PASSIVE)

    plan = plan_for(snapshot, [("cancelled", 4), ("next", 4)], LATER)

    assert story(plan) == {"next": "hold waiting_for_release"}


@pytest.mark.parametrize("preemption", list(Preemption))
def test_an_empty_house_makes_empty_plans(preemption: Preemption) -> None:
    assert story(plan_for(a_snapshot([], []), [], preemption)) == {}
    assert story(plan_for(a_snapshot([]), [], preemption)) == {}
    assert story(plan_for(a_snapshot([a_job("a")], []), [("a", 1)], preemption)) == {"a": "hold no_eligible_node"}


def test_a_running_job_grows_only_if_its_new_size_fits() -> None:
    jobs = [a_job("a", gpus=2, max_gpus=4), a_job("b", gpus=1, max_gpus=4)]

    plan = plan_for(a_snapshot(jobs), [("a", 3), ("b", 2)], NOW)

    assert story(plan) == {"a": "preempt scale_out -> 3"}


def test_a_running_job_may_grow_to_the_last_device() -> None:
    snapshot = a_snapshot([a_job("a", gpus=2, max_gpus=4)])

    assert story(plan_for(snapshot, [("a", 4)], NOW)) == {"a": "preempt scale_out -> 4"}


def test_a_running_job_shrinks() -> None:
    snapshot = a_snapshot([a_job("a", gpus=3, min_gpus=1)])

    assert story(plan_for(snapshot, [("a", 1)], NOW)) == {"a": "preempt scale_in -> 1"}


def test_a_starting_job_is_never_resized_but_may_be_outranked() -> None:
    job = a_job("a", gpus=2, max_gpus=4, phase=Phase.STARTING)

    assert story(plan_for(a_snapshot([job]), [("a", 3)], NOW)) == {}
    wide = a_snapshot([job, a_job("wide", min_gpus=4)])
    assert story(plan_for(wide, [("wide", 4), ("a", 2)], NOW)) == {
        "a": "preempt outranked -> 2",
        "wide": "hold waiting_for_release",
    }


def test_a_job_that_may_not_be_preempted_stays_whatever_its_rank() -> None:
    snapshot = a_snapshot([a_job("rock", gpus=3, preemptible=False), a_job("high", min_gpus=2)])

    assert story(plan_for(snapshot, [("high", 2), ("rock", 3)], NOW)) == {"high": "hold not_enough_free_gpus"}


def test_a_running_job_outside_the_ranking_is_stopped_and_a_queued_one_waits_for_a_round() -> None:
    snapshot = a_snapshot([a_job("gone", gpus=2, min_gpus=1), a_job("later"), a_job("a")])

    assert story(plan_for(snapshot, [("a", 1)], NOW)) == {
        "gone": "preempt outranked -> 1",
        "a": "start n0:2",
        "later": "hold waiting_for_round",
    }


def test_a_gang_stays_within_one_gpu_model() -> None:
    nodes = [a_node("n0", gpus=2, model="A100"), a_node("n1", gpus=2, model="V100")]
    jobs = [a_job("wide", min_gpus=3), a_job("any", min_gpus=2), a_job("v", models=("V100",))]

    plan = plan_for(a_snapshot(jobs, nodes), [("wide", 3), ("v", 1), ("any", 2)], NOW)

    assert story(plan) == {"v": "start n1:0", "any": "start n0:0,1", "wide": "hold no_eligible_node"}


def test_a_job_of_two_models_goes_where_it_can_start_now() -> None:
    nodes = [a_node("n0", gpus=4, model="A100"), a_node("n1", gpus=1, model="V100")]
    jobs = [a_job("stopping", on={"n0": (0, 1, 2, 3)}, phase=Phase.PREEMPTING), a_job("any")]

    assert story(plan_for(a_snapshot(jobs, nodes), [("any", 1)], LATER)) == {"any": "start n1:0"}


def test_what_one_job_starts_on_is_not_free_for_the_next() -> None:
    nodes = [a_node("n0", gpus=2, model="A100"), a_node("n1", gpus=1, model="V100")]
    jobs = [a_job("stopping", on={"n0": (0,)}, phase=Phase.PREEMPTING), a_job("a"), a_job("b")]

    assert story(plan_for(a_snapshot(jobs, nodes), [("a", 1), ("b", 1)], LATER)) == {
        "a": "start n0:1",
        "b": "start n1:0",
    }


def test_drained_nodes_take_nothing_and_what_runs_there_may_end() -> None:
    nodes = [a_node("n0", gpus=2, schedulable=False), a_node("n1", gpus=1)]
    jobs = [a_job("old", on={"n0": (0,)}, max_gpus=2), a_job("a"), a_job("b")]

    plan = plan_for(a_snapshot(jobs, nodes), [("a", 1), ("b", 1), ("old", 2)], NOW)

    assert story(plan) == {"a": "start n1:0", "b": "hold not_enough_free_gpus"}


def test_what_a_tenant_holds_on_a_drained_node_counts() -> None:
    nodes = [a_node("n0", gpus=2, schedulable=False), a_node("n1", gpus=2)]
    jobs = [
        a_job("old", on={"n0": (0,)}, tenant="a"),
        a_job("new", min_gpus=2, tenant="a"),
        a_job("low", on={"n1": (0, 1)}),
    ]

    plan = plan_for(a_snapshot(jobs, nodes, quota={"a": 2}), [("old", 1), ("new", 2), ("low", 2)], NOW)

    assert story(plan) == {"new": "hold tenant_quota"}


def test_a_tenant_holds_no_more_than_its_quota() -> None:
    jobs = [a_job("a1", tenant="a"), a_job("a2", tenant="a"), a_job("b1", tenant="b")]

    plan = plan_for(a_snapshot(jobs, quota={"a": 1}), [("a1", 1), ("a2", 1), ("b1", 1)], NOW)

    assert story(plan) == {"a1": "start n0:0", "b1": "start n0:1", "a2": "hold tenant_quota"}


def test_a_tenant_gives_up_its_lower_ranked_job_for_its_higher_one() -> None:
    jobs = [a_job("old", gpus=2, tenant="a"), a_job("new", min_gpus=2, tenant="a")]

    plan = plan_for(a_snapshot(jobs, quota={"a": 2}), [("new", 2), ("old", 2)], NOW)

    assert story(plan) == {"old": "preempt tenant_quota -> 2", "new": "hold tenant_quota"}


def test_a_full_cluster_says_so_without_looking_further() -> None:
    jobs = [a_job("run", gpus=4), a_job("a"), a_job("b", models=("H100",)), a_job("c", tenant="c")]

    plan = plan_for(a_snapshot(jobs, quota={"c": 0}), [("a", 1), ("b", 1), ("c", 1)], NEVER)

    assert story(plan) == {"a": "hold not_enough_free_gpus", "b": "hold no_eligible_node", "c": "hold tenant_quota"}


def test_a_gang_the_placer_declines_waits_and_keeps_its_claim() -> None:
    snapshot = a_snapshot([a_job("a", min_gpus=4), a_job("b")])
    ranking = Ranking(np.array([0, 1]), np.array([4, 1]))

    plan = reconcile(snapshot, ranking, preemption=NOW, place=lambda *_: None)

    assert story(plan) == {"a": "hold better_placement", "b": "hold not_enough_free_gpus"}


@pytest.mark.parametrize("seed", range(12))
def test_an_active_round_over_a_long_queue_decides_as_one_that_looks_at_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sifting, "MANY", 0)
    random = np.random.default_rng(seed)
    jobs = [
        a_job(f"r{at}", gpus=int(random.integers(1, 3)), preemptible=bool(random.random() < 0.7)) for at in range(3)
    ]
    jobs += [a_job(f"w{at}", min_gpus=int(random.choice([1, 1, 1, 2, 3]))) for at in range(57)]
    snapshot = a_snapshot(jobs, [a_node("n0", gpus=4), a_node("n1", gpus=4)])
    order = random.permutation(60)
    ranking = Ranking(order, snapshot.jobs.min_gpus[order])

    whole = reconcile(snapshot, ranking, preemption=NOW).actions
    sifted = reconcile(replace(snapshot, reasons=False), ranking, preemption=NOW).actions

    assert sifted == tuple(action for action in whole if not isinstance(action, Hold))
