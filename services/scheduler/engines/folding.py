"""How a report on an engine's job changes what we know of it. Pure, so that every combination can be tested.

The engine is right about what it does, and we about what we wanted: where the two differ, the job follows the engine,
and the difference is recorded as a deviation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.contracts.engines import EngineAction, EngineJob, EngineJobState
from services.core.cycle.gates import blocked_words
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.scheduler.ingest.gangs import EndReason, GangState

Devices = Mapping[str, Sequence[int]]  #: What a job holds, by node


CANCELLED_THERE = "cancelled_in_engine"
"""The reason of a job that was cancelled by its engine, or there; one that was cancelled here has another."""


class Deviation(StrEnum):
    """How an engine departed from what was decided; the names are those used in reports."""

    STARTED = "started_by_engine"
    OTHER_NODES = "other_nodes"
    OTHER_SIZE = "other_size"
    REQUEUED = "requeued_by_engine"
    NOT_STARTED = "not_started"
    REFUSED = "refused"
    AGAIN = "ran_again"
    ROLLED_BACK = "rolled_back"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Known:
    """What we know of a job; None where there is nothing to know.

    Attributes:
        action, revision, gpus: What was last decided.
        cancel_requested, hold_requested: What its user has asked for here.
    """

    job: JobState | None = None
    gang: GangState | None = None
    planned: Devices | None = None  #: What that allocation holds, or is to hold
    stop_reason: EndReason | None = None
    action: EngineAction | None = None
    revision: int = 0
    gpus: int | None = None
    cancel_requested: bool = False
    hold_requested: bool = False
    controls: bool = True  #: Whether decisions are carried out at all


@dataclass(frozen=True, slots=True)
class Admit:
    """It is new to us; ``again``: it runs again after what we took for its end."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class Stays:
    """It stays as it is, whatever its engine has reported since."""

    deviation: Deviation


@dataclass(frozen=True, slots=True)
class Runs:
    """It runs on these devices; ``deviation``: how that differs from what was decided."""

    devices: Devices
    deviation: Deviation | None = None


@dataclass(frozen=True, slots=True)
class RunsOn:
    """It was to be stopped but runs on: the engine refused."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Its run is over, and it waits again."""

    job: JobState
    reason: str
    detail: str
    preempted: bool = False
    deviation: Deviation | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """It is over."""

    job: JobState
    reason: str
    detail: str
    exit_code: int | None = None
    deviation: Deviation | None = None


Fate = Admit | Stays | Runs | RunsOn | Waits | Ends


def fate_of(known: Known, report: EngineJob, devices: Devices) -> Fate | None:
    """Return what a report means for a job; None if nothing; ``devices``: what the job holds, by our node names."""
    if known.job is None:
        matters = report.state is EngineJobState.RUNNING or (report.state is EngineJobState.PENDING and report.steered)
        return Admit() if matters else None
    if known.job.is_final:
        return _after_the_end(known, report)
    if report.state.is_over:
        return _end_of(known, report)
    if report.state is EngineJobState.RUNNING:
        return _run_of(known, report, devices)
    return _wait_of(known, report)


def _after_the_end(known: Known, report: EngineJob) -> Fate | None:
    if report.state.is_over:
        return Stays(Deviation.ROLLED_BACK) if report.rolled_back else None
    if known.cancel_requested and known.controls and report.steered:
        return None  # cancelled here; its engine is told until it is gone there
    return Admit(again=True)


def _run_of(known: Known, report: EngineJob, devices: Devices) -> Fate | None:
    if known.gang is None:
        follows = known.action is EngineAction.RELEASE or not known.controls
        return Runs(devices, None if follows else Deviation.STARTED)
    if known.gang is GangState.STOPPING:
        return RunsOn() if report.refused and report.revision >= known.revision else None
    if known.gang is GangState.STARTING:
        planned = known.planned or {}
        if _size(devices) != _size(planned):
            return Runs(devices, Deviation.OTHER_SIZE)
        return Runs(devices, None if set(devices) == set(planned) else Deviation.OTHER_NODES)
    if devices and devices != known.planned:
        sizes = [_size(known.planned or {})] + ([known.gpus] if known.action is EngineAction.SHRINK else [])
        return Runs(devices, None if _size(devices) in sizes else Deviation.OTHER_SIZE)
    return None


def _wait_of(known: Known, report: EngineJob) -> Fate | None:
    if known.gang is None or known.gang is GangState.STARTING:  # released, and not started yet
        if report.rolled_back:
            return Stays(Deviation.ROLLED_BACK)
        if known.gang is GangState.STARTING and report.blocked:
            said, deviation = blocked_words(report.blocked), Deviation.NOT_STARTED
            return Waits(JobState.QUEUED, Reason.ENGINE_LIMIT.value, said, deviation=deviation)
        return None
    if known.gang is GangState.STOPPING:
        held = JobState.HELD if known.hold_requested else JobState.QUEUED
        reason = EndReason.HELD if known.hold_requested else known.stop_reason or EndReason.PREEMPTED
        return Waits(held, reason.value, "It was requeued; it starts again from its checkpoint.", preempted=True)
    deviation = Deviation.REQUEUED if known.controls else None
    return Waits(JobState.QUEUED, "requeued", "Its engine requeued it.", deviation=deviation)


def _end_of(known: Known, report: EngineJob) -> Fate:
    said = f" {report.detail}" if report.detail else ""
    match report.state:
        case EngineJobState.SUCCEEDED:
            return Ends(JobState.SUCCEEDED, EndReason.FINISHED.value, "It exited with status 0.", 0)
        case EngineJobState.CANCELLED:
            return Ends(JobState.CANCELLED, CANCELLED_THERE, f"It was cancelled.{said}", report.exit_code)
        case EngineJobState.TIMEOUT:
            return Ends(JobState.FAILED, EndReason.TIME_LIMIT.value, "It reached its time limit.", report.exit_code)
        case EngineJobState.MISSING:
            detail = "Its engine knows it no more, and its accounting does not say how it ended."
            return Ends(JobState.FAILED, "engine_lost", detail, deviation=Deviation.MISSING)
        case _:
            status = "" if report.exit_code is None else f" with status {report.exit_code}"
            return Ends(JobState.FAILED, EndReason.FAILED.value, f"It failed{status}.{said}", report.exit_code)


def _size(devices: Devices) -> int:
    return sum(map(len, devices.values()))
