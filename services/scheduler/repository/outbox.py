"""Commands on their way to nodes: committed with what they belong to, deleted once Redis has them."""

from collections.abc import Sequence
from typing import NamedTuple

from services.db.database import Connection
from services.db.rows import fetch_rows
from services.scheduler.repository.documents import Json

PUT = "INSERT INTO outbox (stream, payload) SELECT * FROM unnest($1::text[], $2::jsonb[])"

TRACEPARENT = "traceparent"
"""Where a payload keeps the trace of its command. Agents do not find it there: those of an earlier release would refuse
a command with a field that they do not know."""

NEXT = f"""
SELECT id, stream, payload - '{TRACEPARENT}' AS payload, payload ->> '{TRACEPARENT}' AS traceparent
  FROM outbox ORDER BY id LIMIT $1
"""

UNSENT_GANGS = "SELECT DISTINCT payload ->> 'allocation_id' FROM outbox"


class Outgoing(NamedTuple):
    """A command, the Redis stream to put it on, and the span that it is a child of, if there is one."""

    stream: str
    payload: Json
    traceparent: str | None = None

    @property
    def kept(self) -> Json:
        """The payload as it is stored in the outbox."""
        return self.payload if self.traceparent is None else {**self.payload, TRACEPARENT: self.traceparent}


class OutboxRow(NamedTuple):
    """A command waiting to be published."""

    id: int
    stream: str
    payload: Json
    traceparent: str | None


async def put(connection: Connection, commands: Sequence[Outgoing]) -> None:
    """Put commands into the outbox; they go out if this transaction commits."""
    if commands:
        await connection.execute(PUT, [each.stream for each in commands], [each.kept for each in commands])


async def oldest(connection: Connection, limit: int) -> list[OutboxRow]:
    """Return the commands to be published next, in order."""
    return await fetch_rows(connection, OutboxRow, NEXT, limit)


async def delete(connection: Connection, ids: Sequence[int]) -> None:
    """Delete commands that Redis now has."""
    await connection.execute("DELETE FROM outbox WHERE id = ANY($1::bigint[])", list(ids))


async def unsent_gangs(connection: Connection) -> set[str]:
    """Return the allocations with a command that Redis does not have yet."""
    return {record[0] for record in await connection.fetch(UNSENT_GANGS)}
