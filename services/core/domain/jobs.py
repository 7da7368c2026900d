"""The states of a job, and which may follow which."""

from enum import StrEnum

from services.core.domain.errors import TransitionError


class JobState(StrEnum):
    """State of a job from submission to its end."""

    HELD = "held"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether this state is final: no transition leaves it."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def holds_gpus(self) -> bool:
        """Whether a job in this state has devices of its own."""
        return self in (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING)


GENERATIONS = 1_000
"""By how much a restore from a backup raises the numbers of gangs: no job is given GPUs so often after the backup."""

S = JobState

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    S.HELD: frozenset({S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.QUEUED: frozenset({S.HELD, S.STARTING, S.SUCCEEDED, S.CANCELLED, S.FAILED}),
    S.STARTING: frozenset({S.RUNNING, S.PREEMPTING, S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.RUNNING: frozenset({S.PREEMPTING, S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.PREEMPTING: frozenset({S.QUEUED, S.HELD, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
}
"""``STARTING`` and ``RUNNING`` fall back to ``QUEUED`` directly when their node is lost; ``PREEMPTING`` becomes
``HELD`` when a running job was put on hold. ``QUEUED`` and ``HELD`` become ``SUCCEEDED`` when a node that was given up
returns and says that it had finished the job, and ``FAILED`` when the engine of the job has lost it."""


def check_transition(current: JobState, following: JobState) -> None:
    """Raise TransitionError unless a job may go from ``current`` to ``following``."""
    if following not in TRANSITIONS[current]:
        raise TransitionError(f"a job that is {current} cannot become {following}")
