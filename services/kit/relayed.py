"""A node's streams as relayed by telemetry, for a node that cannot reach the installation's Valkey or Redis."""

from collections.abc import Mapping
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from services.contracts.streams import NodeStream, StreamEntries, StreamRead
from services.kit.control_plane import ControlPlane
from services.kit.problems import ProblemError

_WITHIN_S = 10.0  #: Longer than a read waits for entries


class RelayedRedis:
    """The Redis client commands that read a node's streams, as requests to telemetry with the node's own token.

    They raise ``RedisConnectionError`` if telemetry does not answer, or refuses.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def xread(self, streams: Mapping[str, str], **_: int) -> list[tuple[str, list[Any]]]:
        """Return the entries after the one named; telemetry waits while there are none, and decides how many."""
        ((name, after),) = streams.items()
        found = await self._ask(StreamRead(stream=NodeStream.of(name), after=after))
        return [(name, [(each.id, each.fields) for each in found.entries])] if found.entries else []

    async def xdel(self, name: str, entry_id: str) -> None:
        """Remove an entry that has been carried out."""
        await self._ask(StreamRead(stream=NodeStream.of(name), done=entry_id))

    async def _ask(self, read: StreamRead) -> StreamEntries:
        try:
            return await self._plane.call("stream", read, StreamEntries, _WITHIN_S)
        except ProblemError as error:
            raise RedisConnectionError(f"telemetry relays no commands: {error.detail}") from error
