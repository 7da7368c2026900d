"""Work that takes longer than a request should: its state, and why it failed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from services.contracts.schema import Message


class WorkState(StrEnum):
    """State of a piece of work. `succeeded` means that there is an answer, which may be that there is no solution."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class WorkFailureCode(StrEnum):
    """Stable code for why there is no answer."""

    TIME_LIMIT = "time_limit"  #: It exceeded its time limit
    WORKER_LOST = "worker_lost"  #: Its worker died at every attempt, most likely because it ran out of memory
    INVALID_PROBLEM = "invalid_problem"
    UNAVAILABLE = "unavailable"  #: Another service that it needs did not answer
    OUTDATED = "outdated"  #: What it was made from has changed so much that the answer cannot be used
    INTERNAL = "internal"


class WorkFailure(Message):
    """Why there is no answer: a code for programs and a text for people."""

    code: WorkFailureCode
    detail: str


@dataclass(frozen=True)
class WorkProblem:
    """What is to be done, with all its inputs resolved."""

    document: Any  #: JSON that a worker gets
    sha256: bytes  #: Equal problems have equal hashes
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])  #: Further columns of its row


@dataclass(frozen=True)
class Draft:
    """A valid submission; its ids and hashes are fixed before the first attempt to store it."""

    id: str
    tenant_id: str
    key_id: str
    problem: WorkProblem
    idempotency_key: str | None
    body_sha256: bytes


@dataclass(frozen=True)
class WorkRecord:
    """A piece of work as it stands."""

    id: str
    tenant_id: str
    state: WorkState
    attempts: int  #: How often a worker has taken it up
    submitted_at: datetime
    started_at: datetime | None  #: When a worker last took it up
    ended_at: datetime | None
    failure: WorkFailure | None
    problem: Any = None  #: JSON; only if the whole record was asked for, or claimed
    result: Any = None  #: JSON; likewise
    claim: str | None = None  #: The worker's claim, if the work was just claimed
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])  #: What else the table stores about it


@dataclass(frozen=True)
class Submitted:
    """The piece of work for a submission, which may have been submitted earlier."""

    id: str
    is_new: bool


class KeyReusedError(Exception):
    """The idempotency key was used with another body."""


class TooManyPendingError(Exception):
    """The tenant has the maximum amount of work queued or running."""
