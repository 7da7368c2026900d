"""Instances as the controller sees them: their rows, and the jobs they run as."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

from services.contracts.schema import Message
from services.contracts.serving import InstanceState, PoolPlace, PoolSpec, ServerMode, ServerProbes
from services.core.domain.jobs import JobState


class InstanceReason(StrEnum):
    """Why an instance waits, leaves or ended, if that is not its job's own reason. The codes are public API."""

    LOADING = "loading"
    """Its process runs and does not answer yet."""
    ADMISSION_UNAVAILABLE = "admission_unavailable"
    """Its job could not be submitted yet."""
    REFUSED = "refused"
    """Its job was refused."""
    JOB_MISSING = "job_missing"
    """Its job no longer exists."""
    NOT_READY = "not_ready"
    """It did not answer within ``ready_timeout_s``."""
    UNHEALTHY = "unhealthy"
    """It was silent for ``unhealthy_timeout_s``."""
    NOT_NEEDED = "not_needed"
    """The plan in force does not need it."""
    TERMS_CHANGED = "terms_changed"
    """The pool was changed: another one takes its place."""
    POOL_DELETED = "pool_deleted"
    """Its pool is being deleted."""


SENTENCES = {
    InstanceReason.LOADING: "Its process runs and does not answer yet.",
    InstanceReason.ADMISSION_UNAVAILABLE: "Its job could not be submitted yet; that is tried again.",
    InstanceReason.JOB_MISSING: "Its job no longer exists.",
    InstanceReason.NOT_NEEDED: "The plan in force does not need it.",
    InstanceReason.TERMS_CHANGED: "The pool was changed: another instance takes its place.",
    InstanceReason.POOL_DELETED: "Its pool is being deleted.",
}

LEFT_AS_PLANNED = (InstanceReason.NOT_NEEDED, InstanceReason.TERMS_CHANGED, InstanceReason.POOL_DELETED)
"""The reasons of instances that left without a fault."""


NOT_OF_PROCESS = {"name", "idle_w", "start_s", "stop_s", "start_wh", "stop_wh", "max_requests"}
"""Of a mode: what may change while its instances keep running."""


class InstanceTerms(Message):
    """The specs that an instance is made from."""

    mode: ServerMode
    place: PoolPlace
    probes: ServerProbes

    def process(self) -> dict[str, Any]:
        """Return what its process depends on; instances for which this is equal run the same process."""
        return {
            **self.mode.model_dump(exclude=NOT_OF_PROCESS),
            **self.place.model_dump(include={"zone", "node_labels"}),
            "grace_s": self.probes.grace_s,
        }


class Blueprint:
    """The specs of a pool's instances."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self._places = {place.name: place for place in spec.places}
        self._modes = {mode.name: mode for mode in spec.modes}
        self._processes: dict[tuple[str, str], dict[str, Any]] = {}

    def terms(self, at: tuple[str, str]) -> InstanceTerms | None:
        """Return the specs of an instance created now; None if the place or mode is gone."""
        place, mode = self._places.get(at[0]), self._modes.get(at[1])
        return InstanceTerms(mode=mode, place=place, probes=self.spec.probes) if place and mode else None

    def is_current(self, at: tuple[str, str], process: dict[str, Any]) -> bool:
        """Whether an instance created now at that place and mode would run this process."""
        if at not in self._processes:
            terms = self.terms(at)
            self._processes[at] = terms.process() if terms else {}
        return self._processes[at] == process


@dataclass(frozen=True, slots=True)
class InstanceJob:
    """The job of an instance.

    Attributes:
        queued_at: Since when it waits.
        url: Where it listens; None unless its process runs.
        running_at: Since when its process runs.
    """

    state: JobState
    reason: str | None = None
    detail: str | None = None
    cancel_requested: bool = False
    queued_at: datetime | None = None
    url: str | None = None
    running_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    """A row of ``pool_instances`` that has not ended. ``job_id`` is found by the submission's key, where need be."""

    id: str
    pool: str
    tenant_id: str
    place: str
    mode: str
    state: InstanceState
    terms: InstanceTerms
    created_at: datetime
    partition: str | None = None
    request_class: str | None = None
    job_id: str | None = None
    job: InstanceJob | None = None
    url: str | None = None
    reason: str | None = None
    detail: str | None = None
    ready_at: datetime | None = None
    silent_since: datetime | None = None
    draining_at: datetime | None = None
    stopping_at: datetime | None = None
    ended_at: datetime | None = None
    process: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def at(self) -> tuple[str, str]:
        """Its place and mode."""
        return self.place, self.mode

    @property
    def job_has_ended(self) -> bool:
        """Whether its job has ended and no other will run; false before it has a job."""
        return self.job_id is not None and (self.job is None or self.job.state.is_final)


@lru_cache(maxsize=4_096)
def read_terms(document: str) -> tuple[InstanceTerms, dict[str, Any]]:
    """Return terms as stored, and what the process depends on; cached, because many instances share few terms."""
    terms = InstanceTerms.model_validate_json(document)
    return terms, terms.process()
