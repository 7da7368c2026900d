"""The data path: a request from its arrival to the last byte of its answer, at the level of ASGI."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from services.contracts.identity import Identity, ResolvedKey, Role
from services.core.accounting.serving import SLO_LATENCIES
from services.core.policies.freesh.laxity import Order, ServingRequest
from services.core.profiles.answer_lengths import AnswerLengths, input_bucket
from services.kit.edge.bodies import BodyReader
from services.kit.edge.exchange import ClientGoneError, Exchange, Header, check_json_type
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import ConcurrencyLimiter, RateLimiter
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.router import openai
from services.router.fleet import Fleet, Pool, Server
from services.router.lanes import Lane, Lanes, NoServerError, QueueFullError, Ticket
from services.router.latency import LatencyReporter
from services.router.metrics import Metrics
from services.router.openai import JSON, Asked, DoorError
from services.router.settings import RouterSettings
from services.router.streams import Footprint, StreamReader
from services.router.tokens import TokenCounter
from services.router.upstream import Connection, Limits, UpstreamError

log = Log(__name__)

COMPLETIONS = {"/v1/chat/completions": "chat", "/v1/completions": "completion", "/v1/embeddings": "embedding"}
BUSY = frozenset({429, 502, 503, 504})
"""Statuses of a server that has not worked on the request: another server is asked."""
PASSED_OUT = frozenset({b"content-type", b"content-encoding", b"retry-after", b"openai-processing-ms"})
PREFIX_CHARACTERS = 512
"""So much of a prompt's first text stands for its beginning."""
REGION = b"x-wattshift-region"
UUID = re.compile(rb"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
"""A request id that every model server takes: ``llama_cpp.server`` refuses requests with any other."""
LARGEST_USAGE_BYTES = 256 * 1024
"""The usage of a larger answer is looked for in its last bytes only."""


@dataclass(slots=True)
class Expected:
    """What is expected of a request.

    Attributes:
        contexts: By which the length of its answer is learned.
        n_bytes: Of its prompt; 0 where they teach nothing about tokens.
    """

    input_tokens: int
    output_tokens: float
    request_class: str
    contexts: tuple[Any, ...]
    n_bytes: int
    prefix: int | None


@dataclass(slots=True)
class Turn:
    """A request at the door.

    Attributes:
        arrival_s: By the monotonic clock.
        arrived_at_s: UTC.
        window: What the traffic report has of it; its second number becomes the length of the answer.
    """

    exchange: Exchange
    kind: str
    path: str
    key: ResolvedKey
    asked: Asked
    model: str
    pool: Pool
    lane: Lane
    expected: Expected
    arrival_s: float
    arrived_at_s: float
    window: list[int] | None = None
    wait_s: float = 0.0
    first_s: float = 0.0
    status: int = 0


Ended = Callable[[Turn, Server, float, int, int, Footprint], None]
"""Takes in a request that ended: its turn, server, share of the server's time, tokens in and out, footprint."""


class Door:
    """Takes each request through its steps."""

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        lanes: Lanes,
        keys: KeyCache,
        metrics: Metrics,
        *,
        arrived: Callable[[Pool, float, int, float], list[int]],
        ended: Ended,
        latency: LatencyReporter,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._lanes = lanes
        self.keys = keys
        self._latency = latency
        self._metrics = metrics
        self._arrived = arrived
        self._ended = ended
        self._limiter = RateLimiter()
        self._at_once = ConcurrencyLimiter(settings.max_requests_per_tenant, "requests", retry_after_s=1)
        self._bodies = BodyReader(settings.max_buffered_bytes)
        self._limits = Limits(
            settings.connect_timeout_s,
            settings.first_byte_timeout_s,
            settings.silence_timeout_s,
            settings.total_timeout_s,
        )
        self.lengths = AnswerLengths()
        self._counters: dict[str, TokenCounter] = {}
        self._ids = itertools.count()
        self._network_s = {
            region: {place: ms / 1e3 for place, ms in places.items()} for region, places in settings.network_ms.items()
        }
        self._heads: dict[tuple[str, str], bytes] = {}
        self._upstream_keys: dict[str, bytes] = {}
        self.in_flight = 0
        self.is_empty = asyncio.Event()
        self._is_closing = False

    @property
    def limits(self) -> Limits:
        """The time limits of requests."""
        return self._limits

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to one of ``COMPLETIONS`` or to ``/v1/models``; errors have OpenAI's shape."""
        exchange = Exchange.open(scope, receive, send)
        self.in_flight += 1
        try:
            await self._handle(exchange)
        except ClientGoneError:
            pass
        except DoorError as error:
            await self._refuse(exchange, error)
        except ProblemError as problem:
            await self._refuse(exchange, openai.of_problem(problem))
        except Exception as error:
            log.exception("request.failed", path=scope["path"], request_id=exchange.request_id.decode())
            if exchange.has_begun:
                raise
            await self._refuse(exchange, DoorError(500, "internal_error", f"The router failed: {type(error).__name__}"))
        finally:
            self.in_flight -= 1
            if self._is_closing and not self.in_flight:
                self.is_empty.set()

    def close(self) -> None:
        """Have ``is_empty`` set once no request is in flight."""
        self._is_closing = True
        if not self.in_flight:
            self.is_empty.set()

    async def _refuse(self, exchange: Exchange, error: DoorError) -> None:
        if exchange.has_begun:
            return
        headers = error.headers
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await exchange.answer(error.status, headers, error.body)

    async def _handle(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        kind = COMPLETIONS.get(path)
        key = await self.keys.caller(exchange.headers.get(b"authorization"))
        if kind is None:
            if path == "/v1/models" or path.startswith("/v1/models/"):
                _check_method(method, "GET", "HEAD")
                exchange.extra += self._limiter.take(key.identity.tenant_id, key.limits)
                return await self._models(exchange, key.identity, path.removeprefix("/v1/models").removeprefix("/"))
            raise DoorError(404, "unknown_url", f"There is no {path}.")
        _check_method(method, "POST")
        exchange.extra += self._limiter.take(key.identity.tenant_id, key.limits)
        if not key.identity.role.may(method, Role.USER):
            raise DoorError(403, "forbidden", f"A key with the role {key.identity.role} may not ask for completions.")
        check_json_type(exchange.headers.get(b"content-type"))
        tenant = key.identity.tenant_id
        self._at_once.enter(tenant)
        try:
            body = await self._bodies.read(exchange, self._settings.max_body_bytes)
            try:
                await self._complete(exchange, kind, path, key, body.content)
            finally:
                body.release()
        finally:
            self._at_once.leave(tenant)

    async def _models(self, exchange: Exchange, caller: Identity, name: str) -> None:
        found = self._fleet.models(caller.tenant_id, is_operator=caller.is_operator)
        rows = [
            {"id": model, "object": "model", "created": int(self._fleet.made_at_s), "owned_by": pool.spec.tenant_id}
            for model, pool in found
        ]
        if not name:
            await exchange.answer(200, [JSON], orjson.dumps({"object": "list", "data": rows}))
            return
        for row in rows:
            if row["id"] == name:
                await exchange.answer(200, [JSON], orjson.dumps(row))
                return
        raise _no_model(name)

    async def _complete(self, exchange: Exchange, kind: str, path: str, key: ResolvedKey, content: bytes) -> None:
        arrival_s, arrived_at_s = time.monotonic(), time.time()
        asked = openai.read(content)
        pool = self._pool(asked.model, key.identity)
        if pool is None:
            raise _no_model(asked.model)
        work = self._serve(exchange, kind, path, key, asked, pool, arrival_s, arrived_at_s)
        await while_connected(exchange, work)

    def _pool(self, model: str, caller: Identity) -> Pool | None:
        return self._fleet.pool_of(model, caller.tenant_id, is_operator=caller.is_operator)

    async def _serve(
        self,
        exchange: Exchange,
        kind: str,
        path: str,
        key: ResolvedKey,
        asked: Asked,
        pool: Pool,
        arrival_s: float,
        arrived_at_s: float,
    ) -> None:
        """Have the model's pool answer, or those of its fallback models in turn."""
        failure: DoorError | None = None
        window: list[int] | None = None
        for model in (asked.model, *pool.spec.fallback):
            current = pool if model == asked.model else self._pool(model, key.identity)
            if current is None:
                continue
            expected = self._expect(kind, asked, current, model, key.identity)
            if window is None:
                window = self._arrived(current, arrived_at_s, expected.input_tokens, expected.output_tokens)
            lane = self._lanes.of(current, expected.request_class)
            turn = Turn(
                *(exchange, kind, path, key, asked, model, current, lane, expected, arrival_s, arrived_at_s, window)
            )
            try:
                await self._in_lane(turn)
            except NoServerError:
                detail = f"No server of the model {model} is ready."
                failure = DoorError(503, "no_server", detail, retry_after_s=5)
            except QueueFullError as full:
                detail = f"Too many requests wait for the model {model}."
                failure = DoorError(429, "queue_full", detail, retry_after_s=full.retry_after_s)
            except UpstreamError as error:
                if exchange.has_begun:
                    return  # the stream ended with an error
                failure = _of_upstream(error)
            else:
                return
            turn.status = failure.status
            self._metrics.requests.add((model, expected.request_class, str(failure.status)))
            if failure.status == 504:
                break  # the client has waited for long enough
        assert failure is not None
        raise failure

    def _expect(self, kind: str, asked: Asked, pool: Pool, model: str, caller: Identity) -> Expected:
        """Return what is expected of a request: its length, that of its answer, its class."""
        counter = self._counters.get(pool.spec.name)
        if counter is None or counter.path != pool.spec.tokenizer:
            counter = self._counters[pool.spec.name] = TokenCounter(pool.spec.tokenizer)
        tokens, n_bytes, first = counter.count(asked.fields)
        prefix = hash((model, first[:PREFIX_CHARACTERS])) if len(first) >= 64 else None
        contexts = (model, (model, input_bucket(tokens)), (caller.key_id, hash(first[:64]), input_bucket(tokens)))
        if kind == "embedding":
            return Expected(tokens, 0.0, pool.class_of(tokens, False), (), n_bytes, prefix)
        long_from = pool.spec.output_tokens
        predicted = self.lengths.predict(contexts, long_from)
        output, is_long = predicted.tokens, predicted.long_share >= 0.5
        if asked.most_tokens is not None and asked.most_tokens < output:
            output = float(asked.most_tokens)
        if long_from is not None and asked.most_tokens is not None and asked.most_tokens < long_from:
            is_long = False
        return Expected(tokens, output, pool.class_of(tokens, is_long), contexts, n_bytes, prefix)

    async def _in_lane(self, turn: Turn) -> None:
        """Send a request to a server of its lane, to another one if that fails before its answer begins."""
        lane, expected, asked = turn.lane, turn.expected, turn.asked
        region = turn.exchange.headers.get(REGION, b"default").decode("latin-1")
        request = ServingRequest(
            f"r{next(self._ids)}",
            turn.arrival_s,
            expected.output_tokens * asked.choices,
            expected.input_tokens,
            0.0,
            expected.request_class,
            turn.key.identity.tenant_id,
        )
        promised_s = next(
            (each.max_latency_s for each in turn.pool.spec.classes if each.name == expected.request_class), None
        )
        ticket = Ticket(
            request,
            lane.limit_s(request, promised_s),
            self._network_s.get(region) or self._network_s.get("default") or {},
            expected.prefix,
        )
        server = await lane.take(ticket, self._settings.queue_timeout_s)
        failure: UpstreamError | None = None
        while True:
            turn.wait_s = time.monotonic() - turn.arrival_s
            try:
                return await self._ask(turn, ticket, server)
            except UpstreamError as error:
                if turn.exchange.has_begun:
                    raise
                failure = error
            if failure.reason == "preempted":
                server = await lane.take_again(ticket, self._settings.queue_timeout_s)
                continue
            ticket.excluded.add(server.id)
            may_repeat = failure.may_repeat or (asked.may_repeat and failure.reason == "closed")
            if not may_repeat or len(ticket.excluded) >= self._settings.attempts:
                raise failure
            try:
                server = await lane.take(ticket, self._settings.queue_timeout_s)
            except NoServerError:
                raise failure from None

    async def _ask(self, turn: Turn, ticket: Ticket, server: Server) -> None:
        """Send a request to a server that it was given, and pass on the answer; the server is given back in any case.

        Raises:
            UpstreamError: It failed; the server's breaker knows.
        """
        lane = turn.lane
        connection: Connection | None = None
        share_s: float | None = None

        def give_back() -> float:
            nonlocal share_s
            share_s = lane.leave(ticket, server)
            return share_s

        try:
            connection = await server.origin.connection(self._limits)
            ticket.connection = connection
            if ticket.is_preempted:
                raise UpstreamError("preempted", "A more urgent request took its place.", may_repeat=True)
            connection.send(self._request(turn, ticket, server))
            await connection.head()
            if connection.status in BUSY:
                reason = "rate_limited" if connection.status == 429 else "busy"
                raise UpstreamError(reason, f"The server answered {connection.status}.", may_repeat=True)
            lane.answered(ticket)
            if _is_stream(connection.headers):
                await self._stream(turn, ticket, server, connection, give_back)
            else:
                content = await connection.whole(self._settings.max_answer_bytes)
                await self._whole(turn, server, connection, content, give_back())
            if connection.status >= 500:
                server.breaker.failed(time.monotonic())
            else:
                server.breaker.succeeded()
        except UpstreamError as error:
            self._note_failure(server, error)
            raise
        finally:
            if share_s is None:
                lane.leave(ticket, server)
            if connection is not None:
                connection.release()
            server.breaker.abandoned()
            self._lanes.room_at(server)

    def _note_failure(self, server: Server, error: UpstreamError) -> None:
        if error.reason in ("preempted", "no_key"):
            return
        self._metrics.upstream.add((error.reason,))
        if error.reason == "rate_limited":
            return  # it works, and has enough to do
        if server.breaker.failed(time.monotonic(), is_certain=error.reason in ("connect", "refused_address")):
            log.warning("server.ejected", server=server.id, url=server.spec.url, reason=error.reason, error=str(error))

    def _request(self, turn: Turn, ticket: Ticket, server: Server) -> bytes:
        """Return the request as it is sent to the server."""
        asked, spec, pool = turn.asked, server.spec, turn.pool.spec
        changes: dict[str, Any] = {}
        if (name := spec.upstream_model or turn.model) != asked.model:
            changes["model"] = name
        if pool.passes_priority and "priority" not in asked.fields and turn.kind != "embedding":
            order_s = turn.lane.priority(ticket.request) - turn.arrival_s
            if self._settings.order is not Order.SRTF:
                order_s += turn.arrived_at_s
            changes["priority"] = round(order_s * 1e3)
        body = asked.with_fields(**changes) if changes else asked.content
        head, request_id = self._head(server, turn.path), turn.exchange.request_id
        if UUID.fullmatch(request_id):
            head += b"x-request-id: %s\r\n" % request_id
        return b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)

    def _head(self, server: Server, path: str) -> bytes:
        """Return the constant part of requests to a server."""
        origin, key_name = server.origin, server.spec.upstream_key
        head = self._heads.get((origin.url, path))
        if head is None:
            if len(self._heads) > 10_000:
                self._heads.clear()
            head = self._heads[origin.url, path] = (
                b"POST %s%s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\naccept: */*\r\n"
                b"accept-encoding: identity\r\nuser-agent: wattshift-router\r\n"
            ) % (origin.path, path.encode(), origin.authority)
        if key_name is None:
            return head
        return head + b"authorization: Bearer %s\r\n" % self._upstream_key(key_name)

    def _upstream_key(self, name: str) -> bytes:
        found = self._upstream_keys.get(name)
        if found is None:
            folder = self._settings.keys_dir
            try:
                found = b"" if folder is None else (folder / name).read_bytes().strip()
            except OSError:
                found = b""
            if not found or any(byte <= 0x20 or byte >= 0x7F for byte in found):
                raise UpstreamError("no_key", f"ROUTER_KEYS_DIR has no usable file {name}.", may_repeat=True)
            self._upstream_keys[name] = found
        return found

    def forget_keys(self) -> None:
        """Read the files of upstream keys again when they are next needed."""
        self._upstream_keys.clear()

    async def _whole(self, turn: Turn, server: Server, connection: Connection, content: bytes, share_s: float) -> None:
        """Pass on an answer that is not a stream."""
        now_s = time.monotonic()
        footprint = _footprint(server, share_s)
        usage = _usage(content) if connection.status == 200 else None
        input_tokens, output_tokens = _tokens(usage, turn.expected)
        if connection.status == 200:
            self._learn(turn, server, now_s, input_tokens, output_tokens, usage is not None)
        if connection.status >= 400 and not _is_json(connection.headers):
            detail = content[:500].decode(errors="replace").strip() or "The model server refused the request."
            content = openai.error_body(connection.status, "upstream_error", detail)
            headers = [JSON, *_location(server)]
        else:
            headers = [each for each in connection.headers if each[0] in PASSED_OUT]
            headers += _location(server)
        if connection.status == 200:
            headers += footprint.headers()
        if turn.model != turn.asked.model:
            headers.append((b"x-wattshift-model", turn.model.encode()))
        self._end(turn, server, connection.status, share_s, input_tokens, output_tokens, footprint)
        await turn.exchange.answer(connection.status, headers, content)

    async def _stream(
        self, turn: Turn, ticket: Ticket, server: Server, connection: Connection, give_back: Callable[[], float]
    ) -> None:
        """Pass on a stream of events as they arrive, and say at its end what it emitted."""
        exchange = turn.exchange
        headers = [each for each in connection.headers if each[0] in PASSED_OUT]
        headers += [(b"cache-control", b"no-cache"), *_location(server)]
        if turn.model != turn.asked.model:
            headers.append((b"x-wattshift-model", turn.model.encode()))

        def so_far() -> Footprint:
            return _footprint(server, server.so_far(ticket.share_began_s))

        reader = StreamReader(so_far, wants_usage=turn.asked.wants_usage)
        status = connection.status
        try:
            piece = await connection.piece()
            await exchange.begin(status, headers)
            send, latency, request_class = exchange.send, self._latency, turn.expected.request_class
            events, event_s = 0, turn.arrival_s
            while piece:
                out = reader.feed(piece)
                if reader.events > events:
                    now_s = time.monotonic()
                    if events:
                        latency.gap(server.id, request_class, now_s - event_s, reader.events - events)
                    else:
                        turn.first_s = now_s - turn.arrival_s
                        latency.first(server.id, request_class, turn.first_s, turn.wait_s)
                    events, event_s = reader.events, now_s
                if out:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                piece = await connection.piece()
        except UpstreamError as error:
            if not exchange.has_begun:
                raise
            log.warning("server.broke_off", server=server.id, reason=error.reason)
            status = 502
            message = f"The model server's answer broke off: {error}"
            failed = openai.error_body(502, "upstream_broke_off", message)
            end = b"data: " + failed + b"\n\n"
            await exchange.send({"type": "http.response.body", "body": end, "more_body": False})
            raise
        else:
            end = reader.close()
            await exchange.send({"type": "http.response.body", "body": end, "more_body": False})
        finally:
            now_s = time.monotonic()
            share_s = give_back()
            output_tokens = reader.output_tokens if reader.output_tokens is not None else reader.events
            input_tokens = reader.input_tokens or turn.expected.input_tokens
            if status == 200 and reader.is_complete:
                self._learn(turn, server, now_s, input_tokens, output_tokens, reader.input_tokens is not None)
            footprint = _footprint(server, share_s)
            self._end(turn, server, status, share_s, input_tokens, output_tokens, footprint)

    def _learn(
        self, turn: Turn, server: Server, now_s: float, input_tokens: int, output_tokens: int, is_stated: bool
    ) -> None:
        """Learn from a complete answer."""
        expected = turn.expected
        e2e_s = now_s - turn.arrival_s
        served_s = e2e_s - turn.wait_s
        self._latency.end(server.id, expected.request_class, e2e_s, output_tokens)
        ttft_s = turn.first_s - turn.wait_s if turn.first_s else min(server.ttft_s, served_s)
        server.answered(ttft_s, served_s, output_tokens)
        turn.lane.served_s += 0.05 * (served_s - turn.lane.served_s)
        if is_stated:
            self._counters[turn.pool.spec.name].observe(expected.n_bytes, input_tokens)
        if expected.contexts and output_tokens:
            self.lengths.observe(expected.contexts, max(1, output_tokens // turn.asked.choices))
        if turn.window is not None:
            turn.window[0], turn.window[1] = input_tokens, output_tokens
        lat_s = turn.lane.times.latency_s(output_tokens)
        labels = (turn.model, expected.request_class)
        if e2e_s > SLO_LATENCIES * lat_s:
            self._metrics.violations.add(labels)
        if turn.first_s:
            self._metrics.ttft.observe(labels, turn.first_s)
            if output_tokens > 1:
                self._metrics.tbt.observe(labels, (e2e_s - turn.first_s) / (output_tokens - 1))

    def _end(
        self,
        turn: Turn,
        server: Server,
        status: int,
        share_s: float,
        input_tokens: int,
        output_tokens: int,
        footprint: Footprint,
    ) -> None:
        turn.status = status
        metrics, labels = self._metrics, (turn.model, turn.expected.request_class)
        metrics.requests.add((*labels, str(status)))
        e2e_s = time.monotonic() - turn.arrival_s
        metrics.e2e.observe(labels, e2e_s)
        metrics.wait.observe(labels, turn.wait_s)
        if status == 200:
            metrics.tokens.add((*labels, "input"), input_tokens)
            metrics.tokens.add((*labels, "output"), output_tokens)
        if footprint.energy_j is not None:
            metrics.energy.add(labels, footprint.energy_j)
        if footprint.carbon_gco2 is not None:
            metrics.carbon.add(labels, footprint.carbon_gco2)
        self._ended(turn, server, share_s, input_tokens if status == 200 else 0, output_tokens, footprint)


async def while_connected(exchange: Exchange, work: Awaitable[None]) -> None:
    """Do ``work`` until it is done; when the client leaves, cancel it.

    Raises:
        ClientGoneError: The client left first.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watching.cancel()


def _check_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise DoorError(405, "method_not_allowed", f"This path answers {' and '.join(allowed)}.")


def _no_model(name: str) -> DoorError:
    detail = f"The model `{name[:200]}` does not exist or you do not have access to it."
    return DoorError(404, "model_not_found", detail, param="model")


def _of_upstream(error: UpstreamError) -> DoorError:
    if error.reason == "timeout":
        return DoorError(504, "upstream_timeout", f"The model server did not answer in time: {error}")
    if error.reason in ("busy", "rate_limited"):
        return DoorError(503, "upstream_busy", f"All model servers are busy: {error}", retry_after_s=2)
    return DoorError(502, f"upstream_{error.reason}", "The model server failed before it answered.", retry_after_s=1)


def _is_stream(headers: list[Header]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _is_json(headers: list[Header]) -> bool:
    return any(name == b"content-type" and b"json" in value for name, value in headers)


def _location(server: Server) -> list[Header]:
    return [(b"x-wattshift-location", server.location.encode())]


def _footprint(server: Server, share_s: float) -> Footprint:
    energy_j = server.energy_j(share_s)
    return Footprint(energy_j, server.carbon_gco2(energy_j), server.location)


def _usage(content: bytes) -> Mapping[str, Any] | None:
    """Return what an answer says of its tokens; None if it says nothing."""
    try:
        if len(content) <= LARGEST_USAGE_BYTES:
            found = orjson.loads(content)["usage"]
        else:
            at = content.rfind(b'"usage"', len(content) - 4_096)
            found = orjson.loads(b"{" + content[at:].rstrip())["usage"] if at >= 0 else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _tokens(usage: Mapping[str, Any] | None, expected: Expected) -> tuple[int, int]:
    """Return tokens of prompt and answer as the server stated them; what is not a number there is not believed."""

    def number(name: str, otherwise: int) -> int:
        value = usage.get(name) if usage else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**8:
            return value
        return otherwise

    output = 0 if not expected.contexts else round(expected.output_tokens)
    return number("prompt_tokens", expected.input_tokens), number("completion_tokens", output)
