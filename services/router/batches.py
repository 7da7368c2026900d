"""Files and batches of OpenAI's API: the router lets them in, and serving, which owns them, answers."""

import re
from collections.abc import AsyncIterator

import aiohttp

from services.contracts.identity import Identity, Role
from services.kit.edge.exchange import ClientGoneError, Exchange, Header
from services.kit.http import problem_of
from services.kit.problems import unavailable
from services.kit.tokens import Outgoing
from services.router.openai import DoorError

PATHS = re.compile(r"/v1/files(/\w{1,100}(/content)?)?|/v1/batches(/\w{1,100}(/cancel)?)?", re.ASCII)
"""All that is passed on: a path with dots could lead to other routes of serving, which answer the router itself."""
METHODS = ("GET", "POST", "DELETE")
TIMEOUT = aiohttp.ClientTimeout(total=3_600, sock_connect=3, sock_read=120)
PIECE_BYTES = 64 * 1024


def is_of_batches(path: str) -> bool:
    """Whether a path is one of files or batches."""
    return PATHS.fullmatch(path) is not None


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
