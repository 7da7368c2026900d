"""Two gangs of one device each on one GPU: what policies see of them, and what must hold.

Of each pair, one gang, the *host*, appears in a policy's table with the device; the other, its *guest*, is shown apart
(``Snapshot.guests``). So a device that two gangs hold counts once wherever capacity is counted, and no policy needs to
know about sharing. A guest's fate follows its host's: whatever is stopped to free the device stops both. Under a policy
that does not pack jobs, guests are stopped at the next active round.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from services.core.cycle.bound import is_bound_elsewhere
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.policy import PacksJobs
from services.core.cycle.snapshot import PREEMPTING, RUNNING, STARTING, JobTable, Snapshot, Trigger
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason


def hosts_and_guests(snapshot: Snapshot) -> list[tuple[JobId, JobId]]:
    """Return the host and guest of each shared device: the host is the one that goes on, or else has held it longer."""
    jobs = snapshot.jobs

    def turn(job_id: JobId) -> tuple[bool, float, JobId]:
        job = jobs.index[job_id]
        return bool(jobs.phase[job] == PREEMPTING), float(jobs.waiting_since_s[job]), job_id

    pairs = (sorted(pair, key=turn) for pair in snapshot.shared)
    return [(host, guest) for host, guest in pairs]


def without_guests(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot that a policy sees: guests shown apart, and their tenants' quotas reduced by them."""
    jobs = snapshot.jobs
    is_guest = np.zeros(len(jobs), dtype=np.bool_)
    is_guest[[jobs.index[guest] for _, guest in hosts_and_guests(snapshot)]] = True
    guests = jobs.rows(is_guest)
    return replace(snapshot, jobs=jobs.rows(~is_guest), guests=guests, **snapshot.less(Counter(guests.tenants)))


def with_guests_stops(snapshot: Snapshot, plan: Plan, policy: object) -> Plan:
    """Return a policy's plan with the guests' stops that it leaves out; see the module."""
    jobs = snapshot.jobs
    stops = {action.job_id: action for action in plan.actions if isinstance(action, Preempt)}
    ends_all = snapshot.trigger is Trigger.ACTIVE and not (isinstance(policy, PacksJobs) and policy.packs)
    more: list[Preempt] = []
    for host, guest in hosts_and_guests(snapshot):
        goes_on = jobs.phase[jobs.index[guest]] in (STARTING, RUNNING)
        if goes_on and guest not in stops and (host in stops or ends_all):
            reason = stops[host].reason if host in stops else Reason.UNPACKED
            more.append(Preempt(guest, reason, int(jobs.gpus[jobs.index[guest]])))
    return replace(plan, actions=(*plan.actions, *more)) if more else plan


def without_stops_of_guests(plan: Plan, guests: JobTable | None) -> Plan:
    """Return a plan without the guests' stops: the part that concerns the jobs of the table."""
    if guests is None:
        return plan
    actions = (each for each in plan.actions if not (isinstance(each, Preempt) and each.job_id in guests.index))
    return replace(plan, actions=tuple(actions))


def may_share(snapshot: Snapshot, host: int, guest: int) -> bool:
    """Whether a waiting job may start on the device of a running one: both permit it, can be stopped, and fit.

    Unknown memory counts as fitting.

    Args:
        snapshot: The cluster; tenant quotas and devices that are already shared are not considered.
    """
    jobs, placement = snapshot.jobs, snapshot.jobs.placements[host]
    if placement is None or placement.gpus != 1 or jobs.phase[host] != RUNNING:
        return False
    node = snapshot.nodes.index.get(placement.shares[0].node_id)
    if node is None or not snapshot.nodes.schedulable[node] or jobs.min_gpus[guest] != 1:
        return False
    model = snapshot.nodes.gpu_model[node]
    if is_bound_elsewhere(snapshot, jobs.ids[guest], placement):
        return False
    pair = [host, guest]
    if not (jobs.shareable[pair].all() and jobs.preemptible[pair].all() and jobs.eligible[guest, model]):
        return False
    memory_gib = snapshot.gpu_memory_gib[model] if snapshot.gpu_memory_gib.size else np.nan
    return not jobs.memory_gib[pair].sum() > memory_gib


def check_sharing(snapshot: Snapshot, starts: list[Start], stopped: set[JobId]) -> None:
    """Check that each start shares a device with one gang that runs on, both permitting it, or ``PlanError``."""
    jobs = snapshot.jobs
    paired = {job_id for pair in snapshot.shared for job_id in pair}
    on = {placement: job for job, placement in enumerate(jobs.placements) if placement is not None}
    for start in starts:
        host = on.get(start.placement)
        if host is None or start.gpus != 1:
            raise PlanError(f"job {start.job_id} cannot share a device: no gang runs on that device alone")
        if jobs.ids[host] in paired:
            raise PlanError(f"job {start.job_id} would be the third on its device")
        if jobs.ids[host] in stopped:
            raise PlanError(f"job {start.job_id} cannot share the device of job {jobs.ids[host]}, which stops")
        if not may_share(snapshot, host, jobs.index[start.job_id]):
            raise PlanError(f"job {start.job_id} may not share the device of job {jobs.ids[host]}")
        paired.add(jobs.ids[host])
