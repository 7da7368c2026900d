"""The states of a job."""

from enum import StrEnum


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
