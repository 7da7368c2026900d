"""From "these jobs should run, in this order, at these sizes" to actions: shared by all policies.

Capacity is filled greedily in rank order, per GPU model and within tenant quotas. A gang that does not fit is skipped
and jobs below it may fill what is left (backfill); an active round makes up for the delays this causes, because in it a
higher rank may preempt. A policy that never preempts can switch backfilling off.

Where GPUs are guaranteed to tenants or shared between them, the ranking is first reordered (``cycle.tenants``).

Devices of stopping jobs are *being released*: a waiting job may claim them in rank order before they are free. It then
waits for the release, and lower ranks cannot take what it claimed. Claims are not stored: the next round, asked for the
same ranking, arrives at the same claims and starts what has become free.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np

from services.core.cycle.bound import NodeRoom
from services.core.cycle.capacity import Capacity
from services.core.cycle.filling import KEEP, OVER_QUOTA, RESIZE, Filler, Ranked, Verdict
from services.core.cycle.levels import turn
from services.core.cycle.packing import moves
from services.core.cycle.placers import PLACERS
from services.core.cycle.placing import FreeDevices, Placer
from services.core.cycle.plan import Action, Hold, Plan, Preempt, Start
from services.core.cycle.ranking import Ranking
from services.core.cycle.rounds import Preemption
from services.core.cycle.sifting import has_nothing_to_do, sifted, starts_of_few
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, Snapshot
from services.core.cycle.standing import Quota
from services.core.cycle.tenants import Division, by_guarantees, share_out
from services.core.domain.arrays import Ints
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason


def reconcile(
    snapshot: Snapshot, ranking: Ranking, *, preemption: Preemption, place: Placer | None = None, backfill: bool = True
) -> Plan:
    """Return the plan that brings the cluster to the state a ranking asks for.

    With ``Preemption.NOW`` a running job is restarted at its new size if that fits at its rank, kept if its present
    size fits, and preempted otherwise. A job that is starting may be preempted but never resized; one that may not be
    preempted keeps its devices whatever its rank. With the other values, every job that holds devices keeps them and
    free devices are filled in rank order. Every queued job gets one start or one hold.

    Args:
        place: Chooses devices for each start, by default the snapshot's placer; a gang it declines waits for better
            devices and keeps its claim.
        backfill: Whether jobs may start below a waiting job that does not fit, on a model both could use.
    """
    if has_nothing_to_do(snapshot, ranking.order, ranking.gpus):
        return Plan(snapshot.version, ())
    in_own_order, found = ranking, Division(snapshot, ranking)
    if snapshot.tenant_guarantees:
        found = by_guarantees(snapshot, ranking, preemption)
    snapshot, ranking, behind = found.snapshot, found.ranking, found.behind
    if snapshot.shares is not None:
        ranking, more = share_out(snapshot, snapshot.shares, found.ranking, preemption, found.ahead)
        behind |= more
    few = starts_of_few(snapshot, ranking.order, ranking.gpus, preemption, backfill=backfill)
    if few is not None:
        return Plan(snapshot.version, (*found.stops, *(start for _, start in _starts(snapshot, few, place)[0])))
    capacity = Capacity(snapshot)
    order, gpus = sifted(snapshot, ranking.order, ranking.gpus, capacity, preemption, backfill=backfill)
    ranking = replace(ranking, order=order, gpus=gpus)
    ranked = Ranked(snapshot, ranking, capacity)
    fill = _fill_all if preemption is Preemption.NOW else _fill_free
    filler = fill(snapshot, ranked, capacity, backfill)
    if found.wanted and (wider := found.widened(ranking, ranked, filler)) is not None:
        ranked = Ranked(snapshot, wider, capacity)
        filler = fill(snapshot, ranked, capacity, backfill)
    given = [(ranked.jobs.item(at), ranked.wanted.item(at), model) for at, model in filler.starts]
    starts, declined = _starts(snapshot, given, place, filler.bound)
    why = Reason.GUARANTEED if snapshot.shares is None else Reason.FAIR_SHARE
    preempts = [*found.stops]
    if preemption is Preemption.NOW:
        preempts += _preempts(snapshot, ranked, filler.verdicts(), dict.fromkeys(behind, why), ranking.unranked)
        if snapshot.within and not preempts:
            preempts = moves(snapshot, ranked, filler.verdicts(), [start for _, start in starts])
    if not snapshot.reasons:
        return Plan(snapshot.version, (*preempts, *(start for _, start in starts)))
    reasons = _reasons(snapshot, ranked, filler.verdicts(), ranking.unranked)
    goes = preempts or (snapshot.jobs.phase == PREEMPTING).any()
    reasons.update(dict.fromkeys(declined, Reason.WAITING_FOR_RELEASE if goes else Reason.BETTER_PLACEMENT))
    for job in behind:
        if reasons.get(job) is Reason.NOT_ENOUGH_FREE_GPUS:
            reasons[job] = why
    expected_s = ranking.expected_s()
    if preemption is Preemption.LATER:
        if snapshot.tenant_guarantees and not _SHORT.isdisjoint(reasons.values()):
            found = by_guarantees(snapshot, in_own_order, Preemption.NOW)
            ranked = Ranked(found.snapshot, found.ranking, capacity)
        if snapshot.shares is not None:
            next_ranking, _ = share_out(snapshot, snapshot.shares, found.ranking, Preemption.NOW, found.ahead)
            ranked = Ranked(found.snapshot, next_ranking, capacity)
        later = _those_for_the_next_round(snapshot, ranked, capacity, reasons)
        reasons.update(dict.fromkeys(later, Reason.WAITING_FOR_ROUND))
        if math.isfinite(snapshot.next_active_s):
            expected_s.update(dict.fromkeys(later, snapshot.next_active_s))
    for start in starts:
        del reasons[start[0]]
    holds = _holds(snapshot.jobs.ids, reasons, expected_s)
    actions: tuple[Action, ...] = (*preempts, *(start for _, start in starts), *holds)
    return Plan(snapshot.version, actions)


def _fill_free(snapshot: Snapshot, ranked: Ranked, capacity: Capacity, backfill: bool) -> Filler:
    """Fill what is free, or being released, as a round does that stops nobody."""
    bound = NodeRoom(snapshot, reclaims=False) if snapshot.confines else None
    quota = Quota.of(snapshot, all_runs_on=True)
    filler = Filler(ranked, capacity.room, capacity.free, quota, backfill=backfill, bound=bound)
    filler.fill(ranked.waiting())
    return filler


def _fill_all(snapshot: Snapshot, ranked: Ranked, capacity: Capacity, backfill: bool) -> Filler:
    """Fill as an active round does, also giving out what preemptible jobs hold."""
    jobs = snapshot.jobs
    reclaimed = jobs.preemptible & (jobs.phase != PREEMPTING) & (capacity.model >= 0)
    model, held = capacity.model[reclaimed], capacity.held[reclaimed]
    reclaimed_gpus: list[int] = np.bincount(model, held, capacity.total.size).astype(np.int64).tolist()
    room = [each + more for each, more in zip(capacity.room, reclaimed_gpus, strict=True)]
    bound = NodeRoom(snapshot, reclaims=True) if snapshot.confines else None
    filler = Filler(ranked, room, capacity.free, Quota.of(snapshot, all_runs_on=False), backfill=backfill, bound=bound)
    filler.fill(ranked.movable())
    return filler


def _starts(
    snapshot: Snapshot, found: Sequence[tuple[int, int, int]], place: Placer | None, bound: NodeRoom | None = None
) -> tuple[list[tuple[int, Start]], list[int]]:
    """Return (job, start) for every gang that is placed, and the jobs whose gangs the placer declined."""
    starts: list[tuple[int, Start]] = []
    declined: list[int] = []
    if found:
        free, place = FreeDevices(snapshot.nodes), place or PLACERS[snapshot.placement]
        if bound is not None:
            ids = snapshot.jobs.ids
            starts += [(job, Start(ids[job], bound.place(job, free), Reason.IN_ORDER)) for job in bound.shares]
            free.take([each for each in bound.kept_back.items() if each[1]])
            found = [each for each in found if each[0] not in bound.shares]
        if snapshot.within or snapshot.near:
            found = sorted(found, key=lambda each: turn(snapshot, each[0]))
        for job, gpus, model in found:
            placement = place(snapshot, job, gpus, model, free)
            if placement is None:
                declined.append(job)
            else:
                starts.append((job, Start(snapshot.jobs.ids[job], placement, Reason.IN_ORDER)))
    return starts, declined


_WAITS: dict[int, Reason] = {
    Verdict.START: Reason.IN_ORDER,
    Verdict.AWAIT: Reason.WAITING_FOR_RELEASE,
    Verdict.OVER_QUOTA: Reason.TENANT_QUOTA,
    Verdict.SHORT: Reason.NOT_ENOUGH_FREE_GPUS,
    Verdict.NOWHERE: Reason.NO_ELIGIBLE_NODE,
    Verdict.UNLENT: Reason.GUARANTEED,
}


_SHORT = frozenset({Reason.NOT_ENOUGH_FREE_GPUS, Reason.FAIR_SHARE, Reason.GUARANTEED})


def _reasons(snapshot: Snapshot, ranked: Ranked, verdicts: Ints, unranked: Reason) -> dict[int, Reason]:
    """Return why each queued job waits, by its index: ranked ones first, in order, then the unwanted."""
    queued = np.flatnonzero(ranked.phase == QUEUED)
    codes = map(_WAITS.__getitem__, verdicts[queued].tolist())
    reasons = dict(zip(ranked.jobs[queued].tolist(), codes, strict=True))
    if snapshot.services_gpus:
        _count_services(snapshot, ranked, reasons)
    all_queued = np.flatnonzero(snapshot.jobs.phase == QUEUED)
    if all_queued.size > queued.size:
        for job in all_queued.tolist():
            reasons.setdefault(job, unranked)
    return reasons


def _count_services(snapshot: Snapshot, ranked: Ranked, reasons: dict[int, Reason]) -> None:
    """Correct the reasons of jobs that lack room only because of service instances: they wait for GPUs, not nodes."""
    most = snapshot.total_gpus + snapshot.services_gpus
    for job, wanted in zip(ranked.jobs.tolist(), ranked.wanted.tolist(), strict=True):
        nowhere = reasons.get(job) is Reason.NO_ELIGIBLE_NODE
        if nowhere and wanted <= most and snapshot.jobs.eligible[job].any():
            reasons[job] = Reason.NOT_ENOUGH_FREE_GPUS


def _those_for_the_next_round(
    snapshot: Snapshot, ranked: Ranked, capacity: Capacity, reasons: dict[int, Reason]
) -> list[int]:
    """Return the jobs that outrank running ones: the next active round will place them, so they lack no devices."""
    if not _SHORT.intersection(reasons.values()):
        return []
    filler = _fill_all(snapshot, ranked, capacity, backfill=True)
    codes = filler.verdicts()
    placed = ranked.jobs[(codes == Verdict.START) | (codes == Verdict.AWAIT)]
    return [job for job in placed.tolist() if reasons.get(job) in _SHORT]


def _preempts(
    snapshot: Snapshot, ranked: Ranked, verdicts: Ints, behind: Mapping[int, Reason], unranked: Reason
) -> list[Preempt]:
    """Return the stops of an active round: first those the ranking names, in rank order, then the unwanted."""
    jobs = snapshot.jobs
    preempts: list[Preempt] = []
    runs = (ranked.phase == RUNNING) | (ranked.phase == STARTING)
    goes = np.flatnonzero(runs & jobs.preemptible[ranked.jobs] & (verdicts != KEEP))
    for position in goes.tolist():
        job, wanted, verdict = int(ranked.jobs[position]), int(ranked.wanted[position]), int(verdicts[position])
        reason = behind.get(job, Reason.OUTRANKED)
        if verdict == OVER_QUOTA:
            reason = Reason.TENANT_QUOTA
        elif verdict == RESIZE:
            reason = Reason.SCALE_OUT if wanted > jobs.gpus[job] else Reason.SCALE_IN
        preempts.append(Preempt(jobs.ids[job], reason, wanted))
    if ranked.jobs.size < len(jobs):
        why = Reason.GREENER_HOURS if unranked is Reason.GREENER_HOURS else Reason.OUTRANKED
        unwanted = jobs.preemptible & ((jobs.phase == RUNNING) | (jobs.phase == STARTING))
        unwanted[ranked.jobs] = False
        preempts += [Preempt(jobs.ids[job], why, jobs.min_gpus.item(job)) for job in np.flatnonzero(unwanted).tolist()]
    return preempts


def _holds(ids: Sequence[JobId], reasons: Mapping[int, Reason], expected_s: Mapping[int, float]) -> list[Hold]:
    expected = map(expected_s.get, reasons) if expected_s else repeat(None)
    return [*map(Hold._make, zip(map(ids.__getitem__, reasons), reasons.values(), expected))]  # noqa: B905
