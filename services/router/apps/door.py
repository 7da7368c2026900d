"""The door of applications: a request from its arrival to the last byte of its answer, at the level of ASGI."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from starlette.types import Receive, Scope, Send

from services.contracts.identity import ResolvedKey, Role
from services.contracts.routing import RoutedApp
from services.kit.edge.exchange import ClientGoneError, Exchange, Header
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.release import RELEASE
from services.router.answers import UNBUFFERED, is_identity, is_stream, wants_comment
from services.router.apps.asked import (
    OPEN_INFERENCE,
    Asked,
    answer_error,
    no_app,
    not_assigned,
    of_problem,
    of_upstream,
    read,
)
from services.router.apps.coordination import Coordinator
from services.router.apps.queue import NotAssignedError, Outcome, Ticket
from services.router.fleet import Fleet, Server
from services.router.gate import Gate
from services.router.metrics import Metrics
from services.router.openai import JSON, DoorError, check_method
from services.router.reports import ObservationReporter, UsageReporter
from services.router.settings import RouterSettings
from services.router.streams import Footprint
from services.router.turn import NO_TOKENS, least_accuracy_pct
from services.router.upstream import KEPT_S, NOT_ITS_FAULT, Connection, Limits, UpstreamError
from services.router.upstream_keys import UpstreamKeys

log = Log(__name__)

BUSY = frozenset({429, 503})  #: Statuses of an instance that has not worked on the request: another one is asked
FAILING = frozenset({502, 503, 504})
"""Statuses by which an instance itself says that it does not work; three in a row eject it for a while."""
FRESH_S = 1.0
"""A request that must not be sent twice takes no connection that was unused for longer: servers close those, and one
that is closed at the same moment leaves open whether the request was seen."""
WITHOUT_BODY = frozenset({204, 304})
BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
KEPT_IN = BY_HOP | {b"host", b"content-length", b"authorization", b"expect", b"x-request-id"}
"""Headers of a request that do not reach an instance; the caller's key in `authorization` least of all."""
KEPT_OUT = BY_HOP | {b"content-length", b"date", b"server", b"x-request-id", b"x-content-type-options"}
"""Headers of an answer that do not reach the client: the router sets its own."""
OWN = b"x-wattshift-"
SERVER: dict[str, object] = {"name": "wattshift", "version": RELEASE, "extensions": []}


@dataclass(slots=True)
class AppTurn:
    """A request to an application."""

    exchange: Exchange
    key: ResolvedKey
    app: RoutedApp
    asked: Asked
    body: bytes
    arrival_s: float  #: Its arrival on the monotonic clock
    wait_s: float = 0.0  #: Seconds from its arrival until it was sent to an instance
    is_charged: bool = False  #: Whether what its last instance spent on it is reported


@dataclass
class AppDoor:
    """Takes each request through its steps."""

    settings: RouterSettings
    gate: Gate
    fleet: Fleet
    coordinator: Coordinator
    observations: ObservationReporter
    metrics: Metrics
    limits: Limits
    keys: UpstreamKeys
    usage: UsageReporter

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gate.pass_in(Exchange.open(scope, receive, send), self._handle, self._refuse)

    async def _refuse(self, exchange: Exchange, refusal: DoorError | ProblemError) -> None:
        error = refusal if isinstance(refusal, DoorError) else of_problem(refusal)
        await answer_error(exchange, error, is_open_inference=exchange.scope["path"].startswith(OPEN_INFERENCE))

    async def _handle(self, exchange: Exchange) -> None:
        arrival_s = time.monotonic()
        if exchange.scope["path"] in (OPEN_INFERENCE, "/v2/health/live", "/v2/health/ready"):
            await self._of_the_router(exchange)
            return
        asked = read(exchange.scope, has_idempotency_key=b"idempotency-key" in exchange.headers)
        key = await self.gate.caller(exchange, exchange.headers.get(b"authorization"))
        exchange.extra += self.gate.rules.admit(key)
        if not key.identity.role.may(asked.method, Role.USER):
            raise DoorError(403, "forbidden", f"A key with the role {key.identity.role} may only read.")
        app = self.fleet.app_of(asked.app, key.identity)
        if app is None or not key.key_limits.may_name(app.name):
            raise no_app(asked.app)
        if asked.is_ready_asked:
            await self._say_ready(exchange, app)
            return
        await self.gate.with_body(
            exchange,
            key.identity.tenant_id,
            lambda body: self._serve(AppTurn(exchange, key, app, asked, body, arrival_s)),
        )

    async def _of_the_router(self, exchange: Exchange) -> None:
        """Answer what the protocol asks of a server as a whole; no key is needed for it."""
        check_method(exchange.scope["method"], "GET", "HEAD")
        path = exchange.scope["path"]
        is_well = path != "/v2/health/ready" or self.fleet.made_at_s > 0
        state: dict[str, object] = {path.removeprefix("/v2/health/"): is_well}
        found = SERVER if path == OPEN_INFERENCE else state
        await exchange.answer(200 if is_well else 503, [JSON], orjson.dumps(found))

    async def _say_ready(self, exchange: Exchange, app: RoutedApp) -> None:
        if not self.fleet.ready(app.name):
            detail = f"No instance of the application {app.name} is ready."
            raise DoorError(503, "no_instance", detail, retry_after_s=5)
        await exchange.answer(200, [JSON], orjson.dumps({"name": app.name, "ready": True}))

    async def _serve(self, turn: AppTurn) -> None:
        """Have an instance answer, or another one if it fails before its answer begins."""
        name = turn.app.name
        self.observations.arrived(name, time.time())
        try:
            await self._in_queue(turn)
        except (DoorError, UpstreamError) as error:
            failure = of_upstream(error) if isinstance(error, UpstreamError) else error
            self.observations.failed(name, time.time())
            self.metrics.app_requests.add((name, "", str(failure.status)))
            if turn.exchange.has_begun:
                raise ClientGoneError from None  # the stream ended with an error
            raise failure from None

    async def _in_queue(self, turn: AppTurn) -> None:
        least_pct = least_accuracy_pct(turn.exchange, turn.key)
        ticket = self.coordinator.ticket(turn.app.name, turn.key.identity.tenant_id, least_pct)
        sent = 0
        while True:
            instance = await self._take(turn, ticket)
            turn.wait_s = time.monotonic() - turn.arrival_s
            try:
                return await self._ask(turn, ticket, instance, is_last=sent + 1 >= self.settings.attempts)
            except UpstreamError as error:
                sent += error.reason != "connect"  # whoever could not be reached is ejected, and tried later
                may_repeat = error.may_repeat or (turn.asked.may_repeat and error.reason == "closed")
                if turn.exchange.has_begun or not may_repeat or sent >= self.settings.attempts:
                    raise
                ticket.excluded |= {instance.id}

    async def _take(self, turn: AppTurn, ticket: Ticket) -> Server:
        """Wait for a request's turn, and return the instance that it may be sent to."""
        while True:
            left_s = turn.arrival_s + self.settings.queue_timeout_s - time.monotonic()
            try:
                name = await self.coordinator.take(ticket, left_s)
            except NotAssignedError as error:
                raise not_assigned(turn.app.name, error, ticket.least_accuracy_pct) from None
            except TimeoutError:
                reason = "queue_full" if self.fleet.ready(turn.app.name) else "no_instance"
                raise not_assigned(turn.app.name, NotAssignedError(reason), ticket.least_accuracy_pct) from None
            except asyncio.CancelledError:  # its client left the queue
                self.metrics.app_requests.add((turn.app.name, "", "499"))
                raise
            instance = self.fleet.instance(name)
            if instance is not None:
                return instance
            self.coordinator.leave(ticket, Outcome.NOT_ASKED)  # it left the table at this moment
            ticket.excluded |= {name}

    async def _ask(self, turn: AppTurn, ticket: Ticket, instance: Server, *, is_last: bool) -> None:
        """Send a request to an instance, and pass on the answer; the instance is given back in any case.

        Raises:
            UpstreamError: It failed.
        """
        began_share_s, sent_s = instance.begin(), time.monotonic()
        connection: Connection | None = None
        share_s: float | None = None

        def give_back(outcome: Outcome) -> float:
            nonlocal share_s
            if share_s is None:
                share_s = instance.end(began_share_s)
                self.coordinator.leave(ticket, outcome)
            return share_s

        try:
            if self.keys.is_wanted(instance):
                await self.keys.renew((instance,))
            unused_s = KEPT_S if turn.asked.may_repeat else FRESH_S
            connection = await instance.origin.connection(self.limits, unused_s=unused_s)
            connection.send(_request(turn, instance, self.keys.of(instance)))
            await connection.head()
            status = connection.status
            if status in BUSY and not is_last:
                give_back(Outcome.BUSY if status == 429 else Outcome.FAILED)
                raise UpstreamError("busy", f"The instance answered {status}.", may_repeat=True)
            outcome = Outcome.FAILED if status in FAILING else Outcome.ANSWERED
            has_body = turn.asked.method != "HEAD"  # that is answered by a head alone, which may state a length
            if has_body and is_stream(connection.headers):
                connection.on_over = lambda: give_back(outcome)
                await self._stream(turn, instance, connection, connection.on_over, sent_s)
                return
            content = await connection.whole(self.settings.max_answer_bytes) if has_body else b""
            footprint = self._end(turn, instance, connection, sent_s, give_back(outcome))
            headers = [*_passed_out(connection.headers), *_said_of(instance), *footprint.headers()]
            if status in WITHOUT_BODY:
                await turn.exchange.begin(status, headers)
                await turn.exchange.send({"type": "http.response.body", "body": b""})
            else:
                await turn.exchange.answer(status, headers, content)
        except UpstreamError as error:
            if error.reason in NOT_ITS_FAULT:
                spent_s = give_back(Outcome.NOT_ASKED)
            else:
                self.metrics.upstream.add((error.reason,))
                spent_s = give_back(Outcome.UNREACHABLE if error.reason == "connect" else Outcome.FAILED)
            if turn.exchange.has_begun:  # no other instance answers it
                self._charge(turn, instance, spent_s)
            raise
        except asyncio.CancelledError:
            if not turn.is_charged:  # its client left, and what the instance spent on it is nobody else's
                self.metrics.app_requests.add((turn.app.name, instance.spec.request_class or "", "499"))
                self._charge(turn, instance, give_back(Outcome.NOT_ASKED))
            raise
        finally:
            give_back(Outcome.NOT_ASKED)
            if connection is not None:
                connection.release()

    async def _stream(
        self, turn: AppTurn, instance: Server, connection: Connection, give_back: Callable[[], float], sent_s: float
    ) -> None:
        """Pass on a stream of events as they arrive; a comment at its end states its emissions."""
        send = turn.exchange.send
        piece = await connection.piece()
        headers = [each for each in _passed_out(connection.headers) if each[0] != UNBUFFERED[0]]
        await turn.exchange.begin(connection.status, [*headers, UNBUFFERED, *_said_of(instance)])
        try:
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await connection.piece()
        except UpstreamError as error:
            log.warning("instance.broke_off", instance=instance.id, reason=error.reason)
            raise  # without its end, so that the client sees that the answer is not complete
        footprint = self._end(turn, instance, connection, sent_s, give_back())
        has_comment = is_identity(connection.headers) and wants_comment(turn.exchange, self.settings)
        end = footprint.comment() if has_comment else b""
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _end(self, turn: AppTurn, instance: Server, connection: Connection, sent_s: float, share_s: float) -> Footprint:
        """Count and report a request that was answered; how long its client reads is nothing of its instance's."""
        name, now_s = turn.app.name, connection.last_at_s
        latency_s = now_s - turn.arrival_s
        self.metrics.app_requests.add((name, instance.spec.request_class or "", str(connection.status)))
        self.metrics.app_latency.observe((name,), latency_s)
        self.metrics.app_wait.observe((name,), turn.wait_s)
        self.observations.answered(name, instance.id, latency_s, now_s - sent_s, time.time())
        return self._charge(turn, instance, share_s)

    def _charge(self, turn: AppTurn, instance: Server, share_s: float) -> Footprint:
        """Report what an instance spent on a request."""
        name, variant, footprint = turn.app.name, instance.spec.request_class or "", instance.footprint(share_s)
        turn.is_charged = True
        if footprint.energy_j is not None:
            self.metrics.app_energy.add((name, variant), footprint.energy_j)
        if footprint.carbon_gco2 is not None:
            self.metrics.app_carbon.add((name, variant), footprint.carbon_gco2)
        self.usage.served(instance, turn.key, name, variant, share_s, NO_TOKENS, footprint)
        return footprint


def _request(turn: AppTurn, instance: Server, key: bytes | None) -> bytes:
    """Return the request as it is sent to an instance, with the instance's key if it has one."""
    asked, origin, exchange = turn.asked, instance.origin, turn.exchange
    named = exchange.headers.get(b"connection", b"").lower().split(b",")
    dropped = KEPT_IN | {each.strip() for each in named} if named != [b""] else KEPT_IN
    lines = [b"%s: %s\r\n" % (name, value) for name, value in exchange.scope["headers"] if name not in dropped]
    head = b"%s %s%s HTTP/1.1\r\nhost: %s\r\n%sx-request-id: %s\r\n" % (
        asked.method.encode(),
        origin.path,
        asked.target,
        origin.authority,
        b"".join(lines),
        exchange.request_id,
    )
    if key is not None:
        head += b"authorization: Bearer %s\r\n" % key
    if turn.body or asked.method in ("POST", "PUT", "PATCH"):
        head += b"content-length: %d\r\n" % len(turn.body)
    return head + b"\r\n" + turn.body


def _said_of(server: Server) -> list[Header]:
    """Return the headers that describe the instance behind an answer."""
    assert server.instance is not None
    return [
        (b"x-wattshift-variant", server.instance.variant.encode()),
        (b"x-wattshift-accuracy", b"%g" % server.instance.accuracy_pct),
        (b"x-wattshift-location", server.location.encode()),
    ]


def _passed_out(headers: list[Header]) -> list[Header]:
    """Return an instance's headers that reach the client: none that speak for the router."""
    return [each for each in headers if each[0] not in KEPT_OUT and not each[0].startswith(OWN)]
