"""The nodes' users in Valkey or Redis: each reads its own stream of commands, and what routers say of its servers.

The database says which users there should be. The server forgets users when it restarts, or is replaced by another one,
and is given them again within two seconds.
"""

from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from services.contracts.streams import command_stream, latency_stream
from services.db.database import Database
from services.kit.logging import Log
from services.telemetry.repository import credentials

log = Log(__name__)

LOOK_S = 2.0
PREFIX = "node:"
COMMANDS = (
    *("+xreadgroup", "+xgroup|create", "+xautoclaim", "+xack", "+xdel", "+xread", "+xrevrange"),
    *("+multi", "+exec", "+discard", "+ping", "+hello", "+auth", "+select", "+client|setinfo", "+client|setname"),
)


def redis_user(node_id: str) -> str:
    """Return the name of a node's user."""
    return PREFIX + node_id


def rules(node_id: str, passwords: list[str]) -> list[str]:
    """Return the rules that define a node's user, given the SHA-256 of its passwords."""
    hashes = [f"#{each}" for each in passwords]
    keys = [f"~{command_stream(node_id)}", f"%R~{latency_stream(node_id)}"]
    return ["reset", "on", *hashes, "-@all", *COMMANDS, *keys]


class RedisUsers:
    """Keeps the users in line with the nodes in the database."""

    def __init__(self, database: Database, redis: Redis) -> None:
        self._database = database
        self._redis: Any = redis  # the library's types do not know that its answers are awaited
        self._applied: dict[str, list[str]] = {}
        self._run_id = ""
        self._failed = ""
        self.may = True
        """Whether the server lets telemetry make users. If it does not, nodes go on with the REDIS_URL of their
        settings, as in earlier releases, and the log says so."""

    async def apply(self) -> None:
        """Make the users as they should be; what the server refuses is logged, and tried again."""
        wanted = await self._database.run(credentials.redis_users)
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                server, users = await pipeline.info("server").execute_command("ACL", "USERS").execute()
                if (run_id := server["run_id"]) != self._run_id:
                    self._applied = {}
                existing = {name for name in users if name.startswith(PREFIX)}
                for node_id, passwords in wanted.items():
                    if redis_user(node_id) not in existing or self._applied.get(node_id) != passwords:
                        pipeline.execute_command("ACL", "SETUSER", redis_user(node_id), *rules(node_id, passwords))
                for name in existing.difference(map(redis_user, wanted)):
                    pipeline.execute_command("ACL", "DELUSER", name)  # its connections end too
                await pipeline.execute()
        except (RedisError, OSError) as error:
            if isinstance(error, ResponseError):  # it answers, and refuses
                self.may = False
            if str(error) != self._failed:
                log.error("redis.users_not_made", error=str(error))
            self._failed = str(error)
            return
        self.may = True
        self._run_id, self._failed, self._applied = run_id, "", wanted
