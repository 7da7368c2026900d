"""One line in the log for each request: who did what, how it ended, and under which id.

The id is what the client sent as ``X-Request-ID``, or one that the edge made; every line that is logged while the
request is worked on has it, here and in the processes that are asked for it (``traces``). Nothing of a query, a body or
another header is logged, and of the path only what one of our routes has matched: anything else may be a secret.
"""

import time
from collections.abc import Awaitable
from contextvars import ContextVar
from functools import lru_cache
from logging import DEBUG, INFO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.contracts.identity import REQUEST_ID_HEADER, Identity
from services.kit import traces
from services.kit.logging import Known, Log

log = Log(__name__)

_REQUEST_ID_NAME = REQUEST_ID_HEADER.encode()
HEADERS = "wattshift.headers"  #: Where the scope of a request that has begun has its headers by name
CLIENT_LEFT = 499  #: What is logged as the status of a request whose client left before its answer began

_UNASKED = frozenset({"/healthz", "/readyz", "/metrics", "/v1/metrics", "/internal/agents/metrics"})
"""What probes and Prometheus ask for all day."""
_FILES = "/static/"
_REPORTS = {f"/v1/nodes/{{node_id}}/{what}" for what in ("heartbeat", "energy", "engine", "engine-energy", "stream")}
"""What nodes and bridges report all day: of a thousand nodes, a line for each would be some 20 GB a day."""
_LONGEST_PATH = 300


class Asked:
    """What becomes known of a request while it is answered."""

    __slots__ = ("caller", "path", "route", "scope", "service")

    def __init__(self, scope: Scope) -> None:
        self.caller: Identity | None = None  #: On whose behalf it is; None while nobody is known
        self.service = ""  #: The service that sent it
        self.route = ""  #: That its path matched; empty for none
        self.path = ""  #: The path, where it holds nothing but what the route names
        self.scope = scope  #: Where an app of FastAPI notes its route


_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)


def note_caller(caller: Identity | None, service: str = "") -> None:
    if (asked := _asked.get()) is not None:
        asked.caller, asked.service = caller, service


def note_route(route: str, path: str = "") -> None:
    """Note which route the current request is for, and its path if that is to be logged."""
    if (asked := _asked.get()) is not None:
        asked.route, asked.path = route, path


def note_scope(scope: Scope) -> None:
    """Note that an app of FastAPI answers the current request with a scope of its own."""
    if (asked := _asked.get()) is not None:
        asked.scope = scope


class AccessLog:
    """Logs each request once it is answered.

    Probes, files of pages, reports of nodes, and what services ask each other all day as part of no request are logged
    at debug, unless they are refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status, sent_bytes = time.perf_counter(), 0, 0
        begin(scope)
        asked = Asked(scope)
        _asked.set(asked)

        def counting(message: Message) -> Awaitable[None]:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent_bytes += len(message.get("body", b""))
            return send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:
            status = status or 500
            raise
        finally:
            _write(asked, scope, status or CLIENT_LEFT, sent_bytes, time.perf_counter() - began_s)


def begin(scope: Scope) -> dict[bytes, bytes]:
    """Make what follows part of a request, under the id that its client gave; return its headers by name."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scope[HEADERS] = headers
    traces.begin_request(traces.usable_id(headers.get(_REQUEST_ID_NAME)), headers.get(b"traceparent"))
    return headers


def _write(asked: Asked, scope: Scope, status: int, sent_bytes: int, took_s: float) -> None:
    path: str = scope["path"]
    route, shown = asked.route, asked.path
    if not route:
        route, shown = getattr(asked.scope.get("route"), "path", ""), path
    is_probe = path in _UNASKED or path.startswith(_FILES) or route in _REPORTS
    caller = asked.caller
    is_loop = asked.service != "" and caller is None and not traces.request_id()
    is_quiet = (is_probe or is_loop) and status < 400
    level = DEBUG if is_quiet or path == "/readyz" else INFO
    if not log.is_on(level):
        return
    client, who = scope.get("client"), None
    if caller is not None:
        who = caller.tenant_id, caller.key_id, caller.role, caller.user_id
    shown = shown[:_LONGEST_PATH] if route else ""  # lines are kept by it
    known = _known(scope["method"], status, route, shown, who, asked.service, client[0] if client else "")
    log.emit(level, "request.answered", {"duration_ms": round(took_s * 1000, 1), "bytes": sent_bytes}, known=known)


@lru_cache(maxsize=1_024)
def _known(
    method: str,
    status: int,
    route: str,
    shown: str,
    who: tuple[str, str, str, str | None] | None,
    service: str,
    client: str,
) -> Known:
    """Return what the lines of many requests have in common; ``who`` are tenant, key, role and user."""
    fields: dict[str, object] = {"method": method, "status": status}
    if route:
        fields["route"] = route
        if shown and shown != route:
            fields["path"] = shown
    if who is not None:
        fields |= {"tenant_id": who[0], "key_id": who[1], "role": str(who[2])}
        if who[3] is not None:
            fields["user_id"] = who[3]
    if service:
        fields["service"] = service
    elif client:
        fields["client"] = client
    return Known(fields)
