"""The wanted states of our admission checks. Pure: states are compared, and only differences are written.

A held workload is *Pending* and keeps its quota; if a released one waits for quota of the same ClusterQueue, the held
one gives it back by *Retry*. A running one that should stop is also evicted by *Retry*. Kueue knows no answer that
expires: without a control plane all workloads are *Ready*, and without this process ``--release`` sees to that.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from services.contracts.engines import (
    EngineAction,
    EngineDecision,
    EngineJob,
    EngineJobState,
    EngineMode,
    EngineNode,
    EngineShare,
)
from services.engines.kueue.reading import (
    DEADLINE,
    FLEXIBLE,
    MOST_GPUS,
    MOST_NODES,
    NOTICE,
    REPLACES,
    STEER,
    STOPPABLE,
    Json,
    Queues,
    Workload,
)
from services.engines.kueue.settings import KueueSettings
from services.kit.bridges.devices import numbered

PENDING, READY, RETRY = "Pending", "Ready", "Retry"
NOTE, START, GRAMS, STOPS = (f"wattshift.io/{name}" for name in ("note", "expected-start", "expected-gco2", "stops-at"))
"""Annotations that users read."""
BOOST, BOOSTED = "kueue.x-k8s.io/priority-boost", "wattshift.io/priority-boost"
"""What Kueue adds to a priority, and which such value is ours: another one is somebody's own, and stays."""
_LONGEST_NOTICE_S = 3_600.0
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 30.0, 600.0
"""For how long Kueue is asked not to try a workload again: plans change, and it cannot be called back earlier."""

_ODD = re.compile(r"[^A-Za-z0-9._-]")

Held = Mapping[str, Mapping[tuple[str, str], Sequence[int]]]
"""GPUs by workload, and by ClusterQueue and flavor."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is written to one workload."""

    workload: Workload
    checks: tuple[Json, ...] | None  #: All states of its checks, with ours changed; None to leave them
    annotations: Mapping[str, str | None]  #: None takes one away
    deactivate: bool = False  #: Whether it is taken out of its queue for good


def why_not(workload: Workload, queues: Queues) -> str:
    """Return why a workload is left alone; empty if it is steered."""
    if not queues.checked.get(cluster_queue_of(workload, queues)):
        return "its queue has no check of ours"
    if REPLACES in workload.own_annotations:
        return "it changes the size of a job that runs"
    return "its user opted out" if workload.annotations.get(STEER) == "off" else ""


def cluster_queue_of(workload: Workload, queues: Queues) -> str:
    return workload.cluster_queue or queues.clusters.get((workload.namespace, workload.queue), "")


def changes_of(
    workloads: Sequence[Workload],
    queues: Queues,
    decisions: Mapping[str, EngineDecision],
    settings: KueueSettings,
    now: datetime,
    *,
    heard: bool,
    order: Sequence[str] = (),
) -> list[Change]:
    """Return what to change so that workloads match the decisions.

    Args:
        workloads: The workloads that are not over.
        decisions: The decisions, by the workloads' uids.
        heard: Whether the control plane has answered recently; if not, all are admitted.
        order: Released workloads that wait, by their uids: in which order they are to get quota.
    """
    free = settings.mode is not EngineMode.CONTROL or not heard
    hungry = {
        cluster_queue_of(each, queues)
        for each in workloads
        if not each.reserved and each.active and _is_released(decisions.get(each.uid))
    }
    boosts = {} if free else _boosts(workloads, queues, order)
    found: list[Change] = []
    # What has its quota gets its own priority back before others are put ahead of each other: none of them preempts it.
    for each in sorted(workloads, key=lambda each: (not each.reserved, boosts.get(each.uid, 0))):
        if each.state not in (EngineJobState.PENDING, EngineJobState.RUNNING):
            continue
        left_alone = free or bool(why_not(each, queues))
        decision = None if left_alone else decisions.get(each.uid)
        if decision and decision.action is EngineAction.CANCEL:
            found.append(Change(each, None, {}, deactivate=True))
            continue
        yields = cluster_queue_of(each, queues) in hungry
        stops_at = _stops_at(each, decision, now)
        checks = None
        if stops_at is None or stops_at <= now:
            checks = _checks(each, queues.checks, decision, now, left_alone=left_alone, yields=yields)
        notes: dict[str, str | None] = {**_notes(decision)} if decision else {}
        notes[STOPS] = stops_at and _instant(stops_at)
        if _is_boost_ours(each):
            boost = str(boosts[each.uid]) if boosts.get(each.uid) else None
            notes |= {BOOST: boost, BOOSTED: boost}
        notes = {name: text for name, text in notes.items() if each.own_annotations.get(name) != text}
        if checks is not None or notes:
            found.append(Change(each, checks, notes))
    return found


def report_of(
    workload: Workload, queues: Queues, decision: EngineDecision | None, shares: Sequence[EngineShare]
) -> EngineJob:
    """Return the report of a workload for the control plane; ``shares`` is what it holds."""
    reason = why_not(workload, queues)
    models = {each.model for each in queues.flavored if each.flavor in workload.flavors}
    return EngineJob(
        external_id=workload.uid,
        number=workload.key[:100],
        name=workload.name[:200],
        user=workload.namespace[:100],
        account=workload.queue[:200],
        queue=cluster_queue_of(workload, queues)[:200],
        state=workload.state,
        steered=not reason,
        why_not=reason,
        stoppable=workload.annotations.get(STOPPABLE) == "true",
        gpus=workload.gpus,
        gpu_model=next(iter(models)) if len(models) == 1 else None,
        time_limit_s=workload.time_limit_s,
        deadline=_deadline_of(workload),
        submitted_at=workload.submitted_at,
        started_at=workload.since if workload.state is EngineJobState.RUNNING else None,
        ended_at=workload.since if workload.state.is_over else None,
        shares=list(shares),
        detail=workload.detail[:500] if workload.state.is_over else "",
        revision=decision.revision if decision and _is_followed(workload, decision, queues.checks) else 0,
    )


def nodes_of(queues: Queues, settings: KueueSettings) -> list[EngineNode]:
    """Return quotas as nodes: as many as needed for each ClusterQueue and flavor, each with at most 1,024 GPUs."""
    parts = _parts(queues)
    found = [
        EngineNode(
            name=name,
            gpus=gpus,
            gpu_model=each.model,
            memory_gib=settings.gpu_memory_gib,
            queues=[each.cluster_queue],
            closed=each.closed,
            zone=each.zone,
        )
        for each in queues.flavored
        for name, gpus in parts[each.cluster_queue, each.flavor]
    ]
    return found[:MOST_NODES]


def devices_of(workloads: Sequence[Workload], queues: Queues, held: Held) -> Held:
    """Return which GPUs of its quotas each running workload counts as holding, numbered from 0.

    Kueue counts quota and names no devices. Quota that is borrowed from another ClusterQueue has no GPUs here: that
    part of a workload holds nothing.

    Args:
        held: The previous result.
    """
    running = [each for each in workloads if each.state is EngineJobState.RUNNING]
    running.sort(key=lambda each: (each.since or each.submitted_at, each.uid))
    wanted = {
        each.uid: {(each.cluster_queue, flavor): gpus for flavor, gpus in each.flavors.items()} for each in running
    }
    return numbered(wanted, {(each.cluster_queue, each.flavor): each.gpus for each in queues.flavored}, held)


def shares_of(held: Held, queues: Queues) -> dict[str, list[EngineShare]]:
    """Return what each workload holds on the nodes that its quotas are."""
    parts, found = _parts(queues), dict[str, list[EngineShare]]()
    for uid, places in held.items():
        shares: dict[str, list[int]] = {}
        for place, numbers in places.items():
            for number in numbers:
                shares.setdefault(parts[place][number // MOST_GPUS][0], []).append(number % MOST_GPUS)
        found[uid] = [EngineShare(node=node, devices=devices) for node, devices in sorted(shares.items())]
    return found


def _parts(queues: Queues) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """Return the nodes of each ClusterQueue and flavor, with the GPUs of each; no two have the same name."""
    names = {
        (each.cluster_queue, each.flavor): _ODD.sub("-", f"{each.cluster_queue}.{each.flavor}")[:40]
        for each in queues.flavored
    }
    shared = {name for name, count in Counter(names.values()).items() if count > 1}
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for each in queues.flavored:
        place = each.cluster_queue, each.flavor
        base = names[place]
        if base in shared:
            base = f"{base}-{sha256('/'.join(place).encode()).hexdigest()[:10]}"
        sizes = [min(MOST_GPUS, each.gpus - start) for start in range(0, each.gpus, MOST_GPUS)]
        found[place] = [(base if number == 0 else f"{base}-{number + 1}", size) for number, size in enumerate(sizes)]
    return found


def _boosts(workloads: Sequence[Workload], queues: Queues, order: Sequence[str]) -> dict[str, int]:
    """Return what is added to the priorities of workloads that wait for quota, so that they get it in an order.

    It counts among those of one ClusterQueue and priority, and is 0 or less: none gets past one of a higher priority,
    and none may preempt what runs. Nor does one fall behind those of the next lower priority. What is not in the order,
    such as held workloads, comes last.
    """
    places = {uid: place for place, uid in enumerate(order)}
    groups: dict[str, list[Workload]] = {}
    for each in workloads if places else ():
        if each.state is EngineJobState.PENDING and each.active and not each.reserved:
            groups.setdefault(cluster_queue_of(each, queues), []).append(each)
    found: dict[str, int] = {}
    for group in groups.values():
        of_all = sorted({each.priority for each in group})
        steered = [each for each in group if _is_boost_ours(each) and not why_not(each, queues)]
        steered.sort(key=lambda each: (places.get(each.uid, len(places)), each.submitted_at, each.uid))
        for lower, priority in zip([None, *of_all], of_all, strict=False):
            ranked = [each for each in steered if each.priority == priority]
            least = -len(ranked) if lower is None else lower + 1 - priority
            found |= {each.uid: max(-place, least) for place, each in enumerate(ranked)}
    return found


def _is_boost_ours(workload: Workload) -> bool:
    return workload.own_annotations.get(BOOST) == workload.own_annotations.get(BOOSTED)


def _is_released(decision: EngineDecision | None) -> bool:
    return decision is not None and decision.action is EngineAction.RELEASE


def _is_followed(workload: Workload, decision: EngineDecision, ours: Collection[str]) -> bool:
    state = (workload.check(ours) or {}).get("state")
    match decision.action:
        case EngineAction.RELEASE:
            return state == READY or workload.state is not EngineJobState.PENDING
        case EngineAction.HOLD:
            return state != READY or workload.state is not EngineJobState.PENDING
        case EngineAction.REQUEUE:
            return workload.state is not EngineJobState.RUNNING
        case EngineAction.SHRINK:  # no workload is reported to be shrinkable
            return False
        case EngineAction.CANCEL:
            return workload.state.is_over


def _checks(
    workload: Workload,
    ours: Collection[str],
    decision: EngineDecision | None,
    now: datetime,
    *,
    left_alone: bool,
    yields: bool,
) -> tuple[Json, ...] | None:
    """Return the states of all its checks, with ours as wanted; None if they already are."""
    if not any(each.get("name") in ours for each in workload.checks):
        return None
    runs = workload.state is EngineJobState.RUNNING
    retry_s: int | None = None
    if left_alone:
        state, message = (None if runs else READY), "Wattshift leaves it alone, or does not answer."
    elif decision is None:
        state, message = (None if runs else PENDING), "It waits for Wattshift's next plan."
    elif decision.action is EngineAction.RELEASE:
        state, message = READY, decision.note
    elif runs:
        state, message = (RETRY if decision.action is EngineAction.REQUEUE else None), decision.note
        retry_s = _wait_s(decision, now)
    elif yields and workload.reserved:
        state, message, retry_s = RETRY, f"{decision.note}; another one takes its quota", _wait_s(decision, now)
    else:
        state, message = PENDING, decision.note
    changed = [
        _changed(each, state, message, retry_s, now) if each.get("name") in ours else each for each in workload.checks
    ]
    return tuple(changed) if state and changed != list(workload.checks) else None


def _changed(check: Json, state: str | None, message: str, retry_s: int | None, now: datetime) -> Json:
    """Return a check in its wanted state; the time of its last transition changes only with the state."""
    same = check.get("state") == state
    if same and (state == RETRY or check.get("message") == message):
        return check
    wanted = {name: value for name, value in check.items() if name != "requeueAfterSeconds"}
    at = check.get("lastTransitionTime") if same else _instant(now)
    wanted |= {"state": state, "message": message, "lastTransitionTime": at}
    return wanted | ({"requeueAfterSeconds": retry_s} if retry_s is not None and state == RETRY else {})


def _stops_at(workload: Workload, decision: EngineDecision | None, now: datetime) -> datetime | None:
    """Return when a running workload is evicted whose user wants notice of it: as it was told, if it was."""
    wanted = workload.annotations.get(NOTICE, "")
    requeued = decision is not None and decision.action is EngineAction.REQUEUE
    if not requeued or workload.state is not EngineJobState.RUNNING or not wanted.isdecimal():
        return None
    latest = now + timedelta(seconds=min(float(wanted), _LONGEST_NOTICE_S))
    try:
        return min(datetime.fromisoformat(workload.own_annotations[STOPS]), latest)
    except (KeyError, ValueError, TypeError):  # it was not told, or somebody has written over it
        return latest


def _wait_s(decision: EngineDecision, now: datetime) -> int:
    """Return how long Kueue should wait before it tries a workload again."""
    left_s = (decision.until - now).total_seconds() if decision.until else 0.0
    return round(min(max(left_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S))


def _notes(decision: EngineDecision) -> dict[str, str]:
    start = {START: _instant(decision.until)} if decision.until else {}
    grams = {} if decision.gco2 is None else {GRAMS: f"{decision.gco2:.0f}"}
    return ({NOTE: decision.note} if decision.note else {}) | start | grams


def _instant(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _deadline_of(workload: Workload) -> datetime | None:
    """Return the deadline that its user wants; annotations that cannot be read count as none."""
    try:
        if DEADLINE in workload.annotations:
            at = datetime.fromisoformat(workload.annotations[DEADLINE])
            return at if at.tzinfo and 1970 <= at.year <= 9_000 else None
        if FLEXIBLE in workload.annotations and workload.time_limit_s:
            delay_s = min(max(float(workload.annotations[FLEXIBLE]), 0.0), 1e8)
            return workload.submitted_at + timedelta(seconds=workload.time_limit_s + delay_s)
    except (ValueError, OverflowError):
        pass
    return None
