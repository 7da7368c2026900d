"""Signed tokens, as the services send them to each other."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from services.contracts.identity import Identity
from services.kit.credentials import Credential, roots_of
from services.kit.identity import CALLER
from services.kit.tokens import Outgoing, outgoing

TOKEN = "a-token-for-tests-only"


def signed(audience: str, identity: Identity | None = None, *, issuer: str = "gateway", root: str = TOKEN) -> str:
    """Return the token of a request of one service to another."""
    return tokens(audience, issuer=issuer, root=root).authorization(identity).removeprefix("Bearer ")


def tokens(audience: str, *, issuer: str = "gateway", root: str = TOKEN) -> Outgoing:
    """Return what signs the requests of one service to another."""
    return outgoing(Credential.derived(issuer, roots_of(root)), audience)


def headers_for(
    audience: str, identity: Identity | None = None, *, issuer: str = "gateway", root: str = TOKEN
) -> dict[str, str]:
    """Return the headers of a request of one service to another."""
    return tokens(audience, issuer=issuer, root=root).headers(identity)


class ActingAs:
    """An app whose every request is on behalf of somebody, for routes that are served without the rest of a process.

    A request may name another caller by ``as_caller``.
    """

    def __init__(self, app: ASGIApp, identity: Identity) -> None:
        self._app = app
        self._identity = identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope.get("headers", []))
        other = headers.get(AS_CALLER.encode())
        scope[CALLER] = Identity.model_validate_json(other) if other else self._identity
        await self._app(scope, receive, send)


AS_CALLER = "x-test-caller"


def as_caller(identity: Identity) -> dict[str, Any]:
    """Return the headers that name another caller to ``ActingAs``."""
    return {AS_CALLER: identity.model_dump_json()}
