"""Commands in running jobs: who may run one, on which node, and the audit of each; the node does the rest."""

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.agents import Agent, AgentTokens
from services.admission.jobs import Jobs
from services.admission.repository.access import write_audit
from services.admission.repository.jobs import Allocated, JobRepository
from services.admission.settings import AdmissionSettings
from services.contracts.codes import ProblemCode
from services.contracts.exec_sessions import SILENCE_S, ExecEvent, ExecInput, ExecInputAnswer, ExecRequest, FilesRequest
from services.contracts.identity import Identity
from services.contracts.jobs import Job
from services.contracts.problems import FieldError
from services.core.domain.jobs import JobState
from services.kit.http import problem_of, read_most
from services.kit.logging import Log
from services.kit.problems import ProblemError, conflict, found, not_found, unavailable
from services.kit.tasks import end_tasks

log = Log(__name__)

_ID = re.compile(r"exec_(\d{1,9})_(\d{1,5})_[0-9a-f]{32}")
_LONGEST_EXIT_BYTES = 4_096
_MOST_ANSWER_BYTES = 65_536
_AUDITED_CHARACTERS = 1_000
_AUDIT_PATIENCE_S = 5.0


class _Place(NamedTuple):
    """The node that a command runs on, and the gang that it runs beside."""

    agent: Agent
    node_id: str
    allocation_id: str


class Exec:
    """Opens sessions and relays their events and input.

    A session lives as long as the response that carries its events. Its id names the gang and the node, so that any
    replica of admission can tell where its input goes.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        jobs: Jobs,
        session: aiohttp.ClientSession,
        tokens: AgentTokens,
        settings: AdmissionSettings,
    ) -> None:
        """Take how nodes are asked: with no limit of connections, since each exec session holds one."""
        self._engine, self._jobs, self._session, self._tokens = engine, jobs, session, tokens
        timeout_s = settings.agent_timeout_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._streamed = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=SILENCE_S)
        self._most_per_key = settings.exec_sessions_per_key
        self._open: Counter[str] = Counter()
        self._audits: set[asyncio.Task[None]] = set()

    async def run(self, identity: Identity, job_id: str, request: ExecRequest) -> AsyncIterator[bytes]:
        """Start a command; return its events.

        Raises:
            ProblemError: 404 if there is no such job, rank or node, 403 if the job is another user's, 409 if it is
                not running, 429 beyond the limits, 503 if the node does not answer.
        """
        job = await self._jobs.get(identity, job_id)
        if job.state is not JobState.RUNNING:
            raise conflict(f"Job {job.name} is {job.state}; a command runs in a running job.")
        reached = await self._reachable(identity, job)
        index, rank = _share(reached, request)
        request = request.model_copy(update={"rank": rank, "node": None})
        return await self._begin(identity, job, reached, index, request)

    async def read_files(self, identity: Identity, job_id: str, request: FilesRequest) -> AsyncIterator[bytes]:
        """Read files of a job that does not run, from the first node of its newest gang; return a command's events.

        Raises:
            ProblemError: 404 if there is no such job, 403 if the job is another user's, 409 if it runs, never ran, or
                the node has its files no more, 429 beyond the limits, 503 if the node does not answer.
        """
        job = await self._jobs.get(identity, job_id)
        if job.state is JobState.RUNNING or not job.generation:
            how = f"is {job.state}" if job.generation else f"is {job.state} and has never run"
            detail = f"Job {job.name} {how}; files are read so of a job that has ended. A running job's, by a command."
            raise conflict(detail)
        return await self._begin(identity, job, await self._reachable(identity, job), 0, request)

    async def _reachable(self, identity: Identity, job: Job) -> Allocated:
        if job.cell is not None:
            raise conflict(f"Job {job.name} is in cell {job.cell}: commands in it and its files are to be had there.")
        await self._check_user(identity, job)
        return await self._allocation(job.id, job.generation)

    async def _begin(
        self, identity: Identity, job: Job, reached: Allocated, index: int, request: ExecRequest | FilesRequest
    ) -> AsyncIterator[bytes]:
        place = _place(reached, index)
        session_id = f"exec_{reached.generation}_{index}_{secrets.token_hex(16)}"
        if self._open[identity.key_id] >= self._most_per_key:
            most = f"This API key has {self._most_per_key} exec sessions open, which is the maximum."
            raise ProblemError(429, ProblemCode.RATE_LIMITED, most, headers={"retry-after": "5"})
        self._open[identity.key_id] += 1
        began_at = time.monotonic()
        try:
            command = ["read", request.path] if isinstance(request, FilesRequest) else request.command
            said = {"node": place.node_id, "command": " ".join(command)[:_AUDITED_CHARACTERS]}
            terminal = isinstance(request, ExecRequest) and request.terminal is not None
            await self._audit(identity, "job.exec", job, session_id, **said, terminal=terminal)
            answer = await self._ask_node(identity, place, session_id, request)
        except BaseException as error:
            self._close(identity, job, session_id, began_at, None, f"not started: {error!r}"[:_AUDITED_CHARACTERS])
            raise
        events = self._events(identity, job, session_id, began_at, answer)
        await anext(events)  # from here on it cleans up after itself, even if nobody takes an event
        return events

    async def send(self, identity: Identity, job_id: str, session_id: str, given: ExecInput) -> ExecInputAnswer:
        """Pass input to a command.

        Raises:
            ProblemError: 404 if the caller has no such session, 409 if earlier input is missing, 503 if the node
                does not answer.
        """
        parts = _ID.fullmatch(session_id)
        if parts is None:
            raise not_found("session, or it has ended")
        await self._jobs.get(identity, job_id)
        place = _place(await self._allocation(job_id, int(parts[1])), int(parts[2]))
        try:
            async with self._session.put(
                f"{place.agent.url}/v1/exec/{session_id}",
                data=given.model_dump_json(exclude_defaults=True),
                headers=self._headers(identity, place),
                timeout=self._timeout,
                ssl=place.agent.tls,
                allow_redirects=False,
            ) as answer:
                content = await read_most(answer, _MOST_ANSWER_BYTES)
            if answer.status != 200:
                raise problem_of(answer.status, content, f"Node {place.node_id}")
            return ExecInputAnswer.model_validate_json(content)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise unavailable(f"Node {place.node_id}") from error

    async def close(self) -> None:
        """Finish writing to the audit log."""
        if self._audits:
            await asyncio.wait(self._audits, timeout=_AUDIT_PATIENCE_S)
        await end_tasks(self._audits)

    async def _allocation(self, job_id: str, generation: int) -> Allocated:
        async with self._engine.connect() as connection:
            return found(await JobRepository(connection).allocation(job_id, generation), "session, or it has ended")

    async def _check_user(self, identity: Identity, job: Job) -> None:
        """Refuse commands in another user's job: they would run under that user's account and see its secrets."""
        async with self._engine.connect() as connection:
            submitter = await JobRepository(connection).submitter(job.id)
        if submitter not in (None, identity.user_id) and not identity.is_operator:
            detail = f"Job {job.name} is {job.user}'s: only {job.user}'s keys, and operators', run commands in it."
            raise ProblemError(403, ProblemCode.FORBIDDEN, detail)

    async def _ask_node(
        self, identity: Identity, place: _Place, session_id: str, request: ExecRequest | FilesRequest
    ) -> aiohttp.ClientResponse:
        what = "files" if isinstance(request, FilesRequest) else f"exec/{session_id}"
        try:
            answer = await self._session.post(
                f"{place.agent.url}/v1/allocations/{place.allocation_id}/{what}",
                data=request.model_dump_json(exclude_none=True),
                headers=self._headers(identity, place),
                timeout=self._streamed,
                ssl=place.agent.tls,
                allow_redirects=False,
            )
            if answer.status != 200:
                async with answer:
                    content = await read_most(answer, _MOST_ANSWER_BYTES)
                is_unknown = answer.status == 404 or (answer.status == 403 and isinstance(request, FilesRequest))
                if is_unknown:  # its own 404s are 409s here: the rank was found to be there
                    raise conflict(f"The agent of node {place.node_id} is too old for this.")
                raise problem_of(answer.status, content, f"Node {place.node_id}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise unavailable(f"Node {place.node_id}") from error
        return answer

    def _headers(self, identity: Identity, place: _Place) -> dict[str, str]:
        return {**self._tokens.headers(place.node_id, place.agent, identity), "content-type": "application/json"}

    async def _events(
        self, identity: Identity, job: Job, session_id: str, began_at: float, answer: aiohttp.ClientResponse
    ) -> AsyncIterator[bytes]:
        last = b""
        try:
            yield b""
            async for piece in answer.content.iter_any():
                last = (last + piece)[-_LONGEST_EXIT_BYTES:]
                yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("exec.broke_off", job_id=job.id, error=repr(error))
        finally:
            answer.close()
            ended = _exit_in(last)
            why = "the connection was lost" if ended is None else ended.detail or ""
            self._close(identity, job, session_id, began_at, None if ended is None else ended.code, why)

    # --- the audit

    async def _audit(self, identity: Identity, action: str, job: Job, session_id: str, **data: Any) -> None:
        said = {"tenant": job.tenant_id, "session": _public(session_id), **data}
        async with self._engine.begin() as connection:
            await write_audit(connection, identity, action, job.id, **said)

    def _close(
        self, identity: Identity, job: Job, session_id: str, began_at: float, code: int | None, detail: str
    ) -> None:
        """Count a session as closed and record its end, in a task because the request may have been cancelled."""
        self._open[identity.key_id] -= 1
        if not self._open[identity.key_id]:
            del self._open[identity.key_id]
        said = {"exit_code": code, "detail": detail, "duration_s": round(time.monotonic() - began_at, 3)}
        task = asyncio.create_task(self._audit(identity, "job.exec_ended", job, session_id, **said))
        self._audits.add(task)
        task.add_done_callback(self._audited)

    def _audited(self, task: asyncio.Task[None]) -> None:
        self._audits.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("exec.end_not_audited", error=repr(error))


def _share(gang: Allocated, request: ExecRequest) -> tuple[int, int]:
    """Return the node's index in the gang, and the command's rank; ``ProblemError``: 404 if it has none such."""
    firsts = [sum(gang.gpus[:index]) for index in range(len(gang.gpus))]
    if request.node is not None:
        if request.node not in gang.node_ids:
            _refuse("node", f"It runs on {', '.join(gang.node_ids)}.", f"The job does not run on node {request.node}.")
        index = gang.node_ids.index(request.node)
        return index, firsts[index]
    rank = request.rank or 0
    if rank >= sum(gang.gpus):
        _refuse("rank", f"Its ranks are 0 to {sum(gang.gpus) - 1}.", f"The job has no rank {rank}.")
    index = max(index for index, first in enumerate(firsts) if first <= rank)
    return index, rank


def _refuse(field: str, hint: str, detail: str) -> None:
    errors = [FieldError(pointer=f"/{field}", detail=hint)]
    raise ProblemError(404, ProblemCode.NOT_FOUND, f"{detail} {hint}", errors=errors)


def _place(gang: Allocated, index: int) -> _Place:
    if index >= len(gang.node_ids):
        raise not_found("session, or it has ended")
    node_id = gang.node_ids[index]
    agent = gang.agents.get(node_id)
    if agent is None:
        raise unavailable(f"Node {node_id}")
    return _Place(agent, node_id, gang.id)


def _public(session_id: str) -> str:
    """Return the part of a session's id that may be shown: whoever knows all of it and has the key can type into it."""
    return session_id[:-24]


def _exit_in(last: bytes) -> ExecEvent | None:
    head, found, data = last.rpartition(b"event: exit\ndata: ")
    if not found or (head and not head.endswith(b"\n")):
        return None
    try:
        return ExecEvent.model_validate_json(data)
    except ValueError:
        return None
