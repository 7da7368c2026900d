"""What every HTTP process has: problem responses, health, readiness, other services' tokens, a body limit."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.contracts.identity import REQUEST_ID_HEADER
from services.kit import access, traces, tracing
from services.kit.crowd import show_known
from services.kit.edge.limits import ConcurrencyLimiter
from services.kit.heads import Server, ServerConfig
from services.kit.identity import CALLER
from services.kit.logging import Log, configure_logging
from services.kit.metrics import Metrics, RequestTimes
from services.kit.metrics import router as metrics_router
from services.kit.networks import is_loopback
from services.kit.overload import OverloadMiddleware
from services.kit.problems import (
    ProblemError,
    as_problem,
    body_too_large,
    install_problem_handlers,
    problem_response,
    unavailable,
)
from services.kit.pulse import EVERY_S, Pulse
from services.kit.settings import SharedSettings
from services.kit.sockets import handed_over, listening
from services.kit.tls import trusts_network
from services.kit.tokens import Caller, Incoming

log = Log(__name__)

EXIT_NOT_STARTED = 3  #: As uvicorn itself ends where an application does not start

AT_ONCE = 64  #: Unanswered requests of a node: a heartbeat, its energy, its streams, and gangs' secrets and files
OPEN_PATHS = frozenset({"/healthz", "/readyz"})

ReadinessCheck = Callable[[], Awaitable[None]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class ServiceTokenMiddleware:
    """Refuse requests without the signed token of a service that may make them.

    Who may is known by the app's ``state.incoming``, an ``Incoming`` or, on a node, its ``Enrolment``. Paths under
    ``open_prefixes``, and those that ``open_paths`` matches in full, authenticate their callers themselves; of one
    credential, ``AT_ONCE`` are let in, as each takes a place that others need. Who has not got it takes none of them.
    """

    def __init__(self, app: ASGIApp, open_prefixes: tuple[str, ...], open_paths: re.Pattern[str] | None) -> None:
        self._app, self._open_prefixes, self._open_paths = app, open_prefixes, open_paths
        self._at_once = ConcurrencyLimiter(AT_ONCE, "requests", retry_after_s=1, whose="Caller")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if not self._is_open(path):
                given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
                try:
                    caller = await _caller(scope["app"].state.incoming, given, scope["method"], path)
                except ProblemError as error:
                    await problem_response(error)(scope, receive, send)
                    return
                scope[CALLER] = caller.identity
                access.note_caller(caller.identity, caller.service)
                show_known(scope)
            elif path not in OPEN_PATHS:
                own = f"{hash(dict(scope['headers']).get(b'authorization') or path):x}"  # it is shown
                try:
                    self._at_once.enter(own)
                except ProblemError as error:
                    await problem_response(error)(scope, receive, send)
                    return
                try:
                    await self._app(scope, receive, self._showing(scope, send))
                finally:
                    self._at_once.leave(own)
                return
        await self._app(scope, receive, send)

    @staticmethod
    def _showing(scope: Scope, send: Send) -> Send:
        """Return a ``send`` that marks the connection as known unless the answer is a refusal."""

        async def send_and_show(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                show_known(scope)
            await send(message)

        return send_and_show

    def _is_open(self, path: str) -> bool:
        if path in OPEN_PATHS or path.startswith(self._open_prefixes):
            return True
        return self._open_paths is not None and self._open_paths.fullmatch(path) is not None


async def _caller(incoming: Incoming, given: str, method: str, path: str) -> Caller:
    try:
        return incoming.caller(given, method, path)
    except ProblemError as error:
        if not given or error.status != 401 or not await incoming.has_learned():
            raise
    return incoming.caller(given, method, path)


class BodyLimitMiddleware:
    """Refuse a body larger than ``max_bytes``: at once by its announced length, otherwise as it grows."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = body_too_large(self._max_bytes)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await problem_response(error)(scope, receive, send)
            return
        seen = 0
        refused = False

        async def limited_receive() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise error
            return message

        # The framework answers exceptions raised while it reads a body in its own way: send our answer instead.
        async def checked_send(message: Message) -> None:
            nonlocal refused
            if seen <= self._max_bytes:
                await send(message)
            elif not refused:
                refused = True
                await problem_response(error)(scope, receive, send)

        await self._app(scope, limited_receive, checked_send)


def create_service(
    title: str,
    settings: SharedSettings,
    *,
    lifespan: Lifespan,
    readiness: ReadinessCheck,
    open_prefixes: tuple[str, ...] = (),
    open_paths: re.Pattern[str] | None = None,
    max_body_bytes: int = 16 * 1024 * 1024,
    incoming: Incoming | None = None,
) -> FastAPI:
    """Return an internal service's app; everything but the health checks needs the token of another service.

    ``incoming`` knows the callers, by default by the credential in ``settings``. There are no documentation pages: they
    would be open to everybody. The process's metrics are in ``app.state.metrics``, and at ``/metrics``.
    """
    app = FastAPI(title=title, lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.metrics = Metrics()
    add_basics(app, readiness)
    app.include_router(metrics_router)
    app.add_middleware(BodyLimitMiddleware, max_bytes=max_body_bytes)
    app.state.incoming = incoming or Incoming.of(settings.credential)
    app.add_middleware(ServiceTokenMiddleware, open_prefixes=open_prefixes, open_paths=open_paths)
    app.add_middleware(OverloadMiddleware, max_requests=settings.max_requests)
    app.add_middleware(RequestTimes)
    if not settings.service_credential and settings.service_token and incoming is None:
        log.warning(
            "identity.shared",
            why="WATTSHIFT_SERVICE_TOKEN is what all services share; give each its WATTSHIFT_SERVICE_CREDENTIAL",
        )
    return app


class DegradedError(Exception):
    """A readiness check found that part of what the process needs is missing, while the rest works."""


def add_basics(app: FastAPI, readiness: ReadinessCheck) -> None:
    """Give ``app`` problem handlers, ``/healthz`` (the process is alive) and ``/readyz`` (so are its dependencies).

    ``/readyz`` answers 200 and ``ready``, or 503 and ``degraded`` or ``not ready`` with the reason. That of the latter
    is for who asks from this machine: it may name addresses, accounts and files.
    """
    install_problem_handlers(app)
    latest: asyncio.Task[tuple[str, str]] | None = None

    async def look() -> tuple[str, str]:
        try:
            await readiness()
        except DegradedError as error:
            return "degraded", str(error)
        except Exception as error:  # whatever a dependency raises, the process is not ready
            return "not ready", str(error) or type(error).__name__
        return "ready", ""

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", include_in_schema=False)
    async def readyz(request: Request) -> JSONResponse:
        nonlocal latest
        if latest is None or latest.done():  # one at a time: who asks needs no key
            latest = asyncio.create_task(look())
        status, why = await asyncio.shield(latest)
        is_shown = status == "degraded" or request.client is None or is_loopback(request.client.host)
        detail = {"detail": why} if why and is_shown else {}
        return JSONResponse({"status": status, **detail}, status_code=200 if status == "ready" else 503)


def answer_unavailable(
    app: FastAPI,
    what: str,
    errors: Iterable[type[Exception]],
    *,
    is_so: Callable[[Exception], bool] = lambda error: True,
) -> None:
    """Answer 503, saying that ``what`` does not answer right now, for those of ``errors`` for which ``is_so`` holds."""

    async def handle(request: Request, error: Exception) -> Response:
        if not is_so(error):
            log.exception("request.failed", method=request.method, path=request.url.path)
            return problem_response(as_problem(error), request.headers.get(REQUEST_ID_HEADER))
        log.warning("dependency.unavailable", what=what, error=str(error) or type(error).__name__)
        return problem_response(unavailable(what))

    for kind in errors:
        app.add_exception_handler(kind, handle)


def serve(
    app: FastAPI,
    process: str,
    settings: SharedSettings,
    host: str,
    port: int,
    *,
    listens_first: bool = False,
    beside: tuple[int, ...] = (),
) -> None:
    """Run ``app`` until SIGTERM, at the sockets handed to the process, or else at ``host`` and ``port``.

    With ``listens_first``, wait while another program has the port, and start nothing until it is ours; also listen on
    the ports ``beside`` it on the loopback address.
    """
    sockets = handed_over()
    configure_logging(process, log_format=settings.log_format, level=settings.log_level)
    end_with_parent()
    if listens_first:
        sockets = sockets or [listening(host, port)]
        held = {each.getsockname()[1] for each in sockets}
        sockets += [listening("127.0.0.1", other) for other in beside if other not in held]
    say_what_is_trusted(settings, sockets, host, port)
    tracing.start(process, settings)
    config = ServerConfig(
        traces.traced(access.AccessLog(app)),
        host=host,
        port=port,
        timeout_graceful_shutdown=3,
        # Longer than our clients keep a connection: otherwise one could be closed here just as a request is sent on it.
        timeout_keep_alive=75,
        callback_notify=Pulse().beat_async,
        timeout_notify=int(EVERY_S),
        **settings.tls.server(),
    )
    server = Server(config)
    gc.collect()
    gc.freeze()  # what is loaded by now stays: a collection that looked through it would hold up answers by 0.3 s
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets or None)
    traces.stop()
    if not server.started:  # the log says why
        sys.exit(EXIT_NOT_STARTED)


_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PLAIN = "plain HTTP: who is in between can read and change it"
_UNVERIFIED = "it does not have the server verified: who listens there gets the password"


def say_what_is_trusted(settings: SharedSettings, sockets: Sequence[socket.socket], host: str, port: int) -> None:
    """Log where the network has to be trusted: this process, or a server that gets its password, is not verified.

    Args:
        sockets: Those on which it listens; if there are none, it listens at ``host`` and ``port``.
    """
    places = [each.getsockname()[:2] for each in sockets if each.family != socket.AF_UNIX]
    if not settings.tls.certificate and (places or not sockets):
        places = places or [(host, port)]
        say = log.info if all(place[0] in _LOOPBACK for place in places) else log.warning
        say("network.trusted", at=", ".join(f"{each}:{number}" for each, number in places), why=_PLAIN)
    for name, url in (("DATABASE_URL", settings.database_url), ("REDIS_URL", settings.redis_url)):
        if trusts_network(url):
            log.warning("network.trusted", setting=name, why=_UNVERIFIED)


def end_with_parent() -> None:
    """End when the supervisor ends; where the kernel cannot do that (macOS), a thread watches the parent process."""
    if sys.platform == "linux" or "WATTSHIFT_SUPERVISED" not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
