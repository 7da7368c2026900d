"""The router processes that share the load: how many there are, and what each holds.

Processes on one machine listen on one port, and the kernel spreads connections over them. All of them, on any machine,
count each other through Redis. Each gives a server at most its capacity divided by their number, so that together they
do not overload it, and each orders the requests that came to it; instances of applications are assigned by one process
for all (``apps.coordination``). While Redis does not answer, the last count stays in force.
"""

from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis

from services.contracts.routing import RouterState
from services.contracts.streams import ROUTERS_HASH
from services.router.apps.coordination import Coordinator
from services.router.fleet import Fleet

ALIVE_S = 6.0  #: A process that has not written for so long does not count
FORGOTTEN_S = 60.0


class Peers:
    """This process as one of the router processes."""

    def __init__(self, redis: Redis, fleet: Fleet, coordinator: Coordinator, router: str, at_least: int = 1) -> None:
        """Take what is kept up to date with the other processes, and how many processes there are at least."""
        self._redis, self._fleet, self._coordinator = redis, fleet, coordinator
        self._router, self.processes = router, at_least

    async def look(self) -> None:
        """Write what this process holds, and read what the others do; ``RedisError`` if Redis does not answer."""
        redis: Any = self._redis  # the library's types are not known in full
        seconds, microseconds = await redis.time()  # of one clock for all, whatever machines they run on
        now_s = seconds + microseconds / 1e6
        own = RouterState(
            at_s=now_s,
            held={server.id: server.held for server in self._fleet.everyone() if server.held},
            started_at_s=self._coordinator.started_at_s,
            address=self._coordinator.address,
        )
        await self._redis.hset(ROUTERS_HASH, self._router, own.model_dump_json(exclude_none=True))
        found = await self._redis.hgetall(ROUTERS_HASH)
        held: dict[str, int] = {}
        alive: dict[str, RouterState] = {}
        for given, document in found.items():
            name = str(given)
            if name == self._router:
                continue
            try:
                state = RouterState.model_validate_json(document)
            except ValidationError:  # of another release
                continue
            if now_s - state.at_s > ALIVE_S:
                if now_s - state.at_s > FORGOTTEN_S:
                    await self._redis.hdel(ROUTERS_HASH, name)
                continue
            alive[name] = state
            for server, count in state.held.items():
                held[server] = held.get(server, 0) + count
        self.processes = 1 + len(alive)
        self._fleet.share(self.processes, held)
        self._coordinator.choose(alive)

    async def leave(self) -> None:
        """Have the others no longer count this process."""
        await self._redis.hdel(ROUTERS_HASH, self._router)
