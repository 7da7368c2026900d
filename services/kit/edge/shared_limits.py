"""Limits of tenants over all processes of a kind: each counts by itself, and charges what the others have let through.

No request waits for an exchange, so a process that has not heard of the others' requests yet may let through what the
tenant had left. In any time ``t``, ``n`` processes therefore let through at most ``burst + rate * t`` requests, plus
``n - 1`` times ``burst + rate * D``, where ``D`` is the time of an exchange, twice ``LIMITS_S``; a process that was
started in that time counts as one more. The excess is paid off: the mean rate holds. While Redis does not answer,
limits hold for each process alone.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.routing import LimitsState
from services.kit.edge.limits import ConcurrencyLimiter, MonthCounts, RateLimiter
from services.kit.logging import Log

log = Log(__name__)

LIMITS_S = 0.25
QUIET_S = 2.0
"""A process that has had no request for so long, while nothing is open elsewhere, looks this often until it gets one.
It lets nothing through meanwhile, and at the first look after it, at most its burst more than if it had looked all the
time. What is open elsewhere counts against a tenant's first request here, so that its end must be seen at once."""
ANSWERS_S = 2.0  #: A Redis that is silent for so long does not answer
ALIVE_S = 3.0  #: What a process that has not written for so long said to have open does not count
FORGOTTEN_S = 60.0
TOLD_S = 600.0  #: A tenant that has sent nothing for so long is left out


@dataclass(slots=True)
class _Other:
    """What is known of another process."""

    state: LimitsState  #: What it wrote last; its times are of its own clock, which may be far from this machine's
    heard_s: float  #: Since when it has been there, by this process's clock


class SharedLimits:
    """This process's counts among those of the others."""

    def __init__(
        self,
        redis: Redis,
        key: str,
        limiter: RateLimiter,
        at_once: ConcurrencyLimiter,
        process: str,
        started_at_s: float,
        clock_s: Callable[[], float] = time.time,
        months: MonthCounts | None = None,
    ) -> None:
        """Take what this process counts, and where the others' counts are.

        Args:
            key: The hash shared by all processes of this kind.
            limiter: Limits tenants' requests per second in this process.
            at_once: Limits what tenants have open in this process.
            process: Its name, a new one after each start.
            months: Counts what is used of budgets for a month in this process.
        """
        self._months = months or MonthCounts()
        self._redis, self._key, self._limiter, self._at_once = redis, key, limiter, at_once
        self._process, self._started_at_s, self._clock_s = process, started_at_s, clock_s
        self._known: dict[str, _Other] = {}
        self._is_away = False
        self._written: LimitsState | None = None
        self._changed_at_s = started_at_s

    async def look(self) -> None:
        """Write what this process has let through, and charge what the others have; log once when Redis is away."""
        own, last = self._own(), self._written
        if last is None or own.open or own.taken != last.taken or own.months != last.months or self._at_once.elsewhere:
            self._changed_at_s = own.at_s
        elif self._changed_at_s + QUIET_S < own.at_s < last.at_s + QUIET_S:
            return
        try:
            async with asyncio.timeout(ANSWERS_S):
                await self._look(own)
        except (RedisError, TimeoutError, OSError) as error:
            if not self._is_away:
                log.warning("limits.not_shared", error=str(error) or type(error).__name__)
            self._is_away = True
            self._at_once.elsewhere = {}
        else:
            self._is_away, self._written = False, own

    def _own(self) -> LimitsState:
        return LimitsState(
            at_s=self._clock_s(),
            started_at_s=self._started_at_s,
            taken=self._limiter.taken(TOLD_S),
            open=dict(self._at_once.open),
            months=self._months.told(),
        )

    async def _look(self, own: LimitsState) -> None:
        now_s, up_s = own.at_s, own.at_s - own.started_at_s
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(self._key, self._process, own.model_dump_json())
        pipeline.hgetall(self._key)
        _, found = await pipeline.execute()
        elsewhere, used, expected = Counter[str](), Counter[str](), Counter[str]()
        known: dict[str, _Other] = {}
        forgotten: list[str] = []
        for name, document in found.items():
            try:
                state = LimitsState.as_stored(document)
            except ValidationError:  # of an earlier release
                continue
            if name == self._process:
                continue
            last = self._known.get(name)
            is_silent = last is not None and last.state.at_s == state.at_s
            heard_s = last.heard_s if last is not None and is_silent else now_s
            self._charge(last and last.state.taken, state, up_s)
            known[name] = _Other(state, heard_s)  # also while it could not be removed: it would count as a new one
            # Also of a process that has died: what it has used may not have been reported yet.
            used.update({each: counts[0] for each, counts in state.months.items()})
            if now_s - heard_s <= ALIVE_S:
                elsewhere.update(state.open)
                expected.update({each: counts[1] for each, counts in state.months.items()})
            elif now_s - heard_s > FORGOTTEN_S:
                forgotten.append(name)
        self._known = known
        self._at_once.elsewhere = elsewhere
        self._months.elsewhere = {each: (used[each], expected[each]) for each in used}
        if forgotten:
            await self._redis.hdel(self._key, *forgotten)

    def _charge(self, before: dict[str, int] | None, state: LimitsState, up_s: float) -> None:
        """Charge what a process has let through since the last time; this one has been up for ``up_s``."""
        if before is None:
            # What it had let through before it was first heard of is another time's, unless it was started just now:
            # one that runs for long is new to an older one where Redis was away, or has lost what was in it.
            its_s = state.at_s - state.started_at_s
            before = {} if its_s < up_s and its_s <= ALIVE_S else state.taken
        for tenant, total in state.taken.items():
            added = total - before.get(tenant, 0)
            if added > 0 or (added < 0 and tenant.endswith(" tokens")):  # fewer than were expected
                self._limiter.charge(tenant, added)

    async def leave(self) -> None:
        """Make the others stop counting this process; if Redis does not answer, they forget it by themselves."""
        with contextlib.suppress(RedisError, TimeoutError, OSError):
            async with asyncio.timeout(1):
                await self._redis.hdel(self._key, self._process)
