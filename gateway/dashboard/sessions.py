"""Sessions in sealed cookies, which every gateway of the installation opens until they expire or are ended."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from pydantic import BaseModel, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.types import ASGIApp, Receive, Scope, Send

from services.contracts.codes import ProblemCode
from services.contracts.streams import ended_session
from services.kit.access import HEADERS
from services.kit.edge.exchange import Exchange
from services.kit.logging import Log
from services.kit.problems import ProblemError

PURPOSE = "dashboard sessions"
CSRF_HEADER = b"x-csrf-token"

M = TypeVar("M", bound=BaseModel)


class Session(BaseModel, frozen=True):
    """Somebody who has signed in."""

    key: str  #: The API key that they act with
    csrf: str  #: A token that requests which change something must repeat, and that other sites cannot read
    name: str | None = None  #: Their name at the sign-in provider; None if they signed in with the key itself

    @classmethod
    def begun(cls, key: str, name: str | None = None) -> Session:
        return cls(key=key, csrf=secrets.token_urlsafe(24), name=name)

    @property
    def id(self) -> str:
        """An id that tells it from other sessions and reveals nothing else."""
        return hashlib.sha256(self.csrf.encode()).hexdigest()

    @property
    def authorization(self) -> bytes:
        """The header from which the edge takes the key."""
        return b"Bearer " + self.key.encode()

    def has_token(self, given: bytes | str | None) -> bool:
        """Return whether a request repeats the session's token."""
        given = given.encode("utf-8", "replace") if isinstance(given, str) else given or b""
        return hmac.compare_digest(given, self.csrf.encode())


class Link(BaseModel, frozen=True):
    """A link that signs somebody in once."""

    key: str
    nonce: str
    then: str

    @property
    def id(self) -> str:
        """An id that tells it from other links and reveals nothing else."""
        return hashlib.sha256(self.nonce.encode()).hexdigest()


class Seals:
    """Seals small messages into cookies, and opens them again for as long as they are valid."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Take keys of 32 bytes; the first seals, and all of them open."""
        self._fernet = MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys])

    def seal(self, message: BaseModel) -> str:
        """Return ``message`` as the value of a cookie that nobody else can read or change."""
        return self._fernet.encrypt(message.model_dump_json(exclude_none=True).encode()).decode()

    def open(self, model: type[M], sealed: str | None, valid_s: int) -> M | None:
        """Return what was sealed at most ``valid_s`` seconds ago; None for anything else."""
        if not sealed:
            return None
        try:
            return model.model_validate_json(self._fernet.decrypt(sealed, ttl=valid_s))
        except (InvalidToken, ValidationError):
            return None


def cookie_name(name: str, scope: Scope) -> str:
    """Return a cookie's name; over TLS with the prefix that makes browsers tie it to this host and to TLS."""
    return f"__Host-wattshift-{name}" if scope["scheme"] == "https" else f"wattshift-{name}"


def cookie_of(name: str, scope: Scope, header: bytes | None) -> str | None:
    """Return the value of one of our cookies in a request; None if it is missing."""
    wanted = cookie_name(name, scope).encode()
    for pair in (header or b"").split(b";"):
        key, _, value = pair.strip().partition(b"=")
        if key == wanted:
            return value.decode("latin-1")
    return None


def set_cookie(name: str, scope: Scope, value: str, *, max_age_s: int, same_site: str = "Strict") -> str:
    """Return the header that sets a cookie, or removes it if the value is empty and the age zero."""
    secure = "; Secure" if scope["scheme"] == "https" else ""
    return f"{cookie_name(name, scope)}={value}; Path=/; HttpOnly; SameSite={same_site}; Max-Age={max_age_s}{secure}"


log = Log(__name__)

ANSWERS_S = 0.5  #: A Redis that is silent for so long does not answer
AWAY_S = 2.0  #: One that did not answer is not asked for so long: pages must not wait for it each time

TELL_S = 1.0  #: How often the other gateways are told of what they could not be told of before


class EndedSessions:
    """Keeps them as entries in Redis, which last as long as the cookies would have.

    While Redis does not answer, only this gateway knows of sessions that were ended here; the others are told as soon
    as it answers again.
    """

    redis: Redis

    def __init__(self, valid_s: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Take how long cookies are valid; ``redis`` is set once the process has started."""
        self._valid_s, self._clock_s = valid_s, clock_s
        self._unshared: dict[str, float] = {}
        self._is_away = False
        self._away_until_s = 0.0

    async def end(self, session: Session) -> None:
        """End a session, at once here and, if Redis answers, at all gateways."""
        self._unshared[session.id] = self._clock_s() + self._valid_s
        await self.tell()

    async def take(self, link: Link, valid_s: int) -> bool:
        """Return whether a link is used for the first time at any gateway; False if Redis does not answer."""
        return bool(await self._ask(self.redis.set(ended_session(link.id), "", ex=valid_s, nx=True)))

    async def tell(self) -> None:
        """Tell the other gateways what they may not know yet."""
        for session_id, until_s in list(self._unshared.items()):
            left_s = int(until_s - self._clock_s())
            if left_s > 0 and await self._ask(self.redis.set(ended_session(session_id), "", ex=left_s)) is None:
                return
            self._unshared.pop(session_id, None)

    async def has_ended(self, session: Session) -> bool:
        """Return whether it is known that a session has ended."""
        if session.id in self._unshared:
            return True
        if self._clock_s() < self._away_until_s:
            return False
        return bool(await self._ask(self.redis.exists(ended_session(session.id))))

    async def _ask(self, command: Awaitable[object]) -> object | None:
        """Return the answer of Redis; None, logged once, if it does not answer."""
        try:
            async with asyncio.timeout(ANSWERS_S):
                found = await command
        except (RedisError, TimeoutError, OSError) as error:
            if not self._is_away:
                log.warning("sessions.not_shared", error=str(error) or type(error).__name__)
            self._is_away = True
            self._away_until_s = self._clock_s() + AWAY_S
            return None
        self._is_away = False
        return found


SCOPE_KEY = "wattshift.session"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
API = ("/v1/", "/emissions/", "/locations", "/metrics")
"""Where the paths of the API begin; pages read the session themselves."""


class SessionMiddleware:
    """Opens the session of a request; a request without a key of its own gets the session's.

    A request that changes something must repeat the session's token in ``X-CSRF-Token``, which only our own pages can
    read. Requests with an ``Authorization`` header are passed on as they are: browsers never add one by themselves.
    """

    def __init__(self, app: ASGIApp, seals: Seals, ended: EndedSessions, valid_s: int) -> None:
        self._app, self._seals, self._ended, self._valid_s = app, seals, ended, valid_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        session = self._seals.open(Session, cookie_of("session", scope, headers.get(b"cookie")), self._valid_s)
        if session is None or await self._ended.has_ended(session):
            await self._app(scope, receive, send)
            return
        scope = {**scope, SCOPE_KEY: session}
        if b"authorization" not in headers and scope["path"].startswith(API):
            if scope["method"] not in SAFE and not session.has_token(headers.get(CSRF_HEADER)):
                detail = "The request does not repeat the token of its page: X-CSRF-Token."
                refusal = ProblemError(403, ProblemCode.FORBIDDEN, detail)
                await Exchange.open(scope, receive, send).refuse(refusal)
                return
            scope["headers"] = [*scope["headers"], (b"authorization", session.authorization)]
            scope[HEADERS] = {**headers, b"authorization": session.authorization}
        await self._app(scope, receive, send)
