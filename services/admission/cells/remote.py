"""A cell, as it is asked over its public API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from services.contracts.codes import ProblemCode
from services.contracts.explanations import StartEstimate
from services.contracts.identity import IDEMPOTENCY_HEADER, OwnIdentity
from services.contracts.jobs import JobFootprint, JobProgress
from services.contracts.nodes import Count, Reading
from services.contracts.reports import JobFootprintReport
from services.contracts.schema import Instant, Message, Page, Text
from services.core.domain.jobs import JobState
from services.db.sealing import Sealer, SealError
from services.kit.http import ServiceClient
from services.kit.problems import ProblemError, unavailable
from services.kit.text import visible

HOME_LABEL, COPY_LABEL = "wattshift.home", "wattshift.copy-of"
"""Labels of a copy in a cell: whose jobs it is one of, and of which job and attempt."""

TIMEOUT_S = 10.0
MOST_BYTES = 64 * 2**20  #: Of an answer
MOST_PAGES = 200  #: Of jobs, 500 each, that are read at once: a cell may list ever new ones
M = TypeVar("M", bound=Message)
LIVE = [state for state in JobState if not state.is_final]


_AMOUNT = TypeAdapter[float](Reading)


def _within_bounds(footprint: JobFootprint) -> JobFootprint:
    for _, amount in footprint:
        _AMOUNT.validate_python(amount)
    return footprint


class RemoteSpec(Message):
    """What of a copy's spec is looked at."""

    labels: dict[str, str] = Field(default_factory=dict[str, str])


class RemoteJob(Message):
    """What of a job's copy is kept, within what this installation can keep."""

    id: Text
    spec: RemoteSpec = Field(default_factory=RemoteSpec, exclude=True)
    state: JobState
    reason: Text | None = None
    detail: Text | None = None
    generation: Count
    preemptions: Count = 0
    restarts: Count = 0
    gpus: Count = 0
    exit_code: Count | None = None
    started_at: Instant | None = None
    ended_at: Instant | None = None
    expected_start_at: Instant | None = None
    progress: JobProgress | None = None
    footprint: Annotated[JobFootprint, AfterValidator(_within_bounds)] = JobFootprint()


class Made(Message):
    """The answer to a submission."""

    id: str


class UnreadableError(ProblemError):
    """A cell has answered, but not as an installation does."""


def copy_of(spec: Mapping[str, Any], labels: Mapping[str, str], project: str | None) -> dict[str, Any]:
    """Return what is submitted to a cell for a stored job: the same job, with labels that say what it is a copy of.

    Args:
        project: The only project of the cell's key, whose name is left out; None: the job's own is kept.
    """
    left_out = {"cells", "may_move", "notify", "hold"} | (set() if project is None else {"project"})
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
        who = f"Cell {name}"
        self._client = ServiceClient(session, url, who, timeout_s=TIMEOUT_S, most_bytes=MOST_BYTES)
        self._name, self._headers = name, headers

    async def who_am_i(self) -> OwnIdentity:
        """Return whose the key is."""
        return await self._ask(OwnIdentity, "GET", "/v1/whoami")

    async def estimate(self, body: bytes) -> StartEstimate:
        """Return what would become of a job there now."""
        return await self._ask(StartEstimate, "POST", "/v1/jobs:estimate", body)

    async def submit(self, body: bytes, key: str) -> str:
        """Submit a copy, once for each idempotency key; return its id."""
        return (await self._ask(Made, "POST", "/v1/jobs", body, key)).id

    async def live(self, home: str) -> dict[str, RemoteJob | None]:
        """Return the copies of an installation's jobs that have not ended, by their ids; None: it cannot be read."""
        return await self._listed(f"{HOME_LABEL}={home}", LIVE)

    async def made(self, copy: str) -> str | None:
        """Return the id of the copy with this label; None if there is none."""
        return next(iter(await self._listed(f"{COPY_LABEL}={copy}", ())), None)

    async def job(self, remote_id: str) -> RemoteJob:
        return await self._ask(RemoteJob, "GET", _path(remote_id))

    async def steer(self, remote_id: str, command: str) -> RemoteJob:
        """Give a command, such as ``cancel``; return the copy after that."""
        return await self._ask(RemoteJob, "POST", f"{_path(remote_id)}/{command}")

    async def terms(self, remote_id: str) -> tuple[str, str, float] | None:
        """Return the zone, signal and PUE by which the cell's ledger prices a copy; None before it is in there."""
        found = await self._ask(JobFootprintReport, "GET", f"{_path(remote_id)}/footprint?limit=1")
        if found.zone is None or found.signal is None:
            return None
        return found.zone, found.signal.value, found.pue or 1.0

    async def _listed(self, label: str, states: Sequence[JobState]) -> dict[str, RemoteJob | None]:
        asked = "&".join([f"label={quote(label, safe='')}", *(f"state={state}" for state in states)])
        found: dict[str, RemoteJob | None] = {}
        more = ""
        for _ in range(MOST_PAGES):
            page = await self._ask(Page[dict[str, Any]], "GET", f"/v1/jobs?limit=500&{asked}{more}")
            known = len(found)
            for item in page.items:
                try:
                    found[self._read(Made, item).id] = self._read(RemoteJob, item)
                except UnreadableError:  # it costs no other job its turn
                    found[self._read(Made, item).id] = None
            if page.next_cursor is None or len(found) == known:
                break
            more = f"&cursor={quote(page.next_cursor, safe='')}"
        return found

    async def _ask(self, kind: type[M], method: str, path: str, body: bytes | None = None, key: str = "") -> M:
        sent = {**self._headers, IDEMPOTENCY_HEADER: key} if key else self._headers
        try:
            found = await self._client.request(method, path, body=body, headers=sent, attempts=1)
        except ProblemError as error:
            raise ProblemError(error.status, error.problem_code, visible(error.detail)) from error
        return self._read(kind, found)

    def _read(self, kind: type[M], document: object) -> M:
        try:
            return kind.as_stored(document)
        except ValidationError as error:
            detail = f"Cell {self._name} does not answer as an installation of Wattshift does."
            raise UnreadableError(503, ProblemCode.UNAVAILABLE, detail) from error


def _path(remote_id: str) -> str:
    return f"/v1/jobs/{quote(remote_id, safe='')}"
