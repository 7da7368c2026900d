"""A job's output, fetched from the node that holds it."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import NamedTuple

import aiohttp
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.agents import AgentTokens
from services.admission.cells.remote import Reach
from services.admission.jobs import Jobs
from services.admission.repository.cells import CellRepository
from services.admission.repository.jobs import JobRepository
from services.admission.settings import AdmissionSettings
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.nodes import (
    LOG_EOF_HEADER,
    LOG_GENERATION_HEADER,
    LOG_NEXT_OFFSET_HEADER,
    LOG_NODE_HEADER,
    LOG_OFFSET_HEADER,
    LOG_SINCE_HEADER,
    LOG_SIZE_HEADER,
)
from services.contracts.problems import FieldError
from services.contracts.queries import LogQuery
from services.kit.http import problem_of, read_most
from services.kit.problems import ProblemError, conflict, unavailable

MOST_BESIDE_BYTES = 65_536  #: Of an answer with less than was asked for, such as a problem
PASSED_ON = (LOG_OFFSET_HEADER, LOG_NEXT_OFFSET_HEADER, LOG_SIZE_HEADER, LOG_EOF_HEADER)


class _Source(NamedTuple):
    """The gang and node, or the cell, that a piece of output comes from."""

    url: str
    headers: Mapping[str, str]
    tls: aiohttp.Fingerprint | bool
    query: Mapping[str, str]  #: What is asked besides the part of the output
    who: str  #: That answers
    own: Mapping[str, str]  #: Headers that go with each piece
    job_id: str
    allocation_id: str | None  #: None: a cell has the job


class LogPiece(NamedTuple):
    """A piece of the output, and the headers that describe it."""

    content: bytes
    headers: dict[str, str]
    next_offset: int
    is_end: bool


class Logs:
    """Reads output over the agents' HTTP interface."""

    def __init__(
        self,
        engine: AsyncEngine,
        jobs: Jobs,
        session: aiohttp.ClientSession,
        tokens: AgentTokens,
        reach: Reach,
        settings: AdmissionSettings,
    ) -> None:
        """Take how nodes and, outside of the installation, cells are asked."""
        self._engine, self._jobs, self._session, self._tokens = engine, jobs, session, tokens
        self._reach, self._poll_s = reach, settings.log_poll_s
        self._timeout = aiohttp.ClientTimeout(total=settings.agent_timeout_s)

    async def piece(self, identity: Identity, job_id: str, query: LogQuery) -> LogPiece:
        """Return one piece.

        Raises:
            ProblemError: 404 if there is no such job, gang, node or output; 409 if it is unknown when the output was
                written; 503 if the node does not answer.
        """
        source = await self._source(identity, job_id, query)
        return await self._fetch(source, query.offset, query.limit, query.since)

    async def follow(
        self, identity: Identity, job_id: str, query: LogQuery
    ) -> tuple[dict[str, str], AsyncIterator[bytes]]:
        """Return the headers of the first piece, and all pieces from there until the gang has ended.

        Raises the same errors as ``piece``.
        """
        source = await self._source(identity, job_id, query)
        first = await self._fetch(source, query.offset, query.limit, query.since)
        return first.headers, self._pieces(source, first, query.limit)

    async def _pieces(self, source: _Source, piece: LogPiece, limit: int) -> AsyncIterator[bytes]:
        while True:
            if piece.content:
                yield piece.content
            elif piece.is_end or await self._is_over(source):
                return
            else:
                await asyncio.sleep(self._poll_s)
            try:
                piece = await self._fetch(source, piece.next_offset, limit)
            except ProblemError:  # the node may answer again while its gang is alive
                piece = LogPiece(b"", {}, piece.next_offset, is_end=False)

    async def _is_over(self, source: _Source) -> bool:
        """Return whether the gang has ended; asked only when there was nothing new to read."""
        async with self._engine.connect() as connection:
            if source.allocation_id is None:
                held = await CellRepository(connection).holder(source.job_id)
                return held is None or held.has_ended
            return await JobRepository(connection).allocation_ended(source.allocation_id)

    async def _source(self, identity: Identity, job_id: str, query: LogQuery) -> _Source:
        job = await self._jobs.get(identity, job_id)
        async with self._engine.connect() as connection:
            held = await CellRepository(connection).holder(job_id) if job.cell else None
            found = await JobRepository(connection).allocation(job_id, query.generation)
        if held is not None:
            asked = {name: str(value) for name in ("generation", "node") if (value := getattr(query, name)) is not None}
            who, stream = f"Cell {held.name}", {"stream": query.stream.value}
            url, headers = f"{held.url}/v1/jobs/{held.remote_id}/logs", self._reach.headers(held.name, held.key)
            return _Source(url, headers, True, asked | stream, who, {}, job_id, None)
        if found is None:
            what = "has not started yet" if query.generation is None else f"had no gang {query.generation}"
            raise ProblemError(404, ProblemCode.NO_DATA, f"The job {what}, so there is no output.")
        node_id = query.node or found.node_ids[0]
        if node_id not in found.node_ids:
            pointer = FieldError(pointer="?node", detail=f"It ran on {', '.join(found.node_ids)}.")
            raise ProblemError(404, ProblemCode.NO_DATA, f"The gang did not run on node {node_id}.", errors=[pointer])
        agent = found.agents.get(node_id)
        if agent is None:
            raise unavailable(f"Node {node_id}")
        own = {LOG_GENERATION_HEADER: str(found.generation), LOG_NODE_HEADER: node_id}
        url, headers = f"{agent.url}/v1/allocations/{found.id}/logs", self._tokens.headers(node_id, agent)
        stream = {"stream": query.stream.value}
        return _Source(url, headers, agent.tls, stream, f"Node {node_id}", own, job_id, found.id)

    async def _fetch(self, source: _Source, offset: int, limit: int, since: datetime | None = None) -> LogPiece:
        in_cell = source.allocation_id is None
        params: dict[str, str | int | float] = {**source.query, "offset": offset, "limit": limit}
        if since is not None:
            params |= {"since": since.isoformat()} if in_cell else {"since_s": since.timestamp()}
        session = self._reach.session if in_cell else self._session
        try:
            async with session.get(
                source.url,
                params=params,
                headers=source.headers,
                timeout=self._timeout,
                ssl=source.tls,
                allow_redirects=False,  # what is asked for next would be a node's choice, and shown to a user
            ) as answer:
                content = await read_most(answer, limit + MOST_BESIDE_BYTES)
                status, headers = answer.status, answer.headers
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise unavailable(source.who) from error
        if status == 404:
            raise ProblemError(404, ProblemCode.NO_DATA, f"{source.who} does not have this output.")
        if status != 200:
            raise problem_of(status, content, source.who) if in_cell else unavailable(source.who)
        if since is not None and not in_cell and LOG_SINCE_HEADER not in headers:
            why = f"{source.who} does not know when this output was written: an earlier release started the job."
            raise conflict(f"{why} Ask for it without since, or for its end.")
        next_offset = headers.get(LOG_NEXT_OFFSET_HEADER, "")
        told = (*PASSED_ON, LOG_GENERATION_HEADER, LOG_NODE_HEADER) if in_cell else PASSED_ON
        passed_on = {name: headers[name] for name in told if name in headers}
        return LogPiece(
            content=content,
            headers={**passed_on, **source.own},
            next_offset=int(next_offset) if re.fullmatch(r"[0-9]{1,18}", next_offset) else offset + len(content),
            is_end=headers.get(LOG_EOF_HEADER) == "true",
        )
