"""How a gang's reports become its fate. Pure, so that every combination can be tested."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from services.contracts.cells import GIVEN_BACK
from services.contracts.nodes import NOT_COPIED, OUT_OF_MEMORY, PORT_TAKEN, SLICE_GONE, EndedBy, RankState
from services.core.domain.jobs import JobState


class GangState(StrEnum):
    """The state of an allocation."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class EndReason(StrEnum):
    """Why an allocation ended or is being ended; users see the codes as the job's reason."""

    FINISHED = "finished"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"
    PORT_TAKEN = "port_taken"
    CANCELLED = "cancelled"
    HELD = "held"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    START_FAILED = "start_failed"
    TIME_LIMIT = "time_limit"
    SLICE_LOST = "slice_lost"
    GPU_LOST = "gpu_lost"
    NODE_DRAINED = "node_drained"
    NODE_NOT_WOKEN = "node_not_woken"
    INSTALLATION_STOPPED = "installation_stopped"
    NODE_LOSSES = "node_losses"


LOSSES_FORGOTTEN_S = 86_400.0
"""Losses before so long without one are forgotten: unrelated ones of a long job hold it not, and poison one takes at
most a node a day."""
LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True, slots=True)
class ShareReport:
    """The last report on one node's share of a gang; ``lost`` says why once its node has been given up."""

    state: RankState | None = None
    exit_code: int | None = None
    ended_by: EndedBy | None = None
    detail: str | None = None
    lost: EndReason | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no part of the share can be running any more."""
        return self.lost is not None or self.state is RankState.EXITED

    @property
    def broke_off(self) -> EndReason | None:
        """Why the share ended early, if it did."""
        if self.lost:
            return self.lost
        if self.state is not RankState.EXITED:
            return None
        match self.ended_by:
            case EndedBy.REFUSED:
                is_gone = (self.detail or "").startswith(SLICE_GONE)
                return EndReason.SLICE_LOST if is_gone else EndReason.START_FAILED
            case EndedBy.CANNOT_START:
                return EndReason.START_FAILED
            case EndedBy.TIME_LIMIT:
                return EndReason.TIME_LIMIT
            case EndedBy.LEASE | EndedBy.HOST:
                return EndReason.NODE_LOST
            case EndedBy.AGENT:
                return EndReason.INSTALLATION_STOPPED
            case _:
                return EndReason.FAILED if self.exit_code else None


@dataclass(frozen=True, slots=True)
class Gang:
    """A live allocation and everything that was reported about it.

    Attributes:
        cancel_requested, hold_requested: What the user wants; both: that it is given back to its home.
        restarts, max_restarts: Restarts of the job after failures, and how many there may be.
        failed_starts, start_attempts: Gangs of the job that failed to start, and how many may.
        node_losses, max_node_losses: Gangs of the job that lost a GPU, or a node while most others stayed up, each not
            long after the last; and how many there may be before somebody has to look at the job.
    """

    state: GangState
    stop_reason: EndReason | None
    shares: Sequence[ShareReport]  #: One report per node of the gang
    is_late: bool = False  #: It did not start running on all its nodes in time
    work_done: bool = False  #: The job has reported that all its work is done
    cancel_requested: bool = False
    hold_requested: bool = False
    moves: bool = False  #: Whether a place in a cell is to be chosen for the job
    restarts: int = 0
    max_restarts: int = 0
    failed_starts: int = 0
    start_attempts: int = 1
    refused_slices: int = 0  #: Gangs of the job that lost their slice, most of them before they began
    slice_lost: bool = False  #: A node no longer has the slice that the gang holds
    gpu_lost: str = ""  #: What is wrong with a lost GPU that the gang holds; empty if none is lost
    since_loss_s: float = 0.0  #: How long ago an earlier gang of the job lost a node or GPU
    node_losses: int = 0
    max_node_losses: int = 3
    restart_after_node_loss: bool = True  #: Whether the job runs again after it has lost a node
    stands_out: bool = False  #: Whether most other nodes stayed up when this gang lost one
    finished_before: bool = False  #: An earlier gang of the job finished it, according to a node that had been given up


@dataclass(frozen=True, slots=True)
class Run:
    """The whole gang runs now."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop what is left of the gang."""

    reason: EndReason


@dataclass(frozen=True, slots=True)
class End:
    """The gang is gone: release its devices and move the job on."""

    job_state: JobState
    reason: EndReason
    detail: str
    exit_code: int | None = None
    counts_as_restart: bool = False
    counts_as_preemption: bool = False
    node_losses: int | None = None
    repeated: int = 0

    def pause_s(self, ran_s: float, first_s: float) -> float:
        """Return how long the job waits before it may start again; 0 if this is the first such end in a row.

        Args:
            ran_s: How long the gang had its GPUs; a gang that had them for long was no bad start.
            first_s: The first pause; each is twice as long as the one before.
        """
        if not self.repeated or ran_s >= LONGEST_PAUSE_S or self.job_state is not JobState.QUEUED:
            return 0.0
        return min(first_s * 2 ** min(self.repeated - 1, 16), LONGEST_PAUSE_S)


Fate = Run | Stop | End

FINISHED_BEFORE = "It had finished before its node was given up, as the node said when it returned."


def fate_of(gang: Gang) -> Fate | None:
    """Return the fate of a gang, or None while it continues as it is."""
    if all(share.has_ended for share in gang.shares):
        return _end_of(gang)
    if gang.state is GangState.STOPPING:
        return None
    if gang.finished_before:
        return Stop(EndReason.FINISHED)
    broken = [share.broke_off for share in gang.shares if share.broke_off]
    if gang.gpu_lost:
        return Stop(EndReason.GPU_LOST)
    if gang.slice_lost:
        return Stop(EndReason.SLICE_LOST)
    if broken:
        return Stop(_worst(broken))
    if gang.cancel_requested:
        return Stop(EndReason.CANCELLED)
    if gang.hold_requested:
        return Stop(EndReason.HELD)
    if gang.moves:
        return Stop(EndReason.PREEMPTED)
    if gang.state is GangState.STARTING:
        if all(share.state in (RankState.RUNNING, RankState.EXITED) for share in gang.shares):
            return Run()
        if gang.is_late:
            return Stop(EndReason.START_FAILED)
    return None


def _worst(reasons: Sequence[EndReason]) -> EndReason:
    # A share that failed by itself takes its peers with it, and they may be reported as killed: it is the cause. But
    # what fails on one node when the time limit has ended the gang on another did not fail by itself.
    order = (
        EndReason.TIME_LIMIT,
        EndReason.FAILED,
        EndReason.START_FAILED,
        EndReason.SLICE_LOST,
        EndReason.INSTALLATION_STOPPED,
        EndReason.NODE_DRAINED,
        EndReason.NODE_NOT_WOKEN,
        EndReason.NODE_LOST,
    )
    for reason in order:
        if reason in reasons:
            return reason
    return reasons[0]


def _end_of(gang: Gang) -> End:
    by_itself = all(share.ended_by is EndedBy.ITSELF and share.exit_code == 0 for share in gang.shares)
    exited_well = all(share.exit_code == 0 and not share.lost for share in gang.shares)
    if by_itself or (exited_well and gang.work_done):
        return End(JobState.SUCCEEDED, EndReason.FINISHED, "All its processes exited with status 0.", exit_code=0)
    if gang.finished_before:
        return End(JobState.SUCCEEDED, EndReason.FINISHED, FINISHED_BEFORE, exit_code=0)
    if gang.cancel_requested:
        detail = GIVEN_BACK if gang.hold_requested else "Cancelled by its owner."
        return End(JobState.CANCELLED, EndReason.CANCELLED, detail, _exit_code(gang))
    if any(share.broke_off is EndReason.TIME_LIMIT for share in gang.shares):
        detail = _detail(gang, EndReason.TIME_LIMIT) or "It reached its time limit."
        return End(JobState.FAILED, EndReason.TIME_LIMIT, detail, _exit_code(gang))
    match _reason(gang):
        case EndReason.GPU_LOST as reason:
            detail = f"{gang.gpu_lost} {_not_copied(gang) or 'It will continue from its checkpoint on others.'}".strip()
            return _counted(gang, _paused(gang, reason, detail, preempted=False))
        case EndReason.SLICE_LOST as reason:
            end = _paused(gang, reason, _continues(gang, "Its node no longer has its MIG slice"), preempted=False)
            # Where it was refused it never ran, and waits for what its node will say of its slices.
            return _counted(gang, end) if gang.slice_lost else replace(end, repeated=gang.refused_slices)
        case EndReason.PREEMPTED | EndReason.HELD | EndReason.CANCELLED as reason:
            return _paused(gang, reason, _continues(gang, "Stopped with its grace period"), preempted=True)
        case EndReason.INSTALLATION_STOPPED as reason:
            return _paused(gang, reason, _continues(gang, "The installation was stopped"), preempted=False)
        case EndReason.NODE_DRAINED as reason:
            return _paused(
                gang, reason, _continues(gang, "A node it ran on was drained and went away"), preempted=False
            )
        case EndReason.NODE_NOT_WOKEN as reason:
            return _paused(gang, reason, "A node that it was to run on did not wake.", preempted=False)
        case EndReason.NODE_LOST as reason:
            if not gang.restart_after_node_loss:
                return End(JobState.FAILED, reason, "A node it ran on was lost, after which it is not to run again.")
            end = _paused(gang, reason, _continues(gang, "A node it ran on was lost"), preempted=False)
            return _counted(gang, end) if gang.stands_out else end
        case EndReason.START_FAILED as reason:
            detail = _detail(gang) or "It did not start running in time."
            if any(share.ended_by is EndedBy.CANNOT_START for share in gang.shares):
                return End(JobState.FAILED, reason, f"{detail.rstrip('.')}.", _exit_code(gang))
            if gang.failed_starts + 1 < gang.start_attempts:
                return replace(_paused(gang, reason, detail, preempted=False), repeated=gang.failed_starts)
            tried = f"{detail.rstrip('.')}. Tried {gang.start_attempts} times."
            return End(JobState.FAILED, reason, tried, _exit_code(gang))
        case _:
            return _failure(gang)


def _reason(gang: Gang) -> EndReason:
    reason = gang.stop_reason or _worst([share.broke_off or EndReason.FAILED for share in gang.shares])
    if gang.gpu_lost and reason in (EndReason.FAILED, EndReason.START_FAILED):
        return EndReason.GPU_LOST  # whatever its processes made of that
    if gang.slice_lost and reason in (EndReason.FAILED, EndReason.START_FAILED):
        return EndReason.SLICE_LOST  # a process whose device goes away fails, which is no fault of the job
    return reason


def _continues(gang: Gang, why: str) -> str:
    """Return why a gang was stopped and what it will continue from."""
    lost = _not_copied(gang)
    return f"{why}. {lost}" if lost else f"{why}; it will continue from its checkpoint."


def _not_copied(gang: Gang) -> str:
    """Return what a node says about a checkpoint that other nodes do not have; empty if none does."""
    said = [share.detail for share in gang.shares if share.detail and NOT_COPIED in share.detail]
    return said[0][said[0].index(NOT_COPIED) :] if said else ""


def _paused(gang: Gang, reason: EndReason, detail: str, *, preempted: bool) -> End:
    state = JobState.HELD if gang.hold_requested else JobState.QUEUED
    return End(state, EndReason.HELD if gang.hold_requested else reason, detail, counts_as_preemption=preempted)


def _counted(gang: Gang, end: End) -> End:
    """Return how a gang that lost a node or GPU ends: with its job on hold, if that has happened too often."""
    losses = 1 + (gang.node_losses if gang.since_loss_s < LOSSES_FORGOTTEN_S else 0)
    if losses < gang.max_node_losses:
        return replace(end, node_losses=losses, repeated=losses - 1)
    detail = (
        f"A node or GPU was lost under it {losses} times while most others stayed up, so it may be what ends them. "
        f"Once released, it may lose {gang.max_node_losses} again. {_not_copied(gang)}"
    )
    return End(JobState.HELD, EndReason.NODE_LOSSES, detail.strip(), node_losses=losses)


def _failure(gang: Gang) -> End:
    reason = EndReason.FAILED
    for words, cause in ((OUT_OF_MEMORY, EndReason.OUT_OF_MEMORY), (PORT_TAKEN, EndReason.PORT_TAKEN)):
        if concerned := [share for share in gang.shares if words in (share.detail or "")]:
            reason, gang = cause, replace(gang, shares=concerned)  # whatever the others made of that
            break
    code = _exit_code(gang)
    detail = _detail(gang) or f"It exited with status {code}."
    if gang.restarts < gang.max_restarts:
        state = JobState.HELD if gang.hold_requested else JobState.QUEUED
        detail = f"{detail} Restart {gang.restarts + 1} of {gang.max_restarts}."
        return End(state, reason, detail, code, counts_as_restart=True, repeated=gang.restarts)
    return End(JobState.FAILED, reason, detail, code)


def _exit_code(gang: Gang) -> int | None:
    own = [share.exit_code for share in gang.shares if share.exit_code and share.ended_by is EndedBy.ITSELF]
    others = [share.exit_code for share in gang.shares if share.exit_code]
    return next(iter(own or others), 0 if all(share.exit_code == 0 for share in gang.shares) else None)


def _detail(gang: Gang, reason: EndReason | None = None) -> str | None:
    """Return the detail from the first share that broke off; with ``reason``, from the first that did so for it."""
    broke_off = [share for share in gang.shares if share.detail and share.broke_off in (reason or share.broke_off,)]
    own = [share.detail for share in broke_off if share.broke_off]
    return next(iter(own), None)
