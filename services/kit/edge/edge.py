"""Take each request through the same steps: find its route, recognise the caller, count the request, check the role."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Receive, Scope, Send

from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, ResolvedKey, Role, TenantLimits
from services.kit import access
from services.kit.edge.exchange import ClientGoneError, Exchange
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import AddressLimiter, RateLimiter
from services.kit.identity import forbidden, not_of_a_project
from services.kit.logging import Log
from services.kit.problems import ProblemError, as_problem

log = Log(__name__)

T = TypeVar("T")

# What a name in a path may consist of: nothing that a service, a database or a log could read in another way.
SEGMENT = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._~:-]{0,254}")


@dataclass(slots=True)
class _Node(Generic[T]):
    literals: dict[bytes, _Node[T]] = field(default_factory=dict[bytes, "_Node[T]"])
    named: _Node[T] | None = None
    methods: dict[str, T] | None = None


@dataclass(frozen=True, slots=True)
class Match(Generic[T]):
    """The operations of a path, and the normalised path."""

    methods: dict[str, T]
    path: str


class Matcher(Generic[T]):
    """A tree of path segments; a literal segment is tried before a named one."""

    def __init__(self, routes: Iterable[tuple[str, str, T]]) -> None:
        """Take ``(method, path, value)``; path segments in braces match any ``SEGMENT``."""
        self._root: _Node[T] = _Node()
        for method, path, value in routes:
            node = self._root
            for segment in path.encode().split(b"/")[1:]:
                if segment.startswith(b"{"):
                    node.named = node.named or _Node()
                    node = node.named
                else:
                    node = node.literals.setdefault(segment, _Node())
            node.methods = node.methods or {}
            node.methods[method] = value

    def match(self, raw_path: bytes) -> Match[T] | None:
        """Return the operations of a path as it was sent, still percent-encoded; None if there are none."""
        if not raw_path.startswith(b"/"):
            return None
        segments = raw_path.split(b"/")[1:]
        if b"%" in raw_path:  # decoded after the split: an encoded slash is part of a name, and no name has one
            segments = [unquote_to_bytes(segment) for segment in segments]
        methods = self._find(self._root, segments, 0)
        return None if methods is None else Match(methods, "/" + b"/".join(segments).decode())

    def _find(self, node: _Node[T], segments: list[bytes], index: int) -> dict[str, T] | None:
        if index == len(segments):
            return node.methods
        segment = segments[index]
        literal = node.literals.get(segment)
        if literal and (found := self._find(literal, segments, index + 1)) is not None:
            return found
        if node.named and SEGMENT.fullmatch(segment):
            return self._find(node.named, segments, index + 1)
        return None


LONGEST_URL_BYTES = 8 * 1024


class EdgeRoute(Protocol):
    """The part of a row in a process's table of routes that the edge uses; ``gateway.routes.Route`` documents it."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def for_projects(self) -> bool: ...
    @property
    def answers_head(self) -> bool: ...


R = TypeVar("R", bound=EdgeRoute)

Answer = Callable[[Exchange, R, str, ResolvedKey], Awaitable[None]]
"""Answers a request that was let in, given its route and its normalised path."""


WITHOUT_KEY = ResolvedKey(identity=Identity(tenant_id="", role=Role.USER, key_id=""), limits=TenantLimits())
"""The caller of an open route who sent no key: of no tenant."""


@dataclass(frozen=True)
class OpenRoutes(Generic[R]):
    """Which routes answer without a key, and how often they do so for one address."""

    includes: Callable[[R], bool]
    limiter: AddressLimiter


class Edge(Generic[R]):
    """Admits requests by a table of routes and hands them to ``answer``."""

    def __init__(
        self,
        routes: Iterable[R],
        keys: KeyCache,
        limiter: RateLimiter,
        answer: Answer[R],
        open_routes: OpenRoutes[R] | None = None,
    ) -> None:
        self._matcher = Matcher((route.method, route.path, route) for route in routes)
        self._keys, self._limiter, self._answer, self._open_routes = keys, limiter, answer, open_routes

    async def handle(self, exchange: Exchange) -> bool:
        """Answer a request; return False when its path is not in the table.

        Raises:
            ProblemError: 414 for a URL that is too long, 405 for a method that the path does not support, 401 without a
                valid key where one is needed, 429 beyond the rate of the tenant or the address, 403 for a role or a
                project that is not allowed, and what ``answer`` raises.
        """
        raw_path: bytes = exchange.scope.get("raw_path") or exchange.scope["path"].encode()
        if len(raw_path) + len(exchange.scope["query_string"]) > LONGEST_URL_BYTES:
            raise ProblemError(414, ProblemCode.INVALID_REQUEST, "The URL is too long.")
        match = self._matcher.match(raw_path)
        if match is None:
            return False
        method = exchange.scope["method"]
        route = match.methods.get("GET" if method == "HEAD" else method)
        if route is None or (method == "HEAD" and not route.answers_head):
            allowed = ", ".join(sorted(match.methods))
            detail = f"This path answers {allowed}."
            raise ProblemError(405, ProblemCode.METHOD_NOT_ALLOWED, detail, headers={"allow": allowed})
        access.note_route(route.path, match.path)
        authorization = exchange.headers.get(b"authorization")
        if authorization is None and self._open_routes is not None and self._open_routes.includes(route):
            client = exchange.scope.get("client")
            exchange.extra += self._open_routes.limiter.take(client[0] if client else "")
            await self._answer(exchange, route, match.path, WITHOUT_KEY)
            return True
        key = await self._keys.caller(authorization, exchange.scope)
        exchange.extra += self._limiter.take(key.identity.tenant_id, key.limits)
        if not key.identity.role.may(method, route.role):
            raise forbidden(key.identity.role, route.role)
        if key.identity.project is not None and not route.for_projects:
            raise not_of_a_project(key.identity.project)
        await self._answer(exchange, route, match.path, key)
        return True


class OpenedEdge(Generic[R]):
    """The edge, once the process has started."""

    edge: Edge[R]


class EdgeMiddleware:
    """Puts the edge in front of an app that answers whatever is not in the table, such as pages and 404."""

    def __init__(self, app: ASGIApp, opened: OpenedEdge[R]) -> None:
        self._app, self._opened = app, opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.open(scope, receive, send)
        try:
            if not await self._opened.edge.handle(exchange):
                await self._app(exchange.named_scope, receive, exchange.send_named)
        except ClientGoneError:
            return
        except ProblemError as problem:
            await exchange.refuse(problem)
        except Exception as error:
            log.exception("request.failed", path=scope["path"])
            if not exchange.has_begun:
                await exchange.refuse(as_problem(error))
