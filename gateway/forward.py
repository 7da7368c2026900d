"""Forward a request to the service that owns its route, and return the response as it arrives."""

import asyncio
import contextlib
from collections.abc import Mapping
from urllib.parse import quote

import aiohttp
from yarl import URL

from gateway.routes import EVENTS, JSON, Route, Upstream
from services.contracts.identity import REQUEST_ID_HEADER, ResolvedKey
from services.kit.edge.exchange import ClientGoneError, Exchange, Header, while_connected
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import ConcurrencyLimiter
from services.kit.logging import Log
from services.kit.problems import unavailable
from services.kit.tokens import Outgoing

log = Log(__name__)

# No other header of a client reaches a service: not its key, and nothing by which services could take it for another.
PASSED_IN = (b"accept", b"content-type", b"idempotency-key", b"if-match", b"if-none-match", b"last-event-id")
NOT_PASSED_OUT = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"),
        *("transfer-encoding", "content-length", "date", "server", REQUEST_ID_HEADER),
    }
)
SAFE_TO_REPEAT = frozenset({"GET", "HEAD", "PUT", "DELETE"})
ATTEMPTS = 3
LARGEST_WHOLE_BYTES = 256 * 1024


class Forwarder:
    """Forwards requests to the services."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: dict[Upstream, str],
        *,
        tokens: Mapping[Upstream, Outgoing],
        connect_timeout_s: float,
        timeout_s: float,
        stream_silence_s: float,
        streams: ConcurrencyLimiter,
        keys: KeyCache,
    ) -> None:
        self._session, self._keys = session, keys
        self._urls = {name: url.rstrip("/") for name, url in urls.items()}
        self._tokens = tokens
        self._whole = aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_timeout_s)
        self._streamed = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=stream_silence_s)
        self._streams = streams

    async def forward(self, exchange: Exchange, route: Route, path: str, key: ResolvedKey, body: bytes | None) -> None:
        """Pass on a request and its response; ``ProblemError``: 503 without an answer, 429 with too many streams."""
        headers = self._headers(exchange, route, key, body)
        url = self._url(exchange, route, path)
        method = route.method  # a HEAD is forwarded as a GET; the server omits the body
        if route.media == JSON:
            answer = await self._ask(route, method, url, headers, body, self._whole)
            async with answer:
                await self._pass_on(exchange, route, key, answer)
            return
        with self._streams.one_more(key.identity.tenant_id):
            answer = await self._ask(route, method, url, headers, body, self._streamed)
            async with answer:
                with contextlib.suppress(ClientGoneError):
                    await while_connected(exchange, self._pass_on(exchange, route, key, answer))

    def _headers(self, exchange: Exchange, route: Route, key: ResolvedKey, body: bytes | None) -> dict[str, str]:
        headers = {
            name.decode(): exchange.headers[name].decode("latin-1") for name in PASSED_IN if name in exchange.headers
        }
        if body is None:
            headers.pop("content-type", None)
        headers |= self._tokens[route.to].headers(key.identity)
        headers["accept-encoding"] = "identity"  # bodies are passed on unread, so they must not be compressed
        headers[REQUEST_ID_HEADER] = exchange.request_id.decode()
        return headers

    def _url(self, exchange: Exchange, route: Route, path: str) -> URL:
        query: bytes = exchange.scope["query_string"]
        words = quote(query, safe="%&=+;,/?:@!$'()*~-._") if query else ""
        return URL(self._urls[route.to] + path + ("?" + words if words else ""), encoded=True)

    async def _ask(
        self,
        route: Route,
        method: str,
        url: URL,
        headers: dict[str, str],
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        for attempt in range(ATTEMPTS if method in SAFE_TO_REPEAT else 1):
            if attempt:
                await asyncio.sleep(0.1 * 2**attempt)
            try:
                return await self._session.request(
                    method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
                )
            except TimeoutError:
                break
            except (aiohttp.ClientError, OSError, ValueError) as error:
                log.warning("upstream.failed", upstream=route.to, error=repr(error))
        raise unavailable(f"The {route.to}")

    async def _pass_on(
        self, exchange: Exchange, route: Route, key: ResolvedKey, answer: aiohttp.ClientResponse
    ) -> None:
        # A service that refuses the gateway's own token, as when a clock was set between the two, says nothing of the
        # client's key, which the gateway has checked.
        if answer.status == 401 or (answer.status >= 500 and not answer.content_type.endswith("json")):
            log.error("upstream.broken", upstream=route.to, status=answer.status, path=exchange.scope["path"])
            raise unavailable(f"The {route.to}")
        headers: list[Header] = [
            (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in answer.headers.items()
            if name.lower() not in NOT_PASSED_OUT
        ]
        length = answer.content_length
        if length is not None and length <= LARGEST_WHOLE_BYTES:
            try:
                content = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise unavailable(f"The {route.to}") from error
            await exchange.answer(answer.status, headers, content)
            return
        await self._stream(exchange, route, key, answer, headers)

    async def _stream(
        self,
        exchange: Exchange,
        route: Route,
        key: ResolvedKey,
        answer: aiohttp.ClientResponse,
        headers: list[Header],
    ) -> None:
        if answer.content_length is not None:
            headers.append((b"content-length", b"%d" % answer.content_length))
        await exchange.begin(answer.status, headers)
        try:
            async for piece in answer.content.iter_any():
                if route.media != JSON and not await self._keys.still_works(key.identity.key_id):
                    raise ConnectionAbortedError("the client's key no longer works")
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("stream.broke_off", upstream=route.to, path=exchange.scope["path"], error=repr(error))
            if route.media != EVENTS:
                return  # without the last chunk, so that the client sees that the answer is incomplete
        await exchange.send({"type": "http.response.body", "body": b""})
