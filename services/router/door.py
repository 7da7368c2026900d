"""The door, at the level of ASGI: who asks, and whether they may; ``dispatch`` has the request answered.

Files and batches belong to serving: the router lets them in, and serving answers.
"""

import re
import time
from collections.abc import AsyncIterator

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from services.contracts.batches import BATCH_HEADER, BATCH_MODEL_HEADER
from services.contracts.identity import Identity, ResolvedKey, Role
from services.kit.edge.exchange import ClientGoneError, Exchange, Header, check_json_type
from services.kit.http import problem_of
from services.kit.problems import ProblemError, unavailable
from services.kit.tokens import Outgoing
from services.router import openai
from services.router.dispatch import SESSION, Dispatcher
from services.router.fleet import Fleet
from services.router.forms import boundary_of
from services.router.gate import Gate
from services.router.kinds import KINDS, OTHER, Kind, kind_of
from services.router.openai import JSON, DoorError
from services.router.turn import CARRIER, Carrier, Received, Spare, least_accuracy_pct

PATHS = re.compile(r"/v1/files(/\w{1,100}(/content)?)?|/v1/batches(/\w{1,100}(/cancel)?)?", re.ASCII)
"""All that is passed on: a path with dots could lead to other routes of serving, which answer the router itself."""
METHODS = ("GET", "POST", "DELETE")
TIMEOUT = aiohttp.ClientTimeout(total=3_600, sock_connect=3, sock_read=120)
PIECE_BYTES = 64 * 1024


class BatchDoor:
    """Passes requests on files and batches to serving, and its answers back, a piece at a time."""

    def __init__(self, session: aiohttp.ClientSession, serving_url: str, tokens: Outgoing) -> None:
        self._session = session
        self._url = f"{serving_url.rstrip('/')}/internal/openai"
        self._tokens = tokens

    async def handle(self, exchange: Exchange, caller: Identity) -> None:
        """Answer a request on behalf of its caller, who reaches what is its tenant's, whatever its role.

        Raises:
            DoorError: The caller may not ask this.
            ProblemError: Serving refuses it, or does not answer.
        """
        scope, method = exchange.scope, exchange.scope["method"]
        if method not in METHODS:
            raise DoorError(405, "method_not_allowed", f"This path answers {', '.join(METHODS)}.")
        if not caller.role.may(method, Role.USER):
            raise DoorError(403, "forbidden", f"A key with the role {caller.role} may not do this.")
        role = Role.READ_ONLY if caller.role is Role.READ_ONLY else Role.USER
        headers = self._tokens.headers(caller.model_copy(update={"role": role}))
        for name in (b"content-type", b"content-length"):
            if name in exchange.headers:
                headers[name.decode()] = exchange.headers[name].decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        url = self._url + scope["path"] + (f"?{query}" if query else "")
        body = None if method == "GET" else _body(exchange)
        try:
            async with self._session.request(method, url, data=body, headers=headers, timeout=TIMEOUT) as answer:
                if answer.status >= 400:
                    raise problem_of(answer.status, await answer.read(), "Serving")
                passed: list[Header] = [
                    (name.lower(), value) for name, value in answer.raw_headers if name.lower().startswith(b"content-")
                ]
                await exchange.begin(answer.status, passed)
                async for piece in answer.content.iter_chunked(PIECE_BYTES):
                    await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
                await exchange.send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error.__cause__, ClientGoneError):
                raise ClientGoneError from error
            if exchange.has_begun:
                raise
            raise unavailable("Serving") from error


async def _body(exchange: Exchange) -> AsyncIterator[bytes]:
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body"):
            return


BATCH, BATCH_MODEL = BATCH_HEADER.encode(), BATCH_MODEL_HEADER.encode()


def route_of(path: str) -> str:
    """Return what traces call a path: one of a few names, because anybody may send any path."""
    if path in KINDS:
        return path
    return next((name for name in ("/v1/models", "/v1/files", "/v1/batches") if path.startswith(name)), OTHER.route)


class Door:
    """Lets requests in, and answers those that are refused."""

    def __init__(
        self, fleet: Fleet, gate: Gate, dispatcher: Dispatcher, batches: BatchDoor, flex_wait_s: float
    ) -> None:
        """Take what answers requests, and how long one of the tier ``flex`` waits for what others leave free."""
        self._fleet, self._batches, self._flex_wait_s = fleet, batches, flex_wait_s
        self._gate, self._dispatcher = gate, dispatcher

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to a model server or to ``/v1/models``; errors have the form of the API that is asked."""
        await self._gate.pass_in(Exchange.open(scope, receive, send), self._handle, self._refuse)

    async def _refuse(self, exchange: Exchange, refusal: DoorError | ProblemError) -> None:
        error = refusal if isinstance(refusal, DoorError) else openai.of_problem(refusal)
        headers = error.headers
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        kind = KINDS.get(exchange.scope["path"], OTHER)
        await exchange.answer(error.status, headers, error.body(kind.errors))

    async def _handle(self, exchange: Exchange) -> None:
        path, method = exchange.scope["path"], exchange.scope["method"]
        kind = kind_of(path)
        if kind is OTHER and method != "POST":
            kind = None
        if kind is not None and BATCH in exchange.headers:
            return await self._line(exchange, kind, path)
        authorization = exchange.headers.get(b"authorization")
        if authorization is None and (given := exchange.headers.get(b"x-api-key")) is not None:
            authorization = b"Bearer " + given
        key = await self._gate.caller(exchange, authorization)
        if kind is None:
            if path == "/v1/models" or path.startswith("/v1/models/"):
                openai.check_method(method, "GET", "HEAD")
                return await self._models(exchange, key, path.removeprefix("/v1/models").removeprefix("/"))
            if PATHS.fullmatch(path):
                with self._gate.at_once.one_more(key.identity.tenant_id):
                    return await self._batches.handle(exchange, key.identity)
            raise DoorError(404, "unknown_url", f"There is no {path}.")
        openai.check_method(method, "POST")
        exchange.extra += self._gate.rules.admit(key)
        if not key.identity.role.may(method, Role.USER):
            raise DoorError(403, "forbidden", f"A key with the role {key.identity.role} may not ask for completions.")
        if (boundary := boundary_of(exchange.headers.get(b"content-type"))) is None:
            check_json_type(exchange.headers.get(b"content-type"))
        query = exchange.scope["query_string"].decode("latin-1")
        target = f"{path}?{query}" if query else path
        await self._gate.with_body(
            exchange, key.identity.tenant_id, lambda body: self._complete(exchange, kind, target, key, body, boundary)
        )

    async def _line(self, exchange: Exchange, kind: Kind, path: str) -> None:
        """Answer a line of a batch, which serving sends on behalf of the batch's tenant."""
        key = await self._gate.of_serving(exchange)
        places = exchange.headers[BATCH].decode("latin-1").split(",")
        spare = Spare(0.0, frozenset(place for place in places if place))
        await self._gate.with_body(
            exchange, key.identity.tenant_id, lambda body: self._complete(exchange, kind, path, key, body, spare=spare)
        )

    async def _models(self, exchange: Exchange, key: ResolvedKey, name: str) -> None:
        there, aliases = dict(self._fleet.models(key.identity)), key.key_limits.aliases or {}
        found = [each for each in there.items() if key.key_limits.may_name(each[0]) and each[0] not in aliases]
        for alias, targets in aliases.items():
            if pools := [there[model] for model in targets if model in there]:
                found.append((alias, pools[0]))
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

    async def _complete(
        self,
        exchange: Exchange,
        kind: Kind,
        path: str,
        key: ResolvedKey,
        content: bytes,
        boundary: bytes | None = None,
        spare: Spare | None = None,
    ) -> None:
        at_s, at_utc_s = time.monotonic(), time.time()
        carrier: Carrier | None = exchange.scope.get(CARRIER)
        try:
            asked = openai.read(content, boundary, may_repeat=kind.may_repeat and carrier is None)
        except DoorError:
            if kind is OTHER:
                raise DoorError(404, "unknown_url", f"There is no {exchange.scope['path']}.") from None
            raise
        session = exchange.headers.get(SESSION, b"").decode("latin-1") or asked.session
        given = exchange.headers.get(BATCH_MODEL) if spare is not None else None
        model = None if given is None else given.decode("latin-1")  # what serving chose for a line
        if model is None or not (asked.name in (key.key_limits.aliases or ()) or key.key_limits.may_name(model)):
            model = self._gate.rules.model(
                key, asked.name, session, lambda each: self._fleet.pool_of(each, key.identity) is not None
            )
        pool = None if model is None else self._fleet.pool_of(model, key.identity)
        if model is None or pool is None:
            raise _no_model(asked.name)
        asked.model = model
        if spare is None and asked.is_flex:
            spare = Spare(self._flex_wait_s)
        least_pct = least_accuracy_pct(exchange, key)
        received = Received(exchange, kind, path, key, asked, at_s, at_utc_s, spare, least_pct, carrier=carrier)
        try:
            await self._dispatcher.serve(received, pool)
        finally:
            self._gate.rules.settle(received)


def _no_model(name: str) -> DoorError:
    detail = f"The model `{name[:200]}` does not exist or you do not have access to it."
    return DoorError(404, "model_not_found", detail, param="model")
