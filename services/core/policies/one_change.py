"""The one change: what the user of a waiting job could ask for instead, so that it would start in the next round.

Where none starts it then, the simulator asks the same candidates, in the same order, for one that starts it earlier.

An accepted job is never changed; so a change means to submit it again with that, and to withdraw it. Each candidate is
replayed in exactly this way: the same rounds, with a job that was submitted now in place of the one that waits. It is
named only if the policy in force starts it in all of them (``rounds``: whichever is held next), and none is named where
the same job, submitted again as it is, would start as well. Candidates come from the smallest to the largest, by what
the user gives up; the first that starts the job is the answer:

1. no deadline; then that it may be preempted: the run itself stays as it is;
2. under an order of the grid, a larger class: orders may slow it down by more;
3. for a job that must lie within one domain of a level of the network, a wider level; then none;
4. another GPU model of the cluster, in alphabetical order;
5. half its GPUs, a quarter and so on down to one, if its user gave it one size;
6. for a job that names a grid zone, any zone;
7. for a job that is kept for greener hours, a deadline: the latest that starts it of those in 24, 12, 6, 3 and 1 h. It
   comes last, since it gives up these hours.

What users cannot choose (quotas, budgets, dependencies) and what would only put others behind it (priority, class 0)
is no candidate. A job that has run, waits for a slice, or is bound to the nodes of
its checkpoint would lose what it has by a second submission; for it there is no answer.

Nothing here is used by a round.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from services.core.cycle.plan import Start
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.snapshot import QUEUED, JobTable, Snapshot
from services.core.domain.arrays import Bools
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.orders.widths import FLEX

CLASSES = (0.1, 0.25, 0.5)  #: How much slower orders of the grid may make a job, as jobs may say
DEADLINES_H = (24, 12, 6, 3, 1)
MOST_ROUNDS = 24  #: Rounds that are replayed for one answer, at most
MOST_JOBS = 300_000  #: Jobs in all of those rounds together, at most: with a longer queue, fewer candidates are tried


@dataclass(frozen=True)
class Predicted:
    """How long a job is predicted to take."""

    gpu_s: float  #: GPU seconds; NaN where nothing is predicted
    spread: float | None = None  #: As in ``Snapshot.length_spreads``; None where it is not known


@dataclass(frozen=True)
class Elsewhere:
    """Other GPUs that the job could ask for."""

    gpu_model: str | None  #: None: of the model that it asks for, in any zone
    eligible: Bools  #: (n_gpu_models,) where it could then run
    predicted: Predicted


@dataclass(frozen=True)
class Change:
    """What to ask for instead: one of these."""

    gpus: int | None = None
    elsewhere: Elsewhere | None = None
    preemptible: bool = False  #: That it may be preempted
    flex: float | None = None  #: A class, as a share of the job's speed
    within: int | None = None  #: A level, as in ``Snapshot.within``; their number: none
    deadline_s: float | None = None  #: UTC seconds; inf: none


AS_IT_IS = Change()


def changes(
    snapshot: Snapshot, job_id: JobId, *, why: Reason | None, one_size: bool, elsewhere: Sequence[Elsewhere] = ()
) -> list[Change]:
    """Return what to ask for instead of a waiting job, ``AS_IT_IS`` first; empty where there is no answer.

    Args:
        why: Why it waits.
        one_size: Whether its user gave it one size that is not tied to a layout.
    """
    jobs = snapshot.jobs
    job = jobs.index.get(job_id)
    if job is None or jobs.phase[job] != QUEUED or jobs.attained_gpu_s[job] != 0 or not _decided(snapshot, job_id):
        return []
    return [AS_IT_IS, *_candidates(snapshot, job, why, elsewhere, one_size=one_size)]


def one_change(
    policy: Policy[Memory],
    rounds: Sequence[Snapshot],
    memory: Memory,
    job_id: JobId,
    tried: Sequence[Change],
    *,
    as_id: JobId,
    predicted: Predicted,
) -> Change | None:
    """Return the smallest change that starts a waiting job; None: none is known.

    Args:
        rounds: The rounds that may be held next: the same jobs and nodes, with each trigger.
        tried: Its ``changes``.
        as_id: The id of the job that is submitted in its place; sorts behind all others.
        predicted: Its length, as it would be predicted now.

    Raises:
        PlanError: as for ``run_cycle``.
    """
    job = rounds[0].jobs.index.get(job_id, -1)
    left = min(MOST_ROUNDS, MOST_JOBS // len(rounds[0].jobs))
    for change in tried:
        for snapshot in rounds:
            if not left:
                return None
            left -= 1
            plan = run_under_orders(policy, resubmitted(snapshot, job, change, predicted, as_id), memory).plan
            if not any(isinstance(each, Start) and each.job_id == as_id for each in plan.actions):
                break
        else:
            return None if change is AS_IT_IS else change
    return None


def _decided(snapshot: Snapshot, job_id: JobId) -> bool:
    """Whether a waiting job is one that the policy may start anywhere."""
    first = (*snapshot.services, *snapshot.slice_jobs)
    return job_id not in snapshot.bound and all(each.job_id != job_id for each in first)


def _candidates(
    snapshot: Snapshot, job: int, why: Reason | None, elsewhere: Sequence[Elsewhere], *, one_size: bool
) -> Iterator[Change]:
    jobs = snapshot.jobs
    gpus: int = jobs.min_gpus.item(job)
    deadline_s, flex = jobs.deadline_s.item(job), jobs.flex.item(job)
    if math.isfinite(deadline_s):
        yield Change(deadline_s=math.inf)
    if not jobs.preemptible[job]:
        yield Change(preemptible=True)
    if snapshot.orders:
        yield from (Change(flex=each) for each in CLASSES if each > (FLEX if math.isnan(flex) else flex))
    if (level := snapshot.within.get(jobs.ids[job])) is not None:
        wider = range(level + 1, len(snapshot.levels)) if level >= 0 else ()
        yield from (Change(within=each) for each in (*wider, len(snapshot.levels)))
    models = {each.gpu_model: each for each in elsewhere}
    any_zone = models.pop(None, None)
    yield from (Change(elsewhere=each) for _, each in sorted(models.items(), key=lambda item: str(item[0])))
    while one_size and gpus > 1:
        gpus //= 2
        yield Change(gpus=gpus)
    if any_zone is not None:
        yield Change(elsewhere=any_zone)
    if why is Reason.GREENER_HOURS:
        ahead_s = (snapshot.now_s + 3_600.0 * hours for hours in DEADLINES_H)
        yield from (Change(deadline_s=each) for each in ahead_s if each < deadline_s)


def resubmitted(snapshot: Snapshot, job: int, change: Change, predicted: Predicted, as_id: JobId) -> Snapshot:
    """Return the snapshot with a job, by its index, withdrawn and submitted again with a change, as ``as_id``.

    Twice the GPUs take half the time, as wherever nothing is measured.
    """
    jobs, was = snapshot.jobs, snapshot.jobs.ids[job]
    row: dict[str, Any] = {"submitted_s": snapshot.now_s, "waiting_since_s": snapshot.now_s}
    if change.gpus is not None:
        row |= dict.fromkeys(("min_gpus", "max_gpus", "asked_gpus"), change.gpus)
    if change.elsewhere is not None:
        row["eligible"], predicted = change.elsewhere.eligible, change.elsewhere.predicted
    if change.preemptible:
        row["preemptible"] = True
    if change.flex is not None:
        row["flex"] = change.flex
    if change.deadline_s is not None:
        row["deadline_s"] = change.deadline_s
    row["remaining_s"] = predicted.gpu_s / (change.gpus or jobs.min_gpus.item(job))
    columns: dict[str, Any] = {each.name: getattr(jobs, each.name) for each in fields(jobs)}
    columns["ids"] = tuple(as_id if each == was else each for each in jobs.ids)
    for name, value in row.items():
        columns[name] = columns[name].copy()
        columns[name][job] = value
    spreads = {each: spread for each, spread in snapshot.length_spreads.items() if each != was}
    within = {as_id if each == was else each: level for each, level in snapshot.within.items()}
    if change.within is not None:
        within[as_id] = change.within
        within = {each: level for each, level in within.items() if level < len(snapshot.levels)}
    return snapshot.again(
        jobs=JobTable.of_columns(columns),
        graphs={as_id if each == was else each: graph for each, graph in snapshot.graphs.items()},
        within=within,
        near={as_id if each == was else each: level for each, level in snapshot.near.items()},
        endings={as_id if each == was else each: ending for each, ending in snapshot.endings.items()},
        length_spreads=spreads if predicted.spread is None else {**spreads, as_id: predicted.spread},
    )
