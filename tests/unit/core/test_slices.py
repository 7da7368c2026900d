"""Jobs on slices: which slice each gets, that nobody else sees them, and that no slice is given to two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from lab.recording import snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Hold, Plan, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import QUEUED, SliceJob, SliceUnit, Snapshot
from services.core.cycle.validate import check_plan
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.mig import slice_index
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies.registry import POLICIES, build_policy
from tests.support.builders import a_job, a_node, a_snapshot, story
from tests.support.shared import shared
from tests.support.strategies import snapshots


def unit(gpu: int, start: int, sevenths: int, *, free: bool = True, node: int = 0) -> SliceUnit:
    return SliceUnit(node, slice_index(gpu, start), gpu, sevenths, free, f"MIG-{node}-{gpu}-{start}")


def on_slices(snapshot: Snapshot, units: Sequence[SliceUnit], **sizes: int) -> Snapshot:
    """Return the snapshot with these queued jobs as jobs on slices of these sizes, in this order."""
    of_size = np.array([each.sevenths for each in units], dtype=np.int64)
    jobs = tuple(SliceJob(JobId(name), size, of_size == size) for name, size in sizes.items())
    return replace(snapshot, slice_units=tuple(units), slice_jobs=jobs)


def planned(snapshot: Snapshot) -> dict[str, str]:
    return story(run_cycle(build_policy("fifo", {}), snapshot, None).plan)


def test_each_gets_a_slice_of_its_size_and_training_the_gpus() -> None:
    jobs = [a_job("small"), a_job("large"), a_job("train", min_gpus=2)]
    units = [unit(2, 0, 4), unit(2, 4, 2), unit(2, 6, 1)]

    assert planned(on_slices(a_snapshot(jobs, [a_node(gpus=2)]), units, small=1, large=4)) == {
        "small": "start n0:1046",
        "large": "start n0:1040",
        "train": "start n0:0,1",
    }


def test_the_gpu_with_the_most_slices_in_use_is_filled_first() -> None:
    units = [unit(0, 0, 3), unit(0, 4, 3), unit(1, 0, 3), unit(1, 4, 3, free=False)]

    assert planned(on_slices(a_snapshot([a_job("a"), a_job("b")]), units, a=3, b=3)) == {
        "a": "start n0:1032",
        "b": "start n0:1024",
    }


def test_who_gets_none_is_held_with_the_reason() -> None:
    jobs = [a_job(name) for name in ("first", "second", "other")]
    snapshot = on_slices(a_snapshot(jobs), [unit(0, 0, 3)], first=3, second=3, other=2)

    assert planned(snapshot) == {
        "first": "start n0:1024",
        "second": f"hold {Reason.NOT_ENOUGH_FREE_SLICES}",
        "other": f"hold {Reason.NO_SUCH_SLICE}",
    }


def test_a_slice_counts_as_a_gpu_of_its_tenants_quota() -> None:
    jobs = [a_job("held", gpus=1, tenant="t"), a_job("a", tenant="t"), a_job("b", tenant="t"), a_job("c", tenant="t")]
    units = [unit(3, 0, 3), unit(3, 4, 3)]
    snapshot = on_slices(a_snapshot(jobs, [a_node(gpus=3)], quota={"t": 2}), units, a=3, b=3)

    found = planned(snapshot)

    assert found == {"a": "start n0:1048", "b": f"hold {Reason.TENANT_QUOTA}", "c": f"hold {Reason.TENANT_QUOTA}"}


@pytest.mark.parametrize(
    ("devices", "said"),
    [((1_028,), "may not run"), ((1_024, 1_028), "cannot have 2 GPUs"), ((0,), "may not run"), ((1_032,), "not free")],
)
def test_a_plan_that_gives_a_job_another_slice_is_refused(devices: tuple[int, ...], said: str) -> None:
    units = [unit(0, 0, 3), unit(0, 4, 2), unit(1, 0, 3, free=False)]
    snapshot = on_slices(a_snapshot([a_job("a")]), units, a=3)
    placement = Placement((NodeShare(NodeId("n0"), devices),))
    plan = Plan(snapshot.version, (Start(JobId("a"), placement, Reason.IN_ORDER),))

    with pytest.raises(PlanError, match=said):
        check_plan(snapshot, plan)


def test_one_slice_is_not_given_to_two() -> None:
    snapshot = on_slices(a_snapshot([a_job("a"), a_job("b")]), [unit(0, 0, 3)], a=3, b=3)
    placement = Placement((NodeShare(NodeId("n0"), (1_024,)),))
    starts = tuple(Start(JobId(name), placement, Reason.IN_ORDER) for name in ("a", "b"))

    with pytest.raises(PlanError, match="not free for job b"):
        check_plan(snapshot, Plan(snapshot.version, starts))


@st.composite
def partly_on_slices(draw: st.DrawFn) -> Snapshot:
    """Draw a cluster with slices, which some of the jobs that wait are to have."""
    snapshot = draw(snapshots())
    jobs = snapshot.jobs
    waits = [jobs.ids[at] for at in np.flatnonzero((jobs.phase == QUEUED) & (jobs.min_gpus == 1))]
    chosen = draw(st.lists(st.sampled_from(waits), unique=True)) if waits else []
    units = [
        unit(20, start, 1, free=draw(st.booleans()), node=node)
        for node in range(len(snapshot.nodes))
        for start in range(draw(st.integers(0, 3)))
    ]
    return on_slices(snapshot, units, **{str(job): draw(st.sampled_from([1, 2])) for job in chosen})


@pytest.mark.parametrize("name", POLICIES)
@shared(seen=partly_on_slices())
def test_no_policy_is_disturbed_by_jobs_on_slices(name: str, seen: Snapshot) -> None:
    """Every job is planned at most once and every slice given at most once: ``run_cycle`` checks the plan."""
    policy = build_policy(name, {})

    plan = run_cycle(policy, seen, policy.initial()).plan

    done = {action.job_id: action for action in plan.actions if isinstance(action, Start | Hold)}
    assert done.keys() >= {each.job_id for each in seen.slice_jobs}
    for job in seen.slice_jobs:
        if not job.units.any():
            assert done[job.job_id] == Hold(job.job_id, Reason.NO_SUCH_SLICE)
    again = run_cycle(policy, snapshot_from_json(snapshot_to_json(seen)), policy.initial()).plan
    assert again == plan
