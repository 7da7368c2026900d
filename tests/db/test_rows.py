"""Rows of queries as typed records."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from services.db.database import Connection, connect
from services.db.rows import RowShapeError, columns_of, fetch_row, fetch_rows
from tests.support.servers import fresh_database


class Pair(NamedTuple):
    """Two columns, one of them null at times."""

    number: int
    name: str | None


@pytest.fixture
async def connection(postgres_url: str):
    made = await connect(fresh_database(postgres_url), application_name="test")
    yield made
    await made.close()


async def test_records_become_rows(connection: Connection) -> None:
    query = "SELECT number, nullif(name, $1) AS name FROM (VALUES (1, 'a'), (2, 'b')) v (number, name) ORDER BY number"

    rows = await fetch_rows(connection, Pair, query, "b")

    assert rows == [Pair(1, "a"), Pair(2, None)]
    assert isinstance(rows[0], Pair)
    assert await fetch_row(connection, Pair, query, "") == Pair(1, "a")


async def test_no_record_is_no_row(connection: Connection) -> None:
    query = "SELECT 1 AS number, '' AS name WHERE false"

    assert await fetch_rows(connection, Pair, query) == []
    assert await fetch_row(connection, Pair, query) is None


@pytest.mark.parametrize(
    "columns",
    ["'a' AS name, 1 AS number", "1 AS number", "1 AS number, 'a' AS title", "1 AS number, 'a' AS name, 2 AS x"],
)
async def test_a_query_of_other_columns_than_its_row_is_refused(connection: Connection, columns: str) -> None:
    with pytest.raises(RowShapeError, match="Pair has the fields"):
        await fetch_rows(connection, Pair, f"SELECT {columns}")
    with pytest.raises(RowShapeError, match="Pair has the fields"):
        await fetch_row(connection, Pair, f"SELECT {columns}")


def test_rows_become_columns() -> None:
    assert columns_of(Pair, [Pair(1, "a"), Pair(2, None)]) == {"number": (1, 2), "name": ("a", None)}
    assert columns_of(Pair, []) == {"number": (), "name": ()}
