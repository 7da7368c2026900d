"""Power limits on top of any plan: a policy chooses each gang's limit from measurements of its kind.

A kind of job that is not known yet is measured at each limit as its work begins (just-in-time profiling), once for all
gangs of the kind; until then, and where nothing can be measured, gangs run at the default.

Source: You et al., Zeus, NSDI'23.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.core.cycle.plan import Plan, Preempt, ProfileControls, SetControl, Start, set_to
from services.core.cycle.snapshot import RUNNING, STARTING, Snapshot
from services.core.domain.arrays import Bools
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.placement import Placement
from services.core.domain.reasons import Reason

LIMIT = ControlKind.POWER_LIMIT


@dataclass(frozen=True, slots=True)
class Going:
    """A gang that will be running once a plan is carried out."""

    job: int  #: Index into the job table
    model: int  #: Index of its GPU model
    gpus: int  #: Its size
    starts: bool  #: Whether it starts now


Choice = Callable[[list[Going], ControlCurve], list[float | None]]
"""Returns the limit of each gang of one kind by the kind's curve, watts; None: the default."""


def with_limits(
    snapshot: Snapshot, plan: Plan, asked: Collection[JobId], window_s: float, choose: Choice, *, anew: bool = True
) -> tuple[Plan, frozenset[JobId]]:
    """Return a plan with power limits for all gangs that run by it, and the gangs for which measurement was requested.

    Args:
        asked: The gangs whose measurement was already requested.
        window_s: How long a gang is measured at each limit.
        anew: Whether limits are also chosen for gangs that already have one.
    """
    if not any(LIMIT in kinds for kinds in snapshot.settable):
        return plan, frozenset()
    jobs = snapshot.jobs
    runs = (jobs.phase == STARTING) | (jobs.phase == RUNNING)
    measured = _still_running(snapshot, plan, asked, runs) if asked else set[JobId]()
    # In a simulation most rounds start nobody, and nearly every gang that runs has its limit: nothing is looked at.
    going = list(gangs_of(snapshot, plan, runs if anew else runs & np.isnan(jobs.power_limit_w)))
    controls = tuple(_controls(snapshot, going, measured, window_s, choose))
    measured |= {action.job_id for action in controls if isinstance(action, ProfileControls)}
    return replace(plan, actions=(*plan.actions, *controls)) if controls else plan, frozenset(measured)


def gangs_of(snapshot: Snapshot, plan: Plan, runs: Bools) -> Iterator[Going]:
    """Yield the gangs that a plan starts, and those of the running jobs, (n_jobs,), that it does not stop; by id."""
    jobs = snapshot.jobs
    stops = _stopped(plan)
    placements: dict[int, tuple[Placement | None, bool]] = {}
    for job in np.flatnonzero(runs).tolist():
        if jobs.ids[job] not in stops:
            placements[job] = jobs.placements[job], False
    for action in plan.actions:
        if isinstance(action, Start):
            placements[jobs.index[action.job_id]] = action.placement, True
    for job, (placement, is_new) in sorted(placements.items(), key=lambda each: jobs.ids[each[0]]):
        model = model_of(snapshot, placement)
        if placement is not None and model is not None:
            yield Going(job, model, placement.gpus, is_new)


def _still_running(snapshot: Snapshot, plan: Plan, asked: Collection[JobId], runs: Bools) -> set[JobId]:
    """Return the jobs with a requested measurement that run on known nodes and continue by the plan."""
    jobs, stops = snapshot.jobs, _stopped(plan)
    found = ((job_id, jobs.index.get(job_id)) for job_id in asked if job_id not in stops)
    return {
        job_id
        for job_id, job in found
        if job is not None and runs[job] and model_of(snapshot, jobs.placements[job]) is not None
    }


def _stopped(plan: Plan) -> set[JobId]:
    return {action.job_id for action in plan.actions if isinstance(action, Preempt)}


def model_of(snapshot: Snapshot, placement: Placement | None) -> int | None:
    """Return the GPU model that a gang sits on; None if it holds nothing on a known node."""
    node = None if placement is None else snapshot.nodes.index.get(placement.shares[0].node_id)
    return None if node is None else int(snapshot.nodes.gpu_model[node])


def _controls(
    snapshot: Snapshot, going: list[Going], measured: set[JobId], window_s: float, choose: Choice
) -> Iterator[SetControl | ProfileControls]:
    """Yield the controls that differ from the present ones; of each unknown kind, one gang is measured at a time."""
    jobs = snapshot.jobs
    kinds = {(int(jobs.control_curve[gang.job]), gang.model) for gang in going if jobs.ids[gang.job] in measured}
    limits_w = _limits_w(snapshot, going, choose)
    for gang in going:
        job_id = jobs.ids[gang.job]
        if gang.job in limits_w:
            wanted = limits_w[gang.job]
            now = None if gang.starts or math.isnan(limit_w := jobs.power_limit_w.item(gang.job)) else limit_w
            if wanted != now:
                yield set_to(job_id, LIMIT, wanted, Reason.DEFAULT_CONTROL if wanted is None else Reason.LEAST_COST)
        elif snapshot.measures and job_id not in measured and snapshot.takes(gang.model, LIMIT):
            kind = int(jobs.control_curve[gang.job]), gang.model
            if kind[0] < 0 or kind not in kinds:
                kinds.add(kind)
                yield ProfileControls(job_id, LIMIT, window_s)


def _limits_w(snapshot: Snapshot, going: list[Going], choose: Choice) -> dict[int, float | None]:
    """Return the limit of each gang whose kind is known, by job; gangs of one kind are decided together."""
    of_kind = defaultdict[tuple[int, int], list[Going]](list)
    for gang in going:
        of_kind[snapshot.jobs.control_curve.item(gang.job), gang.model].append(gang)
    limits_w: dict[int, float | None] = {}
    for (_, model), gangs in of_kind.items():
        curve = snapshot.control_curve(gangs[0].job, model, LIMIT) if snapshot.takes(model, LIMIT) else None
        if curve is not None:
            limits_w.update(zip([gang.job for gang in gangs], choose(gangs, curve), strict=True))
    return limits_w
