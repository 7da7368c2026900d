"""The client with which services call each other: explicit time-outs, capped back-off with jitter, problems as
exceptions.

aiohttp, not httpx: as the client of a proxying service it handled seven times as many requests (docs/architecture.md).
"""

import asyncio
import random
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp.client_exceptions import UnixClientConnectorError
from aiohttp.client_proto import ResponseHandler
from pydantic import BaseModel, ValidationError

from services.contracts.identity import Identity
from services.contracts.problems import Problem
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable
from services.kit.settings import SharedSettings
from services.kit.sockets import SCHEME, path_of
from services.kit.tls import FollowedContext, Tls
from services.kit.tokens import Outgoing, outgoing
from wattshift.peers import StrangerError, check_peer

log = Log(__name__)

M = TypeVar("M", bound=BaseModel)

RETRIED_STATUS = frozenset({502, 503, 504})


class ServiceClient:
    """Calls one service. Only safe or idempotent requests are retried: GET, PUT, DELETE, or with ``retry=True``."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        name: str,
        *,
        tokens: Outgoing | None = None,
        timeout_s: float = 10,
        most_bytes: int = 2**30,
    ) -> None:
        """Take what signs the requests; without it, they carry only the tokens that are passed with them.

        Args:
            most_bytes: Of an answer; the service does not answer if it has more.
        """
        self._session, self._most_bytes = session, most_bytes
        self._base_url = base_url.rstrip("/")
        self._name, self._tokens, self._timeout_s = name, tokens, timeout_s

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | bytes | None = None,
        params: Mapping[str, str | int | float] | None = None,
        headers: Mapping[str, str] | None = None,
        identity: Identity | None = None,
        retry: bool | None = None,
        attempts: int = 4,
        timeout_s: float | None = None,
    ) -> bytes:
        """Return the body of a 2xx answer to a request on behalf of ``identity``, or of this service itself.

        Raises:
            ProblemError: The service's own problem document, or 503 ``unavailable`` when it does not answer.
        """
        data = body.model_dump_json().encode() if isinstance(body, BaseModel) else body
        sent = {**(self._tokens.headers(identity) if self._tokens else {}), **(headers or {})}
        if data is not None:
            sent.setdefault("content-type", "application/json")
        may_retry = method in ("GET", "PUT", "DELETE") if retry is None else retry
        failure: Exception = unavailable(self._name)
        for attempt in range(attempts if may_retry else 1):
            if attempt:
                await asyncio.sleep(min(2.0, 0.05 * 4**attempt) * random.uniform(0.5, 1))
            try:
                async with self._session.request(
                    method,
                    self._base_url + path,
                    data=data,
                    params=params,
                    headers=sent,
                    timeout=aiohttp.ClientTimeout(total=timeout_s or self._timeout_s),
                    allow_redirects=False,  # who answers chooses no other place that this process asks
                ) as answer:
                    content = await read_most(answer, self._most_bytes)
                    if answer.status < 300:
                        return content
                    failure = problem_of(answer.status, content, self._name)
                    if answer.status not in RETRIED_STATUS:
                        break
            except (aiohttp.ClientError, TimeoutError, OSError):
                failure = unavailable(self._name)
        raise failure

    async def call(self, method: str, path: str, answer: type[M], **options: Any) -> M:
        """Return the body of a 2xx answer as ``answer``; options and errors as for ``request``."""
        return answer.model_validate_json(await self.request(method, path, **options))


async def read_most(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body of an answer; ``ClientPayloadError`` if it has more than ``most_bytes``: it may have no end."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise aiohttp.ClientPayloadError(f"the answer has more than {most_bytes} bytes")
    return bytes(body)


NAMES = {
    "admission": "Admission",
    "carbon": "The carbon service",
    "optimizer": "The optimizer",
    "scheduler": "The scheduler",
    "serving": "Serving",
    "simulator": "The simulator",
    "telemetry": "Telemetry",
}


def client_of(
    session: aiohttp.ClientSession, settings: SharedSettings, service: str, *, timeout_s: float = 10
) -> ServiceClient:
    """Return a client of one of ``NAMES``, at its address in the settings and with this process's credential."""
    url: str = getattr(settings, f"{service}_url")
    tokens = outgoing(settings.credential, service)
    return ServiceClient(session, url, NAMES[service], tokens=tokens, timeout_s=timeout_s)


def problem_of(status: int, content: bytes, name: str) -> ProblemError:
    """Return the problem in another process's answer; 503 of ``name`` if the answer, or its status, is no problem."""
    if not 400 <= status < 600:
        return unavailable(name)
    try:
        problem = Problem.model_validate(orjson.loads(content))
    except (orjson.JSONDecodeError, ValidationError):
        return unavailable(name)
    return ProblemError(status, problem.code, problem.detail, errors=problem.errors)


class _Connector(aiohttp.TCPConnector):
    """Reaches `unix://NAME` through a socket of this machine (see ``sockets``), and everything else as usual."""

    allowed_protocol_schema_set = aiohttp.TCPConnector.allowed_protocol_schema_set | {SCHEME}
    followed: FollowedContext | None = None  #: Has the certificates that are shown and believed, when there are any

    async def _create_connection(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> ResponseHandler:
        if req.url.scheme != SCHEME:
            if self.followed is not None:
                self.followed.now()
            found = await super()._create_connection(req, traces, timeout)
            if req.url.scheme == "http" and found.transport is not None:
                _check(found.transport)
            return found
        path = path_of(req.url.host)
        try:
            async with asyncio.timeout(timeout.sock_connect):
                return (await self._loop.create_unix_connection(self._factory, path))[1]
        except OSError as error:
            raise UnixClientConnectorError(path, req.connection_key, error) from error


def _check(transport: asyncio.Transport) -> None:
    """Abandon a connection to an unknown program on a port of this machine before anything is sent."""
    try:
        check_peer(transport.get_extra_info("sockname")[:2], transport.get_extra_info("peername")[:2])
    except StrangerError as error:
        transport.abort()
        log.error("peer.not_believed", error=str(error))
        raise aiohttp.ClientConnectionError(str(error)) from error


def new_session(connections: int = 100, tls: Tls | None = None) -> aiohttp.ClientSession:
    """Return a session for ``ServiceClient``s; close it when the process ends."""
    return aiohttp.ClientSession(connector=connector(connections, tls))


def connector(connections: int, tls: Tls | None) -> aiohttp.TCPConnector:
    """Return the connector of a session, with at most this many connections at once; 0 for no limit."""
    context = None if tls is None else tls.client()
    known: aiohttp.Fingerprint | Any = context or True
    if tls is not None and tls.pin:
        known = aiohttp.Fingerprint(bytes.fromhex(tls.pin))
    made = _Connector(limit=connections, keepalive_timeout=30, ssl=known)
    made.followed = FollowedContext(tls, context) if tls is not None and context is not None else None
    return made
