"""A small stand-in for Valkey: streams with groups, hashes and pipelines, as far as Wattshift asks for them.

``Store`` is the server, whose answers ``test_valkey.py`` compares with a real one's; ``Client`` is a connection to it
under simulation, whose commands may be refused, answered late, or carried out in vain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, ResponseError

from tests.simulation.loop import Simulation

Entry = tuple[str, dict[str, str] | None]


class Store:
    """What a server keeps. Commands are methods, with the names and arguments that redis-py gives them."""

    def __init__(self) -> None:
        self._hashes: dict[str, dict[str, str]] = {}
        self._streams: dict[str, dict[int, dict[str, str]]] = {}
        self._groups: dict[tuple[str, str], _Group] = {}
        self._last = 0

    def wipe(self) -> None:
        """Forget everything, as a server does that starts without its disk."""
        self._hashes, self._streams, self._groups = {}, {}, {}

    def hset(self, name: str, key: str, value: str) -> int:
        _refuse_nothing(value)
        found = self._hashes.setdefault(name, {})
        is_new = key not in found
        found[key] = str(value)
        return int(is_new)

    def hgetall(self, name: str) -> dict[str, str]:
        return dict(self._hashes.get(name, {}))

    def hdel(self, name: str, *keys: str) -> int:
        if not keys:
            raise ResponseError("wrong number of arguments for 'hdel' command")
        found = self._hashes.get(name, {})
        return sum(found.pop(key, None) is not None for key in keys)

    def xadd(self, name: str, fields: Mapping[str, str], maxlen: int | None = None, approximate: bool = True) -> str:
        _refuse_nothing(*fields.values())
        self._last = max(self._last + 1, time.time_ns() // 1_000_000)
        stream = self._streams.setdefault(name, {})
        stream[self._last] = dict(fields)
        while maxlen is not None and not approximate and len(stream) > maxlen:
            del stream[next(iter(stream))]
        return f"{self._last}-0"

    def xread(self, streams: Mapping[str, str], count: int | None = None) -> Any:
        found: list[list[Any]] = []
        for name, last in streams.items():
            new = [number for number in self._streams.get(name, {}) if number > _number(last)][:count]
            if new:
                found.append([name, [self._entry(name, number) for number in new]])
        return found

    def xlen(self, name: str) -> int:
        return len(self._streams.get(name, {}))

    def xdel(self, name: str, *ids: str) -> int:
        stream = self._streams.get(name, {})
        return sum(stream.pop(_number(each), None) is not None for each in ids)

    def xgroup_create(self, name: str, groupname: str, id: str = "$", mkstream: bool = False) -> bool:
        if (name, groupname) in self._groups:
            raise ResponseError("BUSYGROUP Consumer Group name already exists")
        if name not in self._streams and not mkstream:
            raise ResponseError("The XGROUP subcommand requires the key to exist.")
        stream = self._streams.setdefault(name, {})
        self._groups[name, groupname] = _Group(max(stream, default=0) if id == "$" else _number(id))
        return True

    def xreadgroup(
        self, groupname: str, consumername: str, streams: Mapping[str, str], count: int | None = None
    ) -> Any:
        found: list[list[Any]] = []
        for name in streams:
            group = self._group(name, groupname)
            new = [number for number in self._streams.get(name, {}) if number > group.delivered][:count]
            if new:
                group.delivered = new[-1]
                group.pending |= dict.fromkeys(new)
                found.append([name, [self._entry(name, number) for number in new]])
        return found

    def xautoclaim(
        self, name: str, groupname: str, consumername: str, min_idle_time: int, start_id: str = "0-0", count: int = 100
    ) -> list[Any]:
        group = self._group(name, groupname)
        pending = sorted(number for number in group.pending if number >= _number(start_id))
        here, rest = pending[:count], pending[count:]
        gone = [number for number in here if number not in self._streams.get(name, {})]
        for number in gone:
            del group.pending[number]
        kept = [self._entry(name, number) for number in here if number not in gone]
        return [f"{rest[0]}-0" if rest else "0-0", kept, [f"{number}-0" for number in gone]]

    def xack(self, name: str, groupname: str, *ids: str) -> int:
        group = self._groups.get((name, groupname))
        return 0 if group is None else sum(group.pending.pop(_number(each), 0) is None for each in ids)

    def _group(self, name: str, groupname: str) -> _Group:
        if name not in self._streams or (name, groupname) not in self._groups:
            raise ResponseError(f"NOGROUP No such key '{name}' or consumer group '{groupname}' in XREADGROUP")
        return self._groups[name, groupname]

    def _entry(self, name: str, number: int) -> Entry:
        return f"{number}-0", self._streams[name][number]


class _Group:
    def __init__(self, delivered: int) -> None:
        self.delivered = delivered
        self.pending: dict[int, None] = {}


def _number(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])


def _refuse_nothing(*values: Any) -> None:
    """Refuse what redis-py does not send.

    Raises:
        DataError: A value is None.
    """
    if None in values:
        raise DataError("Invalid input of type: 'NoneType'. Convert to a bytes, string, int or float first.")


LOST = RedisConnectionError("Connection closed by server.")


class Client:
    """A connection to a store, in the place of ``redis.asyncio.Redis``."""

    def __init__(self, simulation: Simulation, store: Store, *, fails: bool = True) -> None:
        """Take whether commands may fail at all."""
        self._simulation, self._store = simulation, store
        self._failures = (LOST,) if fails else ()

    def pipeline(self, transaction: bool = True) -> _Pipeline:
        """Return commands that are sent together; each is carried out, as there is nobody else within a step."""
        return _Pipeline(self)

    async def xreadgroup(
        self, groupname: str, consumername: str, streams: Mapping[str, str], count: int | None, block: int
    ) -> Any:
        """Return new entries; wait for ``block`` milliseconds while there are none."""
        return await self._until_found(lambda: self._store.xreadgroup(groupname, consumername, streams, count), block)

    async def xread(self, streams: Mapping[str, str], count: int | None = None, block: int = 0) -> Any:
        """Return entries after those named; wait for ``block`` milliseconds while there are none."""
        return await self._until_found(lambda: self._store.xread(streams, count), block)

    async def _until_found(self, read: Callable[[], Any], block: int) -> Any:
        for _ in range(10):
            if found := await self.do(read):
                return found
            await asyncio.sleep(block / 10_000)
        return []

    def __getattr__(self, command: str) -> Callable[..., Any]:
        if command.startswith("_"):
            raise AttributeError(command)
        return lambda *arguments, **options: self.do(lambda: getattr(self._store, command)(*arguments, **options))

    async def do(self, work: Callable[[], Any]) -> Any:
        """Have the store do something, across the network."""
        return await self._simulation.boundary(work, *self._failures)

    async def aclose(self) -> None:
        """Close it."""


class _Pipeline:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._commands: list[tuple[str, Sequence[Any], Mapping[str, Any]]] = []

    async def __aenter__(self) -> _Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def __getattr__(self, command: str) -> Callable[..., _Pipeline]:
        def add(*arguments: Any, **options: Any) -> _Pipeline:
            self._commands.append((command, arguments, options))
            return self

        return add

    async def execute(self) -> list[Any]:
        """Carry out what was collected."""
        commands, self._commands = self._commands, []
        store = self._client._store
        return await self._client.do(
            lambda: [getattr(store, name)(*arguments, **options) for name, arguments, options in commands]
        )
