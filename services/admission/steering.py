"""What cancel, hold and release do in each job state; no effects."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from services.contracts.cells import GIVEN_BACK, WITHDRAWN
from services.core.domain.errors import TransitionError
from services.core.domain.jobs import JobState, check_transition

BUDGET_EXCEEDED = "budget_exceeded"
"""The reason of jobs that a budget holds, and releases."""


class Command(StrEnum):
    """What a user may do to a job."""

    CANCEL = "cancel"
    HOLD = "hold"
    RELEASE = "release"
    FORGET_CHECKPOINT = "forget-checkpoint"
    WITHDRAW = "withdraw"
    GIVE_BACK = "give-back"


class Decision(NamedTuple):
    """A change to a job."""

    event: str  #: Type of the event that announces it
    values: dict[str, Any]  #: New values of columns
    now: tuple[str, ...] = ()  #: Columns that are set to the time of the transaction


class Steered(NamedTuple):
    """What a command on a job, or on tasks that are alike, depends on."""

    state: JobState
    cancel_requested: bool = False
    hold_requested: bool = False
    tenant_id: str = ""
    bound_to: Sequence[str] = ()  #: The only nodes that it may start on, as they have its checkpoint
    cell: str | None = None  #: The cell that has it
    generation: int = 0  #: How often it was given GPUs
    reason: str | None = None


def decide(command: Command, job: Steered) -> Decision | None:
    """Return what to change; None if the job is already as requested.

    A job without GPUs changes state at once. One that holds GPUs is only marked: the scheduler, the only process that
    ends gangs, does the rest; and so is one that a cell has, until the cell has done it. One that is to be given back
    is marked as both cancelled and held, which nothing else is.

    Raises:
        TransitionError: The job has ended or is being cancelled, so that the command is not possible.
    """
    state, cancel_requested = job.state, job.cancel_requested
    match command:
        case Command.CANCEL | Command.WITHDRAW | Command.GIVE_BACK:
            if command is Command.WITHDRAW and job.generation:
                raise TransitionError("The job has been started, and is not withdrawn any more.")
            if state is JobState.CANCELLED:
                return None
            if state.holds_gpus or (job.cell and not state.is_final):
                flags = {"cancel_requested": True, "hold_requested": command is Command.GIVE_BACK}
                return None if cancel_requested else Decision("job.cancel_requested", flags)
            if state.is_final:
                raise TransitionError(f"The job has {state} and cannot be cancelled any more.")
            detail = {Command.WITHDRAW: WITHDRAWN, Command.GIVE_BACK: GIVEN_BACK}.get(command)
            return _move(state, JobState.CANCELLED, "cancelled", ("ended_at",), expected_start_at=None, detail=detail)
        case Command.HOLD:
            if state is JobState.HELD:
                ours = {"state": state, "reason": "held", "detail": None}
                return Decision("job.held", ours) if job.reason == BUDGET_EXCEEDED else None
            _refuse_if_over(state, cancel_requested, "held")
            if state.holds_gpus or job.cell:
                return None if job.hold_requested else Decision("job.hold_requested", {"hold_requested": True})
            return _move(state, JobState.HELD, "held", queued_at=None, expected_start_at=None)
        case Command.RELEASE:
            _refuse_if_over(state, cancel_requested, "released")
            if state is JobState.HELD:
                return _move(state, JobState.QUEUED, None, ("queued_at",), node_losses=0, not_before=None)
            return Decision("job.hold_withdrawn", {"hold_requested": False}) if job.hold_requested else None
        case Command.FORGET_CHECKPOINT:
            _refuse_if_over(state, cancel_requested, "sent elsewhere")
            if state.holds_gpus:
                raise TransitionError(
                    f"The job is {state}. Only one that waits can begin anew elsewhere: hold it before."
                )
            if not job.bound_to:
                return None
            said = {"reason": None, "detail": None} if state is JobState.QUEUED else {}
            return Decision("job.checkpoint_forgotten", {"bound_to": None, **said})


def _refuse_if_over(state: JobState, cancel_requested: bool, asked: str) -> None:
    if state.is_final:
        raise TransitionError(f"The job has ended ({state}) and cannot be {asked}.")
    if cancel_requested:
        raise TransitionError(f"The job is being cancelled and cannot be {asked}.")


def _move(
    current: JobState, following: JobState, reason: str | None, now: tuple[str, ...] = (), **values: Any
) -> Decision:
    check_transition(current, following)
    flags = {"hold_requested": False}
    return Decision(f"job.{following}", {"state": following, "reason": reason, "detail": None, **flags, **values}, now)
