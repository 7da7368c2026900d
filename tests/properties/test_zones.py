"""Where gangs start when free GPUs lie in several zones, under every policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.cycle.plan import Hold, Preempt, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.cycle.zones import Zones
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.domain.transfers import Transfer
from services.core.policies.registry import FAIR, POLICIES, build_policy
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot, by_zone, flat_curve, hourly_curve
from tests.support.shared import shared

NAMES = (*POLICIES, FAIR + "las")


@st.composite
def waiting_in_zones(draw: st.DrawFn) -> Snapshot:
    """Draw empty nodes in two or three zones and jobs that wait, some with checkpoints, some with data in one zone."""
    zones = draw(st.integers(2, 3))
    nodes = [
        a_node(f"n{at}", gpus=draw(st.integers(1, 4)), zone=at % zones) for at in range(draw(st.integers(zones, 6)))
    ]
    jobs = [
        a_job(
            f"j{at}",
            min_gpus=draw(st.sampled_from([1, 1, 2, 4])),
            remaining_s=draw(st.sampled_from([float("nan"), 600.0, 7_200.0, 200_000.0])),
            gpu_power_w=draw(st.sampled_from([float("nan"), 100.0, 300.0])),
        )
        for at in range(draw(st.integers(1, 6)))
    ]
    hours = st.lists(st.integers(0, 600), min_size=6, max_size=6)
    curves = [hourly_curve(draw(hours), start_s=NOON_S - 7_200.0) for _ in range(zones)]
    seen = by_zone(a_snapshot(jobs, nodes, curve=curves[0], more_curves=curves[1:]))
    held = draw(st.lists(st.integers(-1, zones - 1), min_size=len(jobs), max_size=len(jobs)))
    eligible = seen.jobs.eligible.copy()
    for job, at in enumerate(draw(st.lists(st.integers(-3, zones - 1), min_size=len(jobs), max_size=len(jobs)))):
        eligible[job] &= (at < 0) | (np.arange(eligible.shape[1]) == at)
    table = replace(seen.jobs, data_zone=np.array(held), eligible=eligible)
    return replace(seen, jobs=table, trigger=draw(st.sampled_from(list(Trigger))))


@pytest.mark.parametrize("name", NAMES)
@shared(snapshot=waiting_in_zones())
def test_no_gang_starts_where_it_emits_more_than_on_gpus_that_stay_free(name: str, snapshot: Snapshot) -> None:
    policy, jobs, nodes = build_policy(name, {}), snapshot.jobs, snapshot.nodes

    plan = run_cycle(policy, snapshot, policy.initial()).plan

    starts = [action for action in plan.actions if isinstance(action, Start)]
    free = np.bincount(nodes.zone, nodes.free_gpus, len(snapshot.outlooks))
    for start in starts:
        on = {int(nodes.zone[nodes.index[share.node_id]]) for share in start.placement.shares}
        assert len(on) == 1, "a gang does not span zones"
        free[on.pop()] -= start.gpus
    for hold in (action for action in plan.actions if isinstance(action, Hold)):
        free[jobs.eligible[jobs.index[hold.job_id]]] = 0  # policies may keep what is free there for a gang that waits
    for start in starts:
        job = jobs.index[start.job_id]
        grams = Zones(snapshot).grams(job)
        at = int(nodes.zone[nodes.index[start.placement.shares[0].node_id]])
        assert jobs.eligible[job, at], "data stay where they are"
        better = (grams < grams[at]) & (free >= start.gpus) & jobs.eligible[job]
        assert not better.any()


@given(
    left_h=st.floats(0.05, 40.0),
    watts=st.floats(50.0, 400.0),
    here=st.floats(0.0, 900.0),
    there=st.floats(0.0, 900.0),
    transfer=st.builds(Transfer, st.floats(0.0, 100.0), st.floats(0.1, 100.0), st.floats(0.0, 0.1)),
)
def test_a_running_job_moves_only_where_all_it_costs_is_less(
    left_h: float, watts: float, here: float, there: float, transfer: Transfer
) -> None:
    job = a_job("a", on={"n0": (0,)}, gpu_power_w=watts, remaining_s=left_h * 3_600.0)
    seen = a_snapshot(
        [job], [a_node("n0"), a_node("n1", zone=1)], curve=flat_curve(here), more_curves=[flat_curve(there)]
    )
    snapshot = replace(by_zone(seen), transfer=transfer)
    policy = build_policy("joint", {"host_w": 0.0, "hour_share": 0.0, "restart_s": 120.0})

    plan = run_cycle(policy, snapshot, policy.initial()).plan

    kw, lost_h = watts / 1_000.0, 120.0 / 3_600.0 + transfer.seconds / 3_600.0
    moved = there * kw * (left_h + lost_h) + (here + there) / 2 * transfer.energy_kwh
    stops = [action for action in plan.actions if isinstance(action, Preempt)]
    if abs(moved - here * kw * left_h) > 1e-6 * (moved + 1.0):
        assert stops == [Preempt(JobId("a"), Reason.GREENER_ZONE, 1)] * (moved < here * kw * left_h)
