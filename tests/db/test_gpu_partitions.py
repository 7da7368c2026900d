"""What is wanted of GPUs: who may change it, and that asking again changes nothing."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.db.database import Connection, connect
from services.db.gpu_partitions import release, want


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[Connection]:
    connection = await connect(database_url, application_name="test")
    try:
        await connection.execute("TRUNCATE gpu_partitions")
        yield connection
    finally:
        await connection.close()


async def row(connection: Connection) -> tuple[Any, ...]:
    found = await connection.fetchrow("SELECT revision, sizes, owner, state, applied_at IS NULL FROM gpu_partitions")
    assert found is not None
    return tuple(found)


async def report(connection: Connection, state: str) -> None:
    await connection.execute("UPDATE gpu_partitions SET state = $1, applied_at = now()", state)


async def test_what_is_wanted_already_changes_nothing_unless_it_failed(connection: Connection) -> None:
    assert await want(connection, "n", 0, [2, 2, 3], None)
    await report(connection, "applied")
    assert await want(connection, "n", 0, [2, 2, 3], None)
    assert await row(connection) == (1, [2, 2, 3], None, "applied", False)

    await report(connection, "failed")
    assert await want(connection, "n", 0, [2, 2, 3], None)
    assert await row(connection) == (2, [2, 2, 3], None, "pending", True)


async def test_a_fleet_takes_whole_gpus_alone_and_gives_them_back_whole(connection: Connection) -> None:
    assert await want(connection, "n", 0, [3, 3], None)
    assert not await want(connection, "n", 0, [7], "vision"), "an operator cut it"
    assert await want(connection, "n", 0, [], None)
    assert await want(connection, "n", 0, [7], "vision")
    assert not await want(connection, "n", 0, [], None), "an operator does not take it from the fleet"
    assert not await want(connection, "n", 0, [7], "speech")
    assert not await release(connection, "n", 0, "speech")
    assert await row(connection) == (3, [7], "vision", "pending", True)

    assert await release(connection, "n", 0, "vision")
    assert await row(connection) == (4, [], None, "pending", True)
