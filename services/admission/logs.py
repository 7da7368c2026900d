"""A job's output, fetched from the node that holds it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime

import aiohttp
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.agents import Agent, AgentTokens
from services.admission.jobs import Jobs
from services.admission.repository.jobs import Allocated, JobRepository
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.jobs import LogStream
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
from services.kit.problems import ProblemError, conflict, unavailable

PASSED_ON = (LOG_OFFSET_HEADER, LOG_NEXT_OFFSET_HEADER, LOG_SIZE_HEADER, LOG_EOF_HEADER)


@dataclass(frozen=True, slots=True)
class _Source:
    """The gang and node that a piece of output comes from."""

    agent: Agent
    allocation_id: str
    generation: int
    node_id: str
    stream: LogStream


@dataclass(frozen=True, slots=True)
class LogPiece:
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
        *,
        tokens: AgentTokens,
        timeout_s: float,
        poll_s: float,
    ) -> None:
        self._engine, self._jobs, self._session, self._tokens = engine, jobs, session, tokens
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._poll_s = poll_s

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
            return await JobRepository(connection).allocation_ended(source.allocation_id)

    async def _source(self, identity: Identity, job_id: str, query: LogQuery) -> _Source:
        await self._jobs.get(identity, job_id)
        async with self._engine.connect() as connection:
            found = await JobRepository(connection).allocation(job_id, query.generation)
        if found is None:
            what = "has not started yet" if query.generation is None else f"had no gang {query.generation}"
            raise ProblemError(404, ProblemCode.NO_DATA, f"The job {what}, so there is no output.")
        node_id = self._node(found, query.node)
        agent = found.agents.get(node_id)
        if agent is None:
            raise unavailable(f"Node {node_id}")
        return _Source(agent, found.id, found.generation, node_id, query.stream)

    @staticmethod
    def _node(found: Allocated, wanted: str | None) -> str:
        if wanted is None:
            return found.node_ids[0]
        if wanted not in found.node_ids:
            pointer = FieldError(pointer="?node", detail=f"It ran on {', '.join(found.node_ids)}.")
            raise ProblemError(404, ProblemCode.NO_DATA, f"The gang did not run on node {wanted}.", errors=[pointer])
        return wanted

    async def _fetch(self, source: _Source, offset: int, limit: int, since: datetime | None = None) -> LogPiece:
        params = {"stream": source.stream.value, "offset": offset, "limit": limit}
        if since is not None:
            params["since_s"] = since.timestamp()
        try:
            async with self._session.get(
                f"{source.agent.url}/v1/allocations/{source.allocation_id}/logs",
                params=params,
                headers=self._tokens.headers(source.node_id, source.agent),
                timeout=self._timeout,
                ssl=source.agent.tls,
            ) as answer:
                content = await answer.content.read(-1)
                status, headers = answer.status, answer.headers
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise unavailable(f"Node {source.node_id}") from error
        if status == 404:
            raise ProblemError(404, ProblemCode.NO_DATA, f"Node {source.node_id} does not have this output.")
        if status != 200:
            raise unavailable(f"Node {source.node_id}")
        if since is not None and LOG_SINCE_HEADER not in headers:
            why = (
                f"Node {source.node_id} does not know when this output was written: an earlier release started the job."
            )
            raise conflict(f"{why} Ask for it without since, or for its end.")
        next_offset = headers.get(LOG_NEXT_OFFSET_HEADER, "")
        passed_on = {name: headers[name] for name in PASSED_ON if name in headers}
        return LogPiece(
            content=content,
            headers={**passed_on, LOG_GENERATION_HEADER: str(source.generation), LOG_NODE_HEADER: source.node_id},
            next_offset=int(next_offset) if next_offset.isdigit() else offset + len(content),
            is_end=headers.get(LOG_EOF_HEADER) == "true",
        )
