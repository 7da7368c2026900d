"""The stand-in for Valkey answers as Valkey does."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from redis.exceptions import DataError, ResponseError

from services.kit.redis import connect
from tests.simulation.valkey import Store

ENTRY_ID = re.compile(r"\d+-\d+")
STREAM, GROUP, HASH = "simulated-stream", "group", "simulated-hash"


async def conversation(server: Any) -> list[Any]:
    """Return what a server answers to the commands that Wattshift uses; ids of entries are replaced by their order."""
    answers: list[Any] = []
    ids: dict[str, str] = {}

    async def ask(command: str, *arguments: Any, **options: Any) -> Any:
        try:
            answer = getattr(server, command)(*arguments, **options)
            answer = await answer if inspect.isawaitable(answer) else answer
        except (DataError, ResponseError) as error:
            answer = str(error).partition(" ")[0]
        answers.append((command, named(answer)))
        return answer

    def named(answer: Any) -> Any:
        if isinstance(answer, list | tuple):
            return [named(each) for each in answer]
        if isinstance(answer, str) and ENTRY_ID.fullmatch(answer) and answer != "0-0":
            return ids.setdefault(answer, f"entry {len(ids)}")
        return answer

    await ask("hset", HASH, "a", "1")
    await ask("hset", HASH, "a", "2")
    await ask("hset", HASH, "b", "3")
    await ask("hgetall", HASH)
    await ask("hdel", HASH, "a", "c")
    await ask("hdel", HASH)
    await ask("hset", HASH, "d", None)
    await ask("xadd", STREAM, {"n": None})
    await ask("hgetall", HASH)
    await ask("xgroup_create", STREAM, GROUP, id="0")
    await ask("xgroup_create", STREAM, GROUP, id="0", mkstream=True)
    await ask("xgroup_create", STREAM, GROUP, id="0", mkstream=True)
    await ask("xreadgroup", GROUP, "me", {STREAM: ">"}, count=10)
    entries = [await ask("xadd", STREAM, {"n": str(number)}) for number in range(5)]
    await ask("xread", {STREAM: "0-0"}, count=3)
    await ask("xread", {STREAM: entries[3], "no-such-stream": "0-0"})
    await ask("xread", {STREAM: entries[4]})
    await ask("xreadgroup", GROUP, "me", {STREAM: ">"}, count=2)
    await ask("xreadgroup", GROUP, "me", {STREAM: ">"}, count=10)
    await ask("xreadgroup", GROUP, "me", {STREAM: ">"}, count=10)
    await ask("xack", STREAM, GROUP, entries[1], "7-7")
    await ask("xack", STREAM, GROUP, entries[1])
    await ask("xdel", STREAM, entries[1], entries[2])
    await ask("xlen", STREAM)
    await ask("xautoclaim", STREAM, GROUP, "other", min_idle_time=0, start_id="0-0", count=2)
    await ask("xautoclaim", STREAM, GROUP, "other", min_idle_time=0, start_id="0-0", count=10)
    await ask("xadd", STREAM, {"n": "5"}, maxlen=2, approximate=False)
    await ask("xlen", STREAM)
    await ask("xreadgroup", "nobody", "me", {STREAM: ">"}, count=10)
    return answers


async def test_the_stand_in_answers_as_valkey_does(redis_url: str) -> None:
    real = connect(redis_url)
    try:
        await real.delete(STREAM, HASH)
        expected = await conversation(real)
    finally:
        await real.delete(STREAM, HASH)
        await real.aclose()
    assert await conversation(Store()) == expected


def test_a_wiped_store_knows_no_group() -> None:
    store = Store()
    store.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    store.wipe()
    with pytest.raises(ResponseError, match="NOGROUP"):
        store.xreadgroup(GROUP, "me", {STREAM: ">"})
