"""Answer a request that the edge let in: submissions are gathered on their way to admission, others are forwarded."""

import re
import time
from dataclasses import dataclass

import orjson

from gateway.forward import Forwarder
from gateway.gather import Entry, Gatherer
from gateway.metrics import MetricsGatherer
from gateway.routes import EVENTS, Route, Upstream
from services.contracts.codes import ProblemCode
from services.contracts.identity import IDEMPOTENCY_HEADER, ResolvedKey
from services.contracts.problems import MEDIA_TYPE
from services.kit import traces
from services.kit.edge.bodies import Body, BodyReader
from services.kit.edge.exchange import Exchange, Header, check_json_type, while_connected
from services.kit.metrics import note_request
from services.kit.problems import ProblemError, invalid

_IDEMPOTENCY_NAME = IDEMPOTENCY_HEADER.encode()
_IDEMPOTENCY_KEY = re.compile(rb"[\x21-\x7e]{1,200}")
_JSON = (b"content-type", b"application/json")
_PROBLEM = (b"content-type", MEDIA_TYPE.encode())
_REPLAYED = (b"idempotency-replayed", b"true")


@dataclass
class Dispatcher:
    """Reads bodies and hands requests to the services."""

    bodies: BodyReader
    gatherer: Gatherer
    forwarder: Forwarder
    metrics: MetricsGatherer
    max_body_bytes: int
    max_batch_bytes: int  #: Of a route with a large body

    async def answer(self, exchange: Exchange, route: Route, path: str, key: ResolvedKey) -> None:
        """Answer a request through the service that owns its route, and record how long that took."""
        began_s = time.perf_counter()
        traces.name_request(route.method, route.path)
        try:
            await self._answer(exchange, route, path, key)
        except ProblemError as problem:
            note_request(route.method, route.path, problem.status, began_s)
            raise
        if route.media != EVENTS:
            note_request(route.method, route.path, exchange.status, began_s)

    async def _answer(self, exchange: Exchange, route: Route, path: str, key: ResolvedKey) -> None:
        if route.to is Upstream.GATEWAY and route.has_body:
            await self._submit(exchange, route, key)
        elif route.to is Upstream.GATEWAY:
            await self.metrics.answer(exchange, key)
        elif not route.has_body:
            await self.forwarder.forward(exchange, route, path, key, None)
        else:
            body = await self._read(exchange, route)
            try:
                await self.forwarder.forward(exchange, route, path, key, body.content)
            finally:
                body.release()

    async def _read(self, exchange: Exchange, route: Route) -> Body:
        check_json_type(exchange.headers.get(b"content-type"))
        most_bytes = self.max_batch_bytes if route.has_large_body else self.max_body_bytes
        return await self.bodies.read(exchange, most_bytes)

    async def _submit(self, exchange: Exchange, route: Route, key: ResolvedKey) -> None:
        """Submit jobs. This is the hot path: the body is not parsed here."""
        given = exchange.headers.get(_IDEMPOTENCY_NAME)
        if given is not None and not _IDEMPOTENCY_KEY.fullmatch(given):
            raise invalid("#Idempotency-Key", "An Idempotency-Key has 1 to 200 visible ASCII characters.")
        body = await self._read(exchange, route)
        try:
            entry: Entry = {
                "tenant_id": key.identity.tenant_id,
                "key_id": key.identity.key_id,
                "idempotency_key": None if given is None else given.decode(),
                "batch": route.has_large_body,
                "body": _text(body.content),
                "user_id": key.identity.user_id,
                "project": key.identity.project,
            }
            if (traceparent := traces.current()) is not None:
                entry["traceparent"] = traceparent
            answer = await while_connected(exchange, self.gatherer.submit(entry))
        finally:
            body.release()
        content = answer["body"].encode()
        if answer["status"] >= 400:
            document = {**orjson.loads(content), "request_id": exchange.request_id.decode()}
            if (trace_id := traces.trace_id()) is not None:
                document["trace_id"] = trace_id
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
