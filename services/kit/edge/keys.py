"""Callers identified by API key, which admission resolves; its answers are cached for a few seconds."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Scope

from services.contracts.codes import ProblemCode
from services.contracts.identity import KeyLookup, ResolvedKey
from services.kit import access
from services.kit.crowd import show_known
from services.kit.edge.settings import EdgeSettings
from services.kit.http import ServiceClient
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable

log = Log(__name__)

BEARER = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +(ws_[A-Za-z0-9_-]{43}) *")
ASK_AGAIN_S = 1.0
MOST_REQUESTS = 100
"""Requests to admission at once, so that a flood of invented keys does not become a flood of requests."""

Resolve = Callable[[str], Awaitable[ResolvedKey | None]]
Named = bytes | str
"""A key by its hash, or by its id."""


@dataclass(slots=True)
class _Answer:
    """Admission's answer about a key, when it was asked, and until when the answer is used."""

    key: ResolvedKey | None
    asked_at_s: float
    fresh_until_s: float


def unauthenticated(detail: str) -> ProblemError:
    """Return the problem that answers a request without a valid key."""
    return ProblemError(401, ProblemCode.UNAUTHENTICATED, detail, headers={"www-authenticate": "Bearer"})


def keys_of(admission: ServiceClient, settings: EdgeSettings) -> KeyCache:
    return KeyCache(
        resolve_at(admission),
        max_age_s=settings.key_max_age_s,
        grace_s=settings.key_grace_s,
        size=settings.key_cache_size,
    )


class KeyCache:
    """Caches keys by their hash. Many simultaneous requests with the same unknown key ask admission once."""

    def __init__(
        self,
        resolve: Resolve,
        *,
        max_age_s: float,
        grace_s: float,
        size: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a cache over ``resolve``, which takes a key's hash or its id.

        It returns None for a key that does not exist, and raises ProblemError while admission does not answer.
        """
        self._resolve, self._max_age_s, self._grace_s = resolve, max_age_s, grace_s
        self._size, self._clock_s = size, clock_s
        self._answers: OrderedDict[Named, _Answer] = OrderedDict()
        self._asking: dict[Named, asyncio.Task[ResolvedKey | None]] = {}

    async def caller(self, authorization: bytes | None, scope: Scope) -> ResolvedKey:
        """Return the caller; the request's connection counts as that of a known client from now on.

        Raises:
            ProblemError: 401 without a valid key, 503 while admission does not answer.
        """
        if authorization is None:
            raise unauthenticated("An API key is needed: Authorization: Bearer ws_...")
        match = BEARER.fullmatch(authorization)
        if match is None:
            raise unauthenticated("The Authorization header does not hold an API key: Bearer ws_...")
        key = _unexpired(await self.find(hashlib.sha256(match[1]).digest()))
        if key is None:
            raise unauthenticated("The API key is not known, has expired, or was revoked.")
        show_known(scope)
        access.note_caller(key.identity)
        return key

    async def still_works(self, key_id: str) -> bool:
        """Return whether a key that was let in has neither expired nor been revoked since, as far as admission says."""
        try:
            return _unexpired(await self.find(key_id)) is not None
        except ProblemError:
            return True

    async def find(self, named: Named) -> ResolvedKey | None:
        """Return a key; None if it does not work. ``ProblemError``: 503 while admission does not answer."""
        answer = self._answers.get(named)
        if answer is not None and self._clock_s() < answer.fresh_until_s:
            return answer.key
        if (task := self._asking.get(named)) is None:
            if len(self._asking) >= MOST_REQUESTS:
                raise unavailable("Admission")
            task = self._asking[named] = asyncio.create_task(self._ask(named))
            task.add_done_callback(lambda done: self._answered(named, done))
        return await asyncio.shield(task)  # the first request may be cancelled; the others still wait

    def _answered(self, named: Named, task: asyncio.Task[ResolvedKey | None]) -> None:
        self._asking.pop(named, None)
        if not task.cancelled():
            task.exception()  # all who asked may have gone: asyncio would log that nobody has looked at it

    async def _ask(self, named: Named) -> ResolvedKey | None:
        asked_at_s = self._clock_s()
        try:
            key = await self._resolve(named if isinstance(named, str) else named.hex())
        except ProblemError as error:
            known = self._answers.get(named)
            if known is None or known.key is None or self._clock_s() > known.asked_at_s + self._grace_s:
                raise
            log.warning("key.not_confirmed", key_id=known.key.identity.key_id, error=error.detail)
            known.fresh_until_s = self._clock_s() + ASK_AGAIN_S
            return known.key
        self._answers[named] = _Answer(key, asked_at_s, asked_at_s + self._max_age_s)
        self._answers.move_to_end(named)
        while len(self._answers) > self._size:
            self._answers.popitem(last=False)
        return key


def _unexpired(key: ResolvedKey | None) -> ResolvedKey | None:
    return None if key is None or (key.expires_at is not None and utc_now() >= key.expires_at) else key


def resolve_at(admission: ServiceClient) -> Resolve:
    """Return a function that asks ``admission`` for the owner of a key, by the key's hash or its id."""

    async def resolve(named: str) -> ResolvedKey | None:
        lookup = KeyLookup(key_id=named) if named.startswith("key_") else KeyLookup(key_sha256=named)
        try:
            path = "/internal/keys/resolve"
            return await admission.call("POST", path, ResolvedKey, body=lookup, retry=True, attempts=3)
        except ProblemError as error:
            if error.status == 404:
                return None
            raise

    return resolve
