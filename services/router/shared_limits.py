"""Limits of tenants over all router processes: each counts by itself, and charges what the others have let through.

Nothing is asked for a request. A process that has not heard of the others' requests yet may let through what the tenant
had left. In any time ``t``, ``n`` processes therefore let through at most ``burst + rate * t`` requests, and ``n - 1``
times ``burst + rate * D`` more, where ``D`` is the time of an exchange, twice ``LIMITS_S``. What was too much is paid
off: the mean rate holds. While Redis does not answer, limits hold for each process.
"""

from __future__ import annotations

import time

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.routing import LimitsState
from services.contracts.streams import ROUTER_LIMITS_HASH
from services.kit.logging import Log
from services.router.gate import Gate

log = Log(__name__)

LIMITS_S = 0.25
ALIVE_S = 3.0
"""What a process that has not written for so long said to have open does not count."""
FORGOTTEN_S = 60.0
TOLD_S = 600.0
"""A tenant that has sent nothing for so long is left out."""


class SharedLimits:
    """This process's counts among the others'."""

    def __init__(self, redis: Redis, gate: Gate, router: str, started_at_s: float) -> None:
        self._redis = redis
        self._gate = gate
        self._router = router
        self._started_at_s = started_at_s
        self._known: dict[str, dict[str, int]] = {}
        self._is_away = False

    async def look(self, processes: int) -> None:
        """Write what this process has let through, and charge what the others have; nothing if it is alone."""
        if processes < 2 and not self._known:
            return
        try:
            await self._look()
        except RedisError as error:
            if not self._is_away:
                log.warning("limits.not_shared", error=str(error))
            self._is_away = True
            self._gate.at_once.elsewhere = {}
        else:
            self._is_away = False

    async def _look(self) -> None:
        now_s, gate = time.time(), self._gate
        own = LimitsState(
            at_s=now_s,
            started_at_s=self._started_at_s,
            taken=gate.limiter.taken(TOLD_S),
            open=gate.at_once.open,
        )
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(ROUTER_LIMITS_HASH, self._router, own.model_dump_json())
        pipeline.hgetall(ROUTER_LIMITS_HASH)
        _, found = await pipeline.execute()
        elsewhere: dict[str, int] = {}
        known: dict[str, dict[str, int]] = {}
        for given, document in found.items():
            name = str(given)
            try:
                state = LimitsState.model_validate_json(document)
            except ValidationError:  # of another release
                continue
            if name == self._router:
                continue
            if now_s - state.at_s > FORGOTTEN_S:
                await self._redis.hdel(ROUTER_LIMITS_HASH, name)
                continue
            known[name] = self._charge(name, state)
            if now_s - state.at_s <= ALIVE_S:
                for tenant, count in state.open.items():
                    elsewhere[tenant] = elsewhere.get(tenant, 0) + count
        self._known = known
        gate.at_once.elsewhere = elsewhere

    def _charge(self, router: str, state: LimitsState) -> dict[str, int]:
        """Charge what a process has let through since it was last heard of; return all that it has."""
        before = self._known.get(router)
        if before is None:  # what an older process had let through before it was first heard of is another time's
            before = {} if state.started_at_s > self._started_at_s else state.taken
        for tenant, total in state.taken.items():
            if (added := total - before.get(tenant, 0)) > 0:
                self._gate.limiter.charge(tenant, added)
        return state.taken

    async def leave(self) -> None:
        """Have the others count this process no more."""
        await self._redis.hdel(ROUTER_LIMITS_HASH, self._router)
