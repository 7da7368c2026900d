"""Signed tokens by which services identify each other, and on whose behalf a request is made (JWT, HS256, RFC 7519).

A token names the sender (`iss`), the receiver (`aud`), from when until when it is valid (`iat`, `exp`), and the user on
whose behalf: tenant, role, key, and user and project if there are any. It is made once a minute for each user, and
verified once, so that a request costs one look-up on each side.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jwt

from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.kit import traces
from services.kit.callers import CALLERS, NODE, Calls
from services.kit.credentials import Credential, caller_key, node_secret
from services.kit.problems import ProblemError

ALGORITHM = "HS256"
LIFETIME_S = 300
REUSED_S = 60  #: How long a token is sent again
LEEWAY_S = 60  #: By how much the clocks of two hosts may differ
MOST_KEPT = 10_000
LONGEST_TOKEN = 4_096


def refused() -> ProblemError:
    """Return the error for whoever shows no token of a service."""
    return ProblemError(401, ProblemCode.UNAUTHENTICATED, "This service only answers other services.")


def _unix_s() -> float:
    return time.time()


class Outgoing:
    """Makes the tokens that one service sends to another."""

    def __init__(self, issuer: str, audience: str, key: bytes, clock_s: Callable[[], float] = _unix_s) -> None:
        self._issuer, self._audience, self._key, self._clock_s = issuer, audience, key, clock_s
        self._made: OrderedDict[tuple[str | None, ...], tuple[float, str]] = OrderedDict()

    def authorization(self, identity: Identity | None = None) -> str:
        """Return the header's value for a request, on behalf of ``identity`` or of the service itself."""
        who: tuple[str | None, ...] = ()
        if identity is not None:
            who = identity.tenant_id, identity.role, identity.key_id, identity.user_id, identity.project
        now_s = self._clock_s()
        made = self._made.get(who)
        if made is not None and made[0] <= now_s < made[0] + REUSED_S:
            return made[1]
        claims: dict[str, Any] = {"iss": self._issuer, "aud": self._audience}
        claims |= {"iat": int(now_s), "exp": int(now_s) + LIFETIME_S}
        if identity is not None:
            claims["act"] = identity.model_dump(mode="json", exclude_none=True)
        value = "Bearer " + jwt.encode(claims, self._key, ALGORITHM)
        self._made[who] = (now_s, value)
        self._made.move_to_end(who)
        if len(self._made) > MOST_KEPT:
            self._made.popitem(last=False)
        return value

    def headers(self, identity: Identity | None = None) -> dict[str, str]:
        """Return the headers for a request, on behalf of ``identity`` or of the service itself.

        They name the request that the work at hand is part of, so that the other's log has its id, too.
        """
        return {"authorization": self.authorization(identity), **traces.passed_on()}


def outgoing(credential: Credential, audience: str) -> Outgoing:
    """Return the signer of requests from a service to another; ``KeyError`` if the service may not ask that one."""
    return Outgoing(credential.name, audience, credential.keys[audience])


def outgoing_to_node(credential: Credential, node_id: str, enrolment: bytes) -> Outgoing:
    """Return the signer of requests to the agent of a node that has enrolled."""
    secret = node_secret(credential.nodes[0], node_id, enrolment)
    return Outgoing(credential.name, f"{NODE}/{node_id}", caller_key(secret, credential.name))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: a service, and the user on whose behalf it acts."""

    service: str
    calls: Calls
    identity: Identity | None


class Incoming:
    """Identifies the services that may ask this one.

    Args:
        audience: The name of this one in tokens.
        secrets: Its own, all of which are accepted.
        kind: Its name in ``callers.CALLERS``.
    """

    def __init__(
        self, audience: str, secrets: Sequence[bytes], kind: str | None = None, clock_s: Callable[[], float] = _unix_s
    ) -> None:
        callers = CALLERS.get(kind or audience, {})
        self._audience, self._clock_s = audience, clock_s
        self._callers = {issuer: (calls, [caller_key(s, issuer) for s in secrets]) for issuer, calls in callers.items()}
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()

    @classmethod
    def of(cls, credential: Credential) -> Incoming:
        return cls(credential.name, credential.secrets)

    def caller(self, authorization: str, method: str, path: str) -> Caller:
        """Return who sent a request; ``ProblemError``: 401 without a valid token, 403 for what it never asks."""
        caller = self._read(authorization)
        what = f"The {caller.service} may not ask this"
        if caller.calls.allowed.fullmatch(f"{'GET' if method == 'HEAD' else method} {path}") is None:
            raise ProblemError(403, ProblemCode.FORBIDDEN, f"{what}.")
        if caller.identity is not None and caller.identity.role not in caller.calls.roles:
            raise ProblemError(403, ProblemCode.FORBIDDEN, f"{what} on behalf of {caller.identity.role}.")
        return caller

    async def has_learned(self) -> bool:
        """Return False: the secrets by which a service knows its callers change only when it is restarted."""
        return False

    def _read(self, authorization: str) -> Caller:
        now_s = self._clock_s()
        known = self._known.get(authorization)
        if known is not None and now_s < known[0]:
            return known[1]
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
            raise refused()
        until_s, caller = self._check(token, now_s)
        self._known[authorization] = (until_s, caller)
        if len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        return caller

    def _check(self, token: str, now_s: float) -> tuple[float, Caller]:
        try:
            issuer = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except (jwt.InvalidTokenError, ValueError) as error:
            raise refused() from error
        calls, keys = self._callers.get(issuer, (None, ())) if isinstance(issuer, str) else (None, ())
        for key in keys:
            try:
                claims = jwt.decode(
                    token,
                    key,
                    algorithms=[ALGORITHM],
                    audience=self._audience,
                    options={"require": ["iss", "aud", "iat", "exp"], "verify_exp": False, "verify_iat": False},
                )
                identity = None
                if (act := claims.get("act")) is not None:  # fields that a newer release adds are ignored
                    known = {name: value for name, value in act.items() if name in Identity.model_fields}
                    identity = Identity.model_validate(known)
                issued_s, until_s = float(claims["iat"]), float(claims["exp"])
            except (jwt.InvalidTokenError, ValueError, TypeError, AttributeError):
                continue
            # Checked here, as the library's own clock cannot be set.
            if issued_s - LEEWAY_S > now_s or until_s + LEEWAY_S <= now_s or until_s - issued_s > LIFETIME_S:
                continue
            assert calls is not None
            return until_s + LEEWAY_S, Caller(str(issuer), calls, identity)
        raise refused()
