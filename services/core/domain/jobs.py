"""A job's states and the sizes its gang may take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from services.core.domain.errors import DomainError


class JobState(StrEnum):
    """Where a job stands between submission and its end."""

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
        """Whether no transition leaves this state."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def holds_gpus(self) -> bool:
        """Whether a job in this state has devices of its own."""
        return self in (JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING)


@dataclass(frozen=True, slots=True)
class GangSize:
    """The GPU counts a gang may have: ``minimum, minimum + step, ..., maximum``."""

    minimum: int
    maximum: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.minimum < 1 or self.step < 1 or self.maximum < self.minimum:
            raise DomainError(f"impossible gang: min {self.minimum}, max {self.maximum}, step {self.step}")
        if (self.maximum - self.minimum) % self.step:
            raise DomainError(f"max {self.maximum} is not min {self.minimum} plus whole steps of {self.step}")
