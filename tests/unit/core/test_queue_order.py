"""The order in which jobs wait is the order in which rounds start them as GPUs come free."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from services.core.cycle.plan import Hold, Plan, Start, queue_order
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Trigger
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.policies.registry import POLICIES, build_policy
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, started
from tests.support.shared import shared

RUNS = a_job("zz-runs", gpus=1, preemptible=False)


@st.composite
def queues(draw: st.DrawFn) -> list[JobRow]:
    """Return jobs of one GPU that wait, in no particular order."""
    return [
        a_job(
            f"j{at}",
            priority=draw(st.integers(-1, 1)),
            submitted_s=NOON_S - draw(st.integers(1, 5)) * 600.0,
            attained_gpu_s=draw(st.sampled_from([0.0, 5_000.0, 50_000.0])),
            carbon_gco2=draw(st.sampled_from([0.0, 10.0, 900.0])),
        )
        for at in range(draw(st.integers(1, 6)))
    ]


@pytest.mark.parametrize("name", [name for name, entry in POLICIES.items() if entry.orders])
@shared(waits=queues())
def test_the_jobs_start_one_by_one_in_the_order_that_a_full_cluster_tells(name: str, waits: list[JobRow]) -> None:
    policy, nodes = build_policy(name, {}), [a_node(gpus=1)]
    memory = run_cycle(policy, a_snapshot([*waits, RUNS], nodes), policy.initial()).memory
    full = run_cycle(policy, a_snapshot([*waits, RUNS], nodes, trigger=Trigger.PASSIVE), memory)
    order = queue_order(full.plan)

    assert sorted((*order.ranked, *order.unranked)) == sorted(job.name for job in waits)
    memory = full.memory
    for expected in order.ranked:
        free = run_cycle(policy, a_snapshot(waits, nodes, trigger=Trigger.PASSIVE), memory)
        assert list(started(free.plan)) == [expected]
        memory, waits = free.memory, [job for job in waits if job.name != expected]
    nothing_more = run_cycle(policy, a_snapshot(waits, nodes, trigger=Trigger.PASSIVE), memory)
    assert started(nothing_more.plan) == {}


def test_a_job_that_is_kept_for_later_has_no_place() -> None:
    at = Placement((NodeShare(NodeId("n0"), (0,)),))
    plan = Plan(
        1,
        (
            Hold(JobId("wide"), Reason.NOT_ENOUGH_FREE_GPUS),
            Start(JobId("slim"), at, Reason.IN_ORDER),
            Hold(JobId("patient"), Reason.GREENER_HOURS),
            Hold(JobId("last"), Reason.TENANT_QUOTA),
        ),
    )

    order = queue_order(plan)

    assert order.ahead_of(JobId("wide")) == ("slim",)
    assert order.ahead_of(JobId("last")) == ("slim", "wide")
    assert order.ahead_of(JobId("patient")) is None
    assert order.unranked == ("patient",)
