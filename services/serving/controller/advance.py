"""How an instance changes state, given its job's state and its server's answers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.contracts.nodes import Listener
from services.contracts.serving import InstanceState, ServerProbes
from services.serving.controller.probes import KeyCheck
from services.serving.instances import Instance, InstanceJob, InstanceReason

IN_A_ROW = 2  #: How many equal answers in a row show that an instance is silent, or holds no more requests

GIVEN_UP_S = 600.0  #: How long a cluster may take to say that a pod has gone; it may never be heard again

Change = dict[str, Any]  #: Columns and their new values; a value may equal the present one


@dataclass(frozen=True, slots=True)
class Seen:
    """What was observed of an instance while it was in ``state`` at ``url``."""

    state: InstanceState
    url: str | None = None
    answers: bool | None = None  #: Whether it answered 2xx; None if it was not probed
    silences: int = 0  #: How many times in a row it did not answer, counted by this process
    empties: int = 0  #: How many times in a row it reported that it holds no requests
    job_id: str | None = None  #: The job that its submission created
    refusal: tuple[str, str] | None = None
    """Code and reason of a refused submission; it is tried again unless ``is_final``."""
    key: KeyCheck | None = None  #: How its server treated its key; None if it has none, or was not asked
    is_final: bool = False


def advance(
    instance: Instance, seen: Seen | None, probes: ServerProbes, now: datetime, *, held_by_routers: int = 0
) -> Change:
    """Return the columns of an instance that change now; observations from an earlier state are ignored.

    Args:
        now: The database's time.
        held_by_routers: How many requests routers say they hold there.
    """
    if seen is not None and seen.state is not instance.state:
        seen = None
    change = _advanced(instance, seen, probes, now, held_by_routers)
    listener = instance.job and instance.job.listener
    return change if listener is instance.listener else change | {"listener": listener}


def _advanced(
    instance: Instance, seen: Seen | None, probes: ServerProbes, now: datetime, held_by_routers: int
) -> Change:
    if instance.state is not InstanceState.WANTED and instance.job_has_ended:
        return _end(instance, now)
    serves = (InstanceState.STARTING, InstanceState.READY, InstanceState.DRAINING)
    if instance.state in serves and instance.job and instance.job.listener is Listener.FOREIGN:
        return stop(now, InstanceReason.PORT_TAKEN.value, InstanceReason.PORT_TAKEN.sentence)
    match instance.state:
        case InstanceState.WANTED:
            return _wanted(instance, seen, now)
        case InstanceState.STARTING:
            return _starting(instance, seen, probes, now)
        case InstanceState.READY:
            return _ready(instance, seen, probes, now)
        case InstanceState.DRAINING:
            return _draining(instance, seen, probes, now, held_by_routers)
        case _:
            since = instance.stopping_at if instance.is_pod else None
            return _end(instance, now) if since and (now - since).total_seconds() > GIVEN_UP_S else {}


def one_by_one(moves: Sequence[tuple[Instance, Change]]) -> list[tuple[Instance, Change]]:
    """If all ready instances of a pool are silent, give up only one at a time, and none while another is starting.

    The fault may be in this process's own network. If it is not, the first new instance answers, and the rest are given
    up.
    """
    serving = [
        (each, change)
        for each, change in moves
        if each.state is InstanceState.READY
        and change.get("state") in (None, InstanceState.STOPPING)
        and change.get("reason") != InstanceReason.PORT_TAKEN
    ]
    if len(serving) < 2 or any(change.get("silent_since", each.silent_since) is None for each, change in serving):
        return list(moves)
    awaited = (InstanceState.WANTED, InstanceState.STARTING, InstanceState.STOPPING)
    may_go = 0 if any(each.state in awaited for each, _ in moves) else 1
    spared = {each.id for each, _ in [move for move in serving if "state" in move[1]][may_go:]}
    return [(each, {} if each.id in spared else change) for each, change in moves]


def stop(now: datetime, reason: str, detail: str | None) -> Change:
    """Return the change that stops an instance without draining it."""
    return {"state": InstanceState.STOPPING, "stopping_at": now, "reason": reason, "detail": detail}


def give_up(instance: Instance, now: datetime, reason: InstanceReason) -> Change:
    """Return the change that has an instance which is not needed, and does not serve, leave."""
    if instance.state is InstanceState.STARTING:
        return stop(now, reason.value, reason.sentence)
    if instance.is_pod and instance.job is None:  # its cluster has not heard of it
        return {"state": InstanceState.ENDED, "ended_at": now, **_because(reason)}
    return {}


def drain(now: datetime, reason: InstanceReason) -> Change:
    """Return the change that drains an instance, which is stopped once it holds no more requests."""
    return {
        "state": InstanceState.DRAINING,
        "draining_at": now,
        "silent_since": None,
        "reason": reason.value,
        "detail": reason.sentence,
    }


def recall(instance: Instance) -> Change:
    """Return the change that has a draining instance serve again; none if another process may listen at its address."""
    if not _still_runs(instance):
        return {}
    return {"state": InstanceState.READY, "draining_at": None, "reason": None, "detail": None}


def _end(instance: Instance, now: datetime) -> Change:
    """Return the change that ends an instance.

    One that was stopped keeps its reason; one that ended by itself takes its job's.
    """
    ended: Change = {"state": InstanceState.ENDED, "ended_at": now, "url": None, "sealed_key": None}
    if instance.state in (InstanceState.DRAINING, InstanceState.STOPPING):
        return ended
    if instance.job is None:
        return ended | _because(InstanceReason.JOB_MISSING)
    return ended | {"reason": instance.job.reason or instance.job.state.value, "detail": instance.job.detail}


def _because(reason: InstanceReason) -> Change:
    return {"reason": reason.value, "detail": reason.sentence}


def _wanted(instance: Instance, seen: Seen | None, now: datetime) -> Change:
    job_id = instance.job_id or (seen.job_id if seen else None)
    if job_id is not None or instance.job is not None:
        return {"state": InstanceState.STARTING, "job_id": job_id, "reason": None, "detail": None}
    if instance.is_pod:
        return _because(InstanceReason.CLUSTER_SILENT)
    if seen is None or seen.refusal is None:
        return {}
    reason, detail = seen.refusal
    if seen.is_final:
        return {"state": InstanceState.ENDED, "ended_at": now, "reason": reason, "detail": detail}
    return {"reason": reason, "detail": detail}


def _starting(instance: Instance, seen: Seen | None, probes: ServerProbes, now: datetime) -> Change:
    job = instance.job
    if job is None:
        return {}
    if job.url is None or job.running_at is None:
        return {"reason": job.reason, "detail": job.detail}
    if seen and seen.answers and seen.url == job.url and job.listener is not Listener.NONE:
        if seen.key is None or seen.key is not KeyCheck.REFUSED:
            ready: Change = {"state": InstanceState.READY, "url": job.url, "ready_at": now}
            return ready | {"reason": None, "detail": None, "checks_key": seen.key and seen.key is KeyCheck.CHECKED}
        if not _is_late(job, probes, now):
            return _because(InstanceReason.KEY_REFUSED)
    if _is_late(job, probes, now):
        detail = f"It did not answer {probes.health_path} within {probes.ready_timeout_s:g} s."
        return stop(now, InstanceReason.NOT_READY.value, detail)
    return _because(InstanceReason.LOADING)


def _is_late(job: InstanceJob, probes: ServerProbes, now: datetime) -> bool:
    return job.running_at is not None and (now - job.running_at).total_seconds() > probes.ready_timeout_s


def _ready(instance: Instance, seen: Seen | None, probes: ServerProbes, now: datetime) -> Change:
    """Return what changes for a ready instance.

    If its job was queued again, as after the loss of its node, it starts again and must get no requests yet.
    """
    if not _still_runs(instance):
        again = {"state": InstanceState.STARTING, "url": None, "ready_at": None, "silent_since": None}
        return again | ({"reason": instance.job.reason, "detail": instance.job.detail} if instance.job else {})
    if seen is None or seen.answers is None or seen.url != instance.url:
        return {}
    if seen.answers:
        return {"silent_since": None}
    if instance.silent_since is None:
        return {"silent_since": now}
    silent_s = (now - instance.silent_since).total_seconds()
    if silent_s < probes.unhealthy_timeout_s or seen.silences < IN_A_ROW:
        return {}
    return stop(now, InstanceReason.UNHEALTHY.value, f"It has not answered {probes.health_path} for {silent_s:.0f} s.")


def _still_runs(instance: Instance) -> bool:
    """Whether the process that answered still runs; another may have started at the same port since."""
    job = instance.job
    if job is None or job.url != instance.url or job.running_at is None or instance.ready_at is None:
        return False
    return job.running_at <= instance.ready_at


def _draining(
    instance: Instance, seen: Seen | None, probes: ServerProbes, now: datetime, held_by_routers: int
) -> Change:
    assert instance.draining_at is not None
    drained_s = (now - instance.draining_at).total_seconds()
    is_empty = not held_by_routers and (probes.load_path is None or (seen is not None and seen.empties >= IN_A_ROW))
    if (
        not _still_runs(instance)
        or drained_s >= probes.drain_timeout_s
        or (is_empty and drained_s >= probes.drain_min_s)
    ):
        return {"state": InstanceState.STOPPING, "stopping_at": now}
    return {}
