"""Work that takes longer than a request should: how it stands, and why there is no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.contracts.schema import Message


class WorkState(StrEnum):
    """Where a piece of work stands. `succeeded` means answered: that there is no solution is an answer too."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class WorkFailureCode(StrEnum):
    """Why there is no answer."""

    TIME_LIMIT = "time_limit"
    """It ran past every limit, its own included."""
    WORKER_LOST = "worker_lost"
    """Its worker died under it, as often as it was tried; most likely out of memory."""
    INVALID_PROBLEM = "invalid_problem"
    UNAVAILABLE = "unavailable"
    """Another service that it needs did not answer."""
    INTERNAL = "internal"


class WorkFailure(Message):
    """Why there is no answer, for programs and for people."""

    code: WorkFailureCode
    detail: str


@dataclass(frozen=True)
class WorkProblem:
    """What is to be done: nothing is left to look up in it.

    Attributes:
        document: JSON; what a worker is given.
        sha256: Equal problems have equal hashes.
        columns: What else the table keeps of it.
    """

    document: Any
    sha256: bytes
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Draft:
    """A valid submission: its ids and hashes are settled before the first attempt to store it."""

    id: str
    tenant_id: str
    key_id: str
    problem: WorkProblem
    idempotency_key: str | None
    body_sha256: bytes


@dataclass(frozen=True)
class Submitted:
    """Which piece of work a submission stands for."""

    id: str
    is_new: bool


class KeyReusedError(Exception):
    """The idempotency key stands for another body."""


class TooManyPendingError(Exception):
    """The tenant has as much work queued or running as it may."""
