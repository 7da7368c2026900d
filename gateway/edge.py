"""Every request of the public API passes here: found, recognised, counted, handed on.

Plain ASGI and not FastAPI: with its request and dependency objects the same path carried a third fewer requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.forward import Forwarder
from gateway.gather import Entry, Gatherer
from gateway.keys import KeyCache
from gateway.limits import RateLimiter
from gateway.matching import Matcher
from gateway.routes import JSON, SUBMIT, SUBMIT_BATCH, Route
from gateway.wire import BodyReader, ClientGoneError, Exchange, Header, check_json_type
from services.contracts.identity import IDEMPOTENCY_HEADER, ResolvedKey, Role
from services.contracts.problems import MEDIA_TYPE, FieldError, ProblemCode
from services.kit.logging import Log
from services.kit.problems import ProblemError, as_problem

log = Log(__name__)

LONGEST_URL_BYTES = 8 * 1024
RANKS = {Role.USER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}

_IDEMPOTENCY_NAME = IDEMPOTENCY_HEADER.encode()
_IDEMPOTENCY_KEY = re.compile(rb"[\x21-\x7e]{1,200}")
_JSON = (b"content-type", b"application/json")
_PROBLEM = (b"content-type", MEDIA_TYPE.encode())
_REPLAYED = (b"idempotency-replayed", b"true")


class Edge:
    """Takes a request through the table of routes."""

    def __init__(
        self,
        routes: Iterable[Route],
        keys: KeyCache,
        limiter: RateLimiter,
        bodies: BodyReader,
        gatherer: Gatherer,
        forwarder: Forwarder,
        *,
        max_body_bytes: int,
        max_batch_bytes: int,
    ) -> None:
        self._matcher = Matcher((route.method, route.path, route) for route in routes)
        self._keys = keys
        self._limiter = limiter
        self._bodies = bodies
        self._gatherer = gatherer
        self._forwarder = forwarder
        self._max_body_bytes = max_body_bytes
        self._max_batch_bytes = max_batch_bytes

    async def handle(self, exchange: Exchange) -> bool:
        """Answer a request; False when its path is not in the table."""
        raw_path: bytes = exchange.scope.get("raw_path") or exchange.scope["path"].encode()
        if len(raw_path) + len(exchange.scope["query_string"]) > LONGEST_URL_BYTES:
            raise ProblemError(414, ProblemCode.INVALID_REQUEST, "The URL is too long.")
        match = self._matcher.match(raw_path)
        if match is None:
            return False
        method = exchange.scope["method"]
        route = match.methods.get("GET" if method == "HEAD" else method)
        if route is None or (method == "HEAD" and route.media != JSON):
            allowed = ", ".join(sorted(match.methods))
            detail = f"This path answers {allowed}."
            raise ProblemError(405, ProblemCode.METHOD_NOT_ALLOWED, detail, headers={"allow": allowed})
        key = await self._keys.caller(exchange.headers.get(b"authorization"))
        exchange.extra += self._limiter.take(key.identity.tenant_id, key.limits)
        if RANKS[key.identity.role] < RANKS[route.role]:
            raise ProblemError(403, ProblemCode.FORBIDDEN, f"Only an {route.role} may do this.")
        if route is SUBMIT or route is SUBMIT_BATCH:
            await self._submit(exchange, key, batch=route is SUBMIT_BATCH)
        elif route.body is None:
            await self._forwarder.forward(exchange, route, match.path, key, None)
        else:
            await self._forward_body(exchange, route, match.path, key)
        return True

    async def _forward_body(self, exchange: Exchange, route: Route, path: str, key: ResolvedKey) -> None:
        check_json_type(exchange.headers.get(b"content-type"))
        body = await self._bodies.read(exchange, self._most_bytes(route))
        try:
            await self._forwarder.forward(exchange, route, path, key, body.content)
        finally:
            body.release()

    def _most_bytes(self, route: Route) -> int:
        return self._max_batch_bytes if route.has_large_body else self._max_body_bytes

    async def _submit(self, exchange: Exchange, key: ResolvedKey, *, batch: bool) -> None:
        """The hot path: the body is not parsed here."""
        check_json_type(exchange.headers.get(b"content-type"))
        given = exchange.headers.get(_IDEMPOTENCY_NAME)
        if given is not None and not _IDEMPOTENCY_KEY.fullmatch(given):
            detail = "An Idempotency-Key has 1 to 200 visible ASCII characters."
            pointer = FieldError(pointer="#Idempotency-Key", detail=detail)
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, detail, errors=[pointer])
        body = await self._bodies.read(exchange, self._most_bytes(SUBMIT_BATCH if batch else SUBMIT))
        try:
            entry: Entry = {
                "tenant_id": key.identity.tenant_id,
                "key_id": key.identity.key_id,
                "idempotency_key": None if given is None else given.decode(),
                "batch": batch,
                "body": _text(body.content),
            }
            answer = await self._gatherer.submit(entry)
        finally:
            body.release()
        content = answer["body"].encode()
        if answer["status"] >= 400:
            document = {**orjson.loads(content), "request_id": exchange.request_id.decode()}
            await exchange.answer(answer["status"], [_PROBLEM], orjson.dumps(document))
            return
        headers: list[Header] = [_JSON]
        if answer["replayed"]:
            headers.append(_REPLAYED)
        if answer["location"]:
            headers.append((b"location", answer["location"].encode()))
        await exchange.answer(answer["status"], headers, content)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        detail = "The body is not valid UTF-8."
        raise ProblemError(400, ProblemCode.BODY_NOT_JSON, detail) from error


class OpenedEdge:
    """The edge, once the process has started."""

    edge: Edge


class EdgeMiddleware:
    """Puts the edge before an app that answers what is not in the table: the landing page, the description, 404."""

    def __init__(self, app: ASGIApp, opened: OpenedEdge) -> None:
        self._app = app
        self._opened = opened

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
            log.exception("request.failed", path=scope["path"], request_id=exchange.request_id.decode())
            if not exchange.has_begun:
                await exchange.refuse(as_problem(error))
