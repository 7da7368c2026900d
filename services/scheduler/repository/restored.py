"""Statements that make a restored database fit to be scheduled."""

from services.db import nodes
from services.db.database import Connection
from services.scheduler.repository import gangs

LIVE_NODES = """
SELECT id FROM known_nodes WHERE state = 'up'
UNION SELECT node_id FROM device_claims
UNION SELECT share ->> 'node_id' FROM allocations, jsonb_array_elements(shares) share WHERE state <> 'ended'
"""

# A number is added once: after that, the newest gang is older than the job's number by more than one.
RENUMBER = """
UPDATE jobs j SET generation = generation + $1
 WHERE j.state NOT IN ('succeeded', 'failed', 'cancelled')
   AND j.generation < $1 + coalesce((SELECT max(a.generation) FROM allocations a WHERE a.job_id = j.id), 0)
"""


async def lose_everything(connection: Connection) -> int:
    """Give up every node and its shares of gangs; return how many gangs were live."""
    live = await connection.fetchval("SELECT count(*) FROM allocations WHERE state <> 'ended'")
    of_gangs = [record[0] for record in await connection.fetch(LIVE_NODES)]
    known = await nodes.lock(connection)
    await gangs.lose_nodes(connection, sorted({*of_gangs, *known}), "stopped")
    return live


async def forget_commands(connection: Connection) -> None:
    """Delete commands that had not been published."""
    await connection.execute("DELETE FROM outbox")


async def renumber(connection: Connection, by: int) -> None:
    """Raise the numbers of the gangs that unfinished jobs will get."""
    await connection.execute(RENUMBER, by)
