"""A cell, as it is asked over its public API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from pydantic import ConfigDict

from services.contracts.explanations import StartEstimate
from services.contracts.identity import IDEMPOTENCY_HEADER, OwnIdentity
from services.contracts.jobs import JobFootprint, JobProgress
from services.contracts.reports import JobFootprintReport
from services.contracts.schema import Instant, Message
from services.core.domain.jobs import JobState
from services.db.sealing import Sealer, SealError
from services.kit.http import ServiceClient
from services.kit.problems import unavailable

HOME_LABEL, COPY_LABEL = "wattshift.home", "wattshift.copy-of"
"""Labels of a copy in a cell: whose jobs it is one of, and of which job and attempt."""

TIMEOUT_S = 10.0
LIVE = [state for state in JobState if not state.is_final]


class Lenient(Message):
    """What a cell answers, which may be of another release."""

    model_config = ConfigDict(extra="ignore")


class RemoteJob(Lenient):
    """What of a job's copy is kept."""

    id: str
    state: JobState
    reason: str | None = None
    detail: str | None = None
    generation: int
    preemptions: int = 0
    restarts: int = 0
    gpus: int = 0
    exit_code: int | None = None
    started_at: Instant | None = None
    ended_at: Instant | None = None
    expected_start_at: Instant | None = None
    progress: JobProgress | None = None
    footprint: JobFootprint = JobFootprint()


class RemotePage(Lenient):
    """A page of copies."""

    items: list[RemoteJob]
    next_cursor: str | None = None


class Made(Lenient):
    """The answer to a submission."""

    id: str


@dataclass(frozen=True)
class Terms:
    """By which terms a cell's ledger prices a job."""

    zone: str
    signal: str
    pue: float


def copy_of(spec: Mapping[str, Any], labels: Mapping[str, str], project: str | None) -> dict[str, Any]:
    """Return what is submitted to a cell for a stored job: the same job, with labels that say what it is a copy of.

    Args:
        project: The only project of the cell's key, whose name is left out; None: the job's own is kept.
    """
    left_out = ("cells", "notify", "hold") if project is None else ("cells", "notify", "hold", "project")
    kept = {name: value for name, value in spec.items() if name not in left_out}
    return {**kept, "labels": {**spec.get("labels", {}), **labels}}


class Reach:
    """How cells are reached, outside of this installation."""

    def __init__(self, session: aiohttp.ClientSession, sealer: Sealer) -> None:
        self.session, self.sealer = session, sealer

    def headers(self, name: str, key: bytes) -> dict[str, str]:
        """Return what proves to a cell who asks; ``ProblemError``: 503 if its key cannot be opened."""
        try:
            return headers_of(self.sealer.open(key, *_place(name)))
        except SealError as error:
            raise unavailable(f"Cell {name}, whose key was sealed under another key of the installation,") from error

    def seal(self, name: str, key: str) -> bytes:
        """Return a cell's key, sealed."""
        return self.sealer.seal(key, *_place(name))

    def cell(self, name: str, url: str, key: bytes) -> RemoteCell:
        """Return how a cell is asked; ``ProblemError`` as for ``headers``."""
        return RemoteCell(self.session, url, name, self.headers(name, key))


def headers_of(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _place(name: str) -> tuple[str, str]:
    return "cell key", name


class RemoteCell:
    """Asks one cell. All of it raises ``ProblemError``: what the cell answered, or 503 if it did not."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str, headers: Mapping[str, str]) -> None:
        self._client = ServiceClient(session, url, f"Cell {name}", timeout_s=TIMEOUT_S)
        self._headers = headers

    async def who_am_i(self) -> OwnIdentity:
        """Return whose the key is."""
        return OwnIdentity.as_stored(await self._ask("GET", "/v1/whoami"))

    async def estimate(self, body: bytes) -> StartEstimate:
        """Return what would become of a job there now."""
        return StartEstimate.as_stored(await self._ask("POST", "/v1/jobs:estimate", body=body))

    async def submit(self, body: bytes, key: str) -> str:
        """Submit a copy, once for each idempotency key; return its id."""
        sent = {IDEMPOTENCY_HEADER: key}
        return Made.as_stored(await self._ask("POST", "/v1/jobs", body=body, headers=sent)).id

    async def live(self, home: str) -> dict[str, RemoteJob]:
        """Return the copies of an installation's jobs that have not ended, by their ids."""
        return await self._listed([f"{HOME_LABEL}={home}"], LIVE)

    async def made(self, copy: str) -> str | None:
        """Return the id of the copy with this label; None if there is none."""
        return next(iter(await self._listed([f"{COPY_LABEL}={copy}"], ())), None)

    async def job(self, remote_id: str) -> RemoteJob:
        return RemoteJob.as_stored(await self._ask("GET", _path(remote_id)))

    async def steer(self, remote_id: str, command: str) -> RemoteJob:
        """Give a command, such as ``cancel``; return the copy after that."""
        return RemoteJob.as_stored(await self._ask("POST", f"{_path(remote_id)}/{command}"))

    async def terms(self, remote_id: str) -> Terms | None:
        """Return the terms of a copy in the cell's ledger; None before it is in there."""
        found = JobFootprintReport.as_stored(await self._ask("GET", f"{_path(remote_id)}/footprint?limit=1"))
        if found.zone is None or found.signal is None:
            return None
        return Terms(found.zone, found.signal.value, found.pue or 1.0)

    async def _listed(self, labels: Sequence[str], states: Sequence[JobState]) -> dict[str, RemoteJob]:
        asked = "&".join([*(f"label={quote(label, safe='')}" for label in labels), *(f"state={s}" for s in states)])
        found: dict[str, RemoteJob] = {}
        cursor: str | None = None
        while True:
            more = f"&cursor={cursor}" if cursor else ""
            page = RemotePage.as_stored(await self._ask("GET", f"/v1/jobs?limit=500&{asked}{more}"))
            found.update((job.id, job) for job in page.items)
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _ask(
        self, method: str, path: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        sent = {**self._headers, **(headers or {})}
        return await self._client.request(method, path, body=body, headers=sent, attempts=1)


def _path(remote_id: str) -> str:
    return f"/v1/jobs/{quote(remote_id, safe='')}"
