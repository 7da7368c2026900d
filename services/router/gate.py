"""What all requests to the router pass, whichever door they come through: keys, what a key may do, and counting."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.contracts.codes import ProblemCode
from services.contracts.identity import KeyLimits, ResolvedKey, TenantLimits
from services.core.domain.canaries import point_of
from services.kit import access
from services.kit.crowd import show_known
from services.kit.edge.bodies import BodyReader
from services.kit.edge.exchange import ClientGoneError, Exchange, Header, while_connected
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import ConcurrencyLimiter, MonthCounts, RateLimiter
from services.kit.identity import not_of_a_project
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.tokens import Incoming, refused
from services.router.openai import NO_QUOTA, DoorError
from services.router.settings import RouterSettings
from services.router.turn import CARRIER, Received

log = Log(__name__)

MOST_COUNTS = 10_000  #: Aliases of keys whose requests are counted; that of the one silent longest begins anew


class KeyRules:
    """Applies the limits of keys, which hold for all processes together, as those of tenants do."""

    def __init__(self, limiter: RateLimiter, months: MonthCounts) -> None:
        self._limiter, self._months = limiter, months
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    def admit(self, key: ResolvedKey) -> list[Header]:
        """Count a request; return the headers that say how many are left.

        Raises:
            DoorError: 429: there are too many this minute, or a budget of the key is used up.
        """
        limits = key.key_limits
        if key.excess is not None:
            raise DoorError(429, NO_QUOTA, key.excess)
        if limits.requests_per_min is None:
            return []
        return self._draw(key, "requests", limits.requests_per_min, 1)

    def take_tokens(self, received: Received, tokens: int) -> None:
        """Count the tokens that are expected of a request.

        Raises:
            DoorError: 429: there are too many this minute, or those of this month are used up or may be by the requests
                in service. What routers count is known before admission's count says so.
        """
        limits = received.key.key_limits
        if (month := self._month_of(received)) is not None and (most := limits.month_tokens) is not None:
            used, expected = self._months.total(month)
            if used >= most:
                raise DoorError(429, NO_QUOTA, f"The budget of this key is {most} tokens a month; {used} are used.")
            if used + expected >= most:
                message = f"What this key has in service may use up its budget of {most} tokens a month."
                raise DoorError(429, "rate_limit_exceeded", message, retry_after_s=1)
        if limits.tokens_per_min is not None:
            received.exchange.extra += self._draw(received.key, "tokens", limits.tokens_per_min, tokens)
        received.taken_tokens = tokens
        if month is not None:
            self._months.of(month)[1] += tokens

    def settle(self, received: Received) -> None:
        """Count the tokens that a request has used in place of those that were expected of it."""
        if received.taken_tokens is None:
            return
        most = received.key.key_limits.tokens_per_min
        if most is not None:
            name = f"{received.key.identity.key_id} tokens"
            self._limiter.adjust(name, most, received.used_tokens - received.taken_tokens)
        if (month := self._month_of(received)) is not None:
            counts = self._months.of(month)
            counts[0] += received.used_tokens
            counts[1] = max(counts[1] - received.taken_tokens, 0)  # its counts may have begun anew

    def _month_of(self, received: Received) -> str | None:
        """Return by which name a key's use is counted in the month of a request; None if that is not limited."""
        if received.key.key_limits.month_tokens is None:
            return None
        at = time.gmtime(received.at_utc_s)
        return f"{received.key.identity.key_id} {at.tm_year}-{at.tm_mon}"

    def _draw(self, key: ResolvedKey, what: str, per_min: int, amount: int) -> list[Header]:
        left, full_s, wait_s = self._limiter.draw(f"{key.identity.key_id} {what}", per_min, amount)
        of = what.encode()
        headers: list[Header] = [
            (b"x-ratelimit-limit-" + of, b"%d" % per_min),
            (b"x-ratelimit-remaining-" + of, b"%d" % max(left, 0)),
            (b"x-ratelimit-reset-" + of, b"%ds" % math.ceil(full_s)),
        ]
        if wait_s > 0:
            after_s = max(1, math.ceil(wait_s))
            message = f"This key may use {per_min} {what} per minute; try again in {after_s} s."
            raise DoorError(429, "rate_limit_exceeded", message, retry_after_s=after_s, more=headers)
        return headers

    def model(self, key: ResolvedKey, name: str, session: str | None, is_there: Callable[[str], bool]) -> str | None:
        """Return the model that answers to a name; None if the key may not name it.

        Of an alias's models that there are, each gets its share of the requests; those of a session all go to one.
        """
        limits, count = key.key_limits, 0
        if session is None and name in (limits.aliases or ()):
            count = self._counts.pop((key.identity.key_id, name), 0) + 1
            self._counts[key.identity.key_id, name] = count
            if len(self._counts) > MOST_COUNTS:
                self._counts.popitem(last=False)
        return limits.model_of(name, point_of(session, count), is_there)


def priority_of(limits: KeyLimits, fields: Mapping[str, Any], usual: int) -> int:
    """Return the priority that a request is sent with: its own, as far as its key may state one, else the usual one."""
    given = fields["priority"]
    if limits.priority is None or not isinstance(given, int) or isinstance(given, bool):
        return usual
    return max(given, limits.priority)


class Gate:
    """Keys and limits of this process, and the requests that it has not answered yet."""

    def __init__(self, settings: RouterSettings, keys: KeyCache) -> None:
        self.keys = keys  #: Callers' keys
        self.limiter = RateLimiter()  #: Tenants' limits of requests per second
        self.months = MonthCounts()  #: What is used of keys' budgets of tokens
        self.rules = KeyRules(self.limiter, self.months)  #: Keys' limits
        self.at_once = ConcurrencyLimiter(settings.max_requests_per_tenant, "requests", retry_after_s=1)
        """Tenants' limits of concurrent requests."""
        self.bodies = BodyReader(settings.max_buffered_bytes)  #: Reads bodies while there is room for them
        self._most_bytes = settings.max_body_bytes
        self._services = Incoming.of(settings.credential)
        self.in_flight = 0  #: How many requests are not answered yet
        self.is_empty = asyncio.Event()  #: Set once there are none, after ``close``
        self._is_closing = False

    async def pass_in(
        self,
        exchange: Exchange,
        handle: Callable[[Exchange], Awaitable[None]],
        refuse: Callable[[Exchange, DoorError | ProblemError], Awaitable[None]],
    ) -> None:
        """Have ``handle`` answer a request, or ``refuse`` if it raises before the answer has begun."""
        self.in_flight += 1
        try:
            await handle(exchange)
        except ClientGoneError:
            pass
        except (DoorError, ProblemError) as error:
            if not exchange.has_begun:
                await refuse(exchange, error)
        except Exception as error:
            log.exception("request.failed", path=exchange.scope["path"])
            if exchange.has_begun:
                raise
            failure = f"The router failed: {type(error).__name__}."
            await refuse(exchange, ProblemError(500, ProblemCode.INTERNAL, failure))
        finally:
            self.in_flight -= 1
            if self._is_closing and not self.in_flight:
                self.is_empty.set()

    async def caller(self, exchange: Exchange, authorization: bytes | None) -> ResolvedKey:
        """Return whose request it is, and count it.

        Raises:
            ProblemError: 401 without a valid key, 429 beyond the tenant's rate, 403 for a key that is limited to a
                project and names no models.
        """
        key = await self.keys.caller(authorization, exchange.scope)
        exchange.extra += self.limiter.take(key.identity.tenant_id, key.limits)
        if key.identity.project is not None and key.key_limits.models is None:
            raise not_of_a_project(key.identity.project)
        return key

    async def of_serving(self, exchange: Exchange) -> ResolvedKey:
        """Return the caller on whose behalf serving sends a line of a batch; its rate is not limited here.

        The models and budgets of its key are, also of one that no longer works: what it had asked for before is
        answered.

        Raises:
            DoorError: 429 if a budget of the key is used up; 404 if the key is not known, or not yet.
            ProblemError: 401 or 403 unless serving sent it; 503 while admission does not answer.
        """
        scope = exchange.scope
        given = exchange.headers.get(b"authorization", b"").decode("latin-1")
        caller = self._services.caller(given, scope["method"], scope["path"])
        if caller.identity is None:
            raise refused()
        show_known(scope)
        access.note_caller(caller.identity, caller.service)
        key = await self.keys.find(caller.identity.key_id)
        if key is None:
            raise DoorError(404, "key_not_found", f"There is no key {caller.identity.key_id}.")
        limits = key.key_limits.model_copy(update={"requests_per_min": None, "tokens_per_min": None})
        found = ResolvedKey(identity=caller.identity, limits=TenantLimits(), key_limits=limits, excess=key.excess)
        self.rules.admit(found)
        return found

    async def with_body(self, exchange: Exchange, tenant: str, serve: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve a request with its body, for as long as its client is connected.

        Raises:
            ProblemError: The tenant has too many requests at once, or the body is too large.
            ClientGoneError: The client left.
        """
        self.at_once.enter(tenant)
        try:
            body = await self.bodies.read(exchange, self._most_bytes)
            try:
                work = serve(body.content)
                # whoever leaves a gateway has it end the whole stream
                await (work if CARRIER in exchange.scope else while_connected(exchange, work))
            finally:
                body.release()
        finally:
            self.at_once.leave(tenant)

    def close(self) -> None:
        """Let ``is_empty`` be set once no request is in flight."""
        self._is_closing = True
        if not self.in_flight:
            self.is_empty.set()
