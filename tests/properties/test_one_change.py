"""What is named as the one change that would start a waiting job does start it, under every policy of the product.

The rounds that are held against the answer are of clusters built anew, with the changed job's own row in place of the
one that waits, and know nothing of the code that replays.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from services.core.cycle.plan import Hold
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.orders import PowerOrder
from services.core.policies import one_change as module
from services.core.policies.one_change import Change, Elsewhere, Predicted, changes, one_change, resubmitted
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import POLICIES, build_policy
from tests.support.builders import NOON_S, JobRow, NodeRow, a_job, a_node, a_snapshot, hourly_curve, started
from tests.support.strategies import MODELS

HOUR_S = 3_600.0
VARIANTS = [
    ("a-srpt", {}),
    ("a-srpt", {"others": "pass"}),
    ("fifo", {}),
    ("fifo", {"gang": "max", "backfill": True}),
    ("green", {}),
    ("green", {"slack_s": 86_400.0}),
    ("joint", {}),
    ("joint", {"slack_s": 86_400.0}),
    ("las", {}),
    ("powerflow", {}),
    ("fair+las", {}),
]
WAITS = JobId("waits")
AGAIN = JobId("zz-again")
CLUSTERS, ALL_CLUSTERS = 55, 4_200
"""Of each variant, by seed: with them some 150 changes are named, and more than 10,000."""


@dataclass(frozen=True)
class Cluster:
    """A cluster with a job that waits, before it is made into snapshots."""

    jobs: list[JobRow]
    nodes: list[NodeRow]
    waits: JobRow
    flex: float  #: The class of the job that waits
    within: int | None  #: The level of the network that it asks for
    finish: Callable[[Snapshot], Snapshot]

    def snapshot(self, trigger: Trigger, row: JobRow, flex: float, within: int | None) -> Snapshot:
        """Return the cluster with a job as the last of those that wait, with its class and its level."""
        made = self.finish(a_snapshot([*self.jobs, row], self.nodes, trigger=trigger, curve=CURVES[len(self.jobs)]))
        flexes = made.jobs.flex.copy()
        flexes[-1] = flex
        levels = {} if within is None else {row.name: within}
        return replace(made, jobs=replace(made.jobs, flex=flexes), within={**made.within, **levels})


def curve(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(20, 600) for _ in range(48)]


CURVES = [hourly_curve(curve(seed), start_s=NOON_S - HOUR_S) for seed in range(12)]


def a_cluster(draw: random.Random) -> Cluster:
    nodes = [
        a_node(f"n{at}", gpus=draw.randint(1, 6), model=draw.choice(MODELS), schedulable=draw.random() < 0.9)
        for at in range(draw.randint(1, 4))
    ]
    left = Counter[str]()
    for node in nodes:
        left[node.model] += node.gpus
    jobs: list[JobRow] = []
    for at in range(draw.randint(1, 6)):
        model, gpus = draw.choice(nodes).model, draw.choice((1, 2, 3, 4))
        phase = draw.choices(list(Phase), (1, 1, 5, 1))[0] if gpus <= left[model] else Phase.QUEUED
        left[model] -= gpus if phase is not Phase.QUEUED else 0
        job = a_job(
            f"j{at}",
            gpus=gpus if phase is not Phase.QUEUED else 0,
            phase=phase,
            min_gpus=gpus,
            max_gpus=gpus + draw.choice((0, 0, 2)),
            models=draw.choice((None, (model,))) if phase is Phase.QUEUED else (model,),
            tenant=draw.choice(("red", "blue")),
            preemptible=draw.random() < 0.7,
            priority=draw.choice((0, 0, 0, 1, -1)),
            submitted_s=NOON_S - draw.randint(60, 90_000),
            attained_gpu_s=draw.choice((0.0, 0.0, 900.0, 9_000.0)),
            carbon_gco2=draw.choice((0.0, 40.0, 400.0)),
            remaining_s=draw.choice((math.nan, 600.0, 7_200.0, 40_000.0)),
            deadline_s=draw.choice((math.inf, math.inf, NOON_S + 20 * HOUR_S)),
        )
        jobs.append(replace(job, waiting_since_s=job.submitted_s))
    low = draw.choice((1, 2, 4, 8, 8))
    waits = a_job(
        WAITS,
        min_gpus=low,
        max_gpus=low + draw.choice((0, 0, 0, 2)),
        models=draw.choice((None, MODELS[:1], MODELS[1:], MODELS[1:])),
        tenant=draw.choice(("red", "blue")),
        preemptible=draw.random() < 0.7,
        priority=draw.choice((0, 0, 1)),
        submitted_s=NOON_S - draw.randint(60, 90_000),
        gpu_power_w=draw.choice((math.nan, 300.0)),
        remaining_s=draw.choice((math.nan, 600.0, 7_200.0, 40_000.0)),
        deadline_s=draw.choice((math.inf, math.inf, NOON_S + 5 * HOUR_S, NOON_S + 30 * HOUR_S)),
    )
    share, quota = draw.choice((math.inf, math.inf, 0.3, 0.5, 0.7)), draw.choice(({}, {}, {}, {"red": 3}))
    flex = draw.choice((math.nan, 0.0, 0.1))
    has_levels = draw.random() < 0.4
    rack_of = np.array([draw.randint(0, 2) for _ in nodes])
    domains = np.stack((np.arange(len(nodes)), rack_of, np.array([draw.randint(0, 1) for _ in range(3)])[rack_of]), 1)
    requires = {each.name: draw.choice((0, 1, 2)) for each in jobs if draw.random() < 0.2}
    within = draw.choice((0, 1, 2, -1, None))

    def finished(snapshot: Snapshot) -> Snapshot:
        n_models, everything_w = len(snapshot.gpu_models), 400.0 * int(snapshot.nodes.gpus.sum())
        limit_w = share * everything_w
        order = PowerOrder("o", -1, limit_w, limit_w, NOON_S + 60, NOON_S + HOUR_S)
        if has_levels:
            on = replace(snapshot.nodes, domains=domains)
            snapshot = replace(snapshot, nodes=on, levels=("node", "rack", "block"), within=requires)
        return replace(
            snapshot,
            tenant_gpu_quota=quota,
            settable=(frozenset({ControlKind.POWER_LIMIT}),) * n_models,
            limit_range_w=np.tile([100.0, 400.0], (n_models, 1)),
            idle_w=np.full(n_models, 50.0),
            orders=(order,) if share < 1 else (),
        )

    waits = replace(waits, waiting_since_s=waits.submitted_s)
    return Cluster(jobs, nodes, waits, flex, within if has_levels else None, finished)


def named(name: str, parameters: dict[str, object], cluster: Cluster) -> tuple[Change | None, dict[str, Any]]:
    """Return the one change of a cluster's waiting job, and the memory of the policy then, as it is stored."""
    policy = build_policy(name, parameters)
    asked = cluster.waits, cluster.flex, cluster.within
    before = cluster.snapshot(Trigger.ACTIVE, *asked)
    memory = policy.dump(run_under_orders(policy, before, policy.initial()).memory)
    memory = json.loads(json.dumps(memory, allow_nan=False))
    rounds = [cluster.snapshot(trigger, *asked) for trigger in (Trigger.PASSIVE, Trigger.ACTIVE)]
    plan = run_under_orders(policy, rounds[0], policy.load(memory)).plan
    why = next((each.reason for each in plan.actions if isinstance(each, Hold) and each.job_id == WAITS), None)
    if why is None:
        return None, memory
    may, models = cluster.waits.models, rounds[0].gpu_models
    others = [
        Elsewhere(model, np.array([each == model for each in models]), Predicted(5_000.0))
        for model in models
        if may is not None and model not in may
    ]
    if may is not None:  # as of a job whose zone has these models alone
        others.append(Elsewhere(None, np.ones(len(models), dtype=np.bool_), Predicted(5_000.0)))
    fixed = cluster.waits.min_gpus == cluster.waits.max_gpus
    found = one_change(
        policy,
        rounds,
        policy.load(memory),
        WAITS,
        changes(rounds[0], WAITS, why=why, one_size=fixed, elsewhere=others),
        as_id=AGAIN,
        predicted=Predicted(cluster.waits.remaining_s * cluster.waits.min_gpus),
    )
    return found, memory


def asked_for(cluster: Cluster, change: Change) -> tuple[JobRow, float, int | None]:
    """Return the row, the class and the level of the job that its user would submit with a change."""
    row = replace(cluster.waits, name=AGAIN, submitted_s=NOON_S, waiting_since_s=NOON_S)
    if change.gpus is not None:
        gpu_s = row.remaining_s * row.min_gpus
        row = replace(row, min_gpus=change.gpus, max_gpus=change.gpus, remaining_s=gpu_s / change.gpus)
    if change.elsewhere is not None:
        model = change.elsewhere.gpu_model
        row = replace(row, models=None if model is None else (model,), remaining_s=5_000.0 / row.min_gpus)
    if change.deadline_s is not None:
        row = replace(row, deadline_s=change.deadline_s)
    within = cluster.within if change.within is None else change.within if change.within < 3 else None
    return replace(row, preemptible=row.preemptible or change.preemptible), change.flex or cluster.flex, within


def kind_of(change: Change) -> str:
    return next(each for each, value in vars(change).items() if value is not None and value is not False)


def held_against_rounds(name: str, parameters: dict[str, object], seeds: range) -> Counter[str]:
    """Return how many changes of each kind were named; all of them were tried, and started the job in either round."""
    kinds = Counter[str]()
    for seed in seeds:
        cluster = a_cluster(random.Random(seed))
        change, memory = named(name, parameters, cluster)
        if change is None:
            continue
        policy, asked = build_policy(name, parameters), asked_for(cluster, change)
        for trigger in (Trigger.PASSIVE, Trigger.ACTIVE):
            plan = run_under_orders(policy, cluster.snapshot(trigger, *asked), policy.load(memory)).plan
            assert AGAIN in started(plan), (seed, trigger, change)
        kinds[kind_of(change)] += 1
    return kinds


under_every_policy = pytest.mark.parametrize(
    ("name", "parameters"), VARIANTS, ids=[f"{name}-{at}" for at, (name, _) in enumerate(VARIANTS)]
)


@under_every_policy
def test_what_is_named_starts_the_job(name: str, parameters: dict[str, object]) -> None:
    assert held_against_rounds(name, parameters, range(CLUSTERS))


@pytest.mark.slow
@under_every_policy
def test_what_is_named_starts_the_job_ten_thousand_times(name: str, parameters: dict[str, object]) -> None:
    kinds = held_against_rounds(name, parameters, range(CLUSTERS, CLUSTERS + ALL_CLUSTERS))

    print(name, parameters, dict(kinds))
    assert kinds.total() > ALL_CLUSTERS / 25


def test_all_policies_of_the_product_are_asked() -> None:
    assert {name for name, _ in VARIANTS} >= set(POLICIES)


def keeps_its_place(snapshot: Snapshot, *arguments: Any) -> Snapshot:
    """Return what ``resubmitted`` does, for a job that would go on in its place in the queue."""
    made = resubmitted(snapshot, *arguments)
    return replace(made, jobs=replace(made.jobs, submitted_s=snapshot.jobs.submitted_s))


def test_a_rule_that_forgets_the_place_in_the_queue_is_found_out() -> None:
    with patch.object(module, "resubmitted", keeps_its_place), pytest.raises(AssertionError, match="Change"):
        held_against_rounds("fifo", {}, range(600))


def test_a_rule_that_replays_one_round_alone_is_found_out() -> None:
    def of_the_first(*arguments: Any, **more: Any) -> Change | None:
        policy, rounds, *rest = arguments
        return module.one_change(policy, rounds[:1], *rest, **more)

    with patch(f"{__name__}.one_change", of_the_first), pytest.raises(AssertionError, match="Change"):
        held_against_rounds("las", {}, range(200, 600))
