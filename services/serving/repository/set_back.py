"""Times in the future: written while the database's clock was ahead, before it was set back.

Until the clock has caught up, a plan with such a time would count as the newest, an instance as failing or draining.
Ids from that time still sort last: queries for the newest of these rows order them by their times first.

The present is ``clock_timestamp()``: to a transaction, ``now()`` is its beginning, and others commit rows after that.
"""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_WORK = ("submitted_at", "enqueued_at", "started_at", "ended_at")
_OBJECT = ("created_at", "updated_at", "deleted_at")
PAST = {
    "pools": (*_OBJECT, "planned_at"),
    "pool_plans": (*_WORK, "decided_at"),
    "pool_instances": ("created_at", "ready_at", "silent_since", "draining_at", "stopping_at", "ended_at"),
    "fleets": _OBJECT,
    "fleet_plans": ("made_at", "ended_at"),
    "apps": _OBJECT,
}
"""Columns that only ever say what has been."""
PRESENT = "clock_timestamp()"
EVERY_S = 5.0  #: How often to look for such times
AGO_S = 60.0  #: How long ago they are said to be then: what has been written since the clock was set back is newer
SINCE = {
    "pool_plans": "SELECT created_at FROM pools WHERE name = pool_plans.pool",
    "pool_instances": """
SELECT max(created_at) FROM (SELECT name, created_at FROM pools
                             UNION ALL SELECT 'app:' || name, created_at FROM apps) AS owners
 WHERE name = pool_instances.pool""",
}
"""When what owns a row was made: with an earlier time the row would be one of an earlier owner of that name."""


def _rectify(table: str, columns: tuple[str, ...]) -> str:
    since = f"({SINCE[table]})" if table in SINCE else "NULL"
    ago = f"greatest(now() - interval '{AGO_S} s', {since})"
    values = ", ".join(f"{each} = CASE WHEN {each} > {PRESENT} THEN {ago} ELSE {each} END" for each in columns)
    return f"UPDATE {table} SET {values} WHERE greatest({', '.join(columns)}) > {PRESENT}"


_STATEMENTS = (
    # What a fleet waits for was reckoned when its plan failed.
    text(f"""
UPDATE fleets f SET retry_at = NULL
 WHERE retry_at > now() AND EXISTS (SELECT FROM fleet_plans WHERE fleet = f.name AND ended_at > {PRESENT})
"""),
    *(text(_rectify(table, PAST[table])) for table in sorted(PAST, key=SINCE.__contains__)),  # owners first
)


async def set_right(connection: AsyncConnection) -> int:
    """Move times in the future to a moment ago; return the number of rows changed."""
    return sum([(await connection.execute(statement)).rowcount for statement in _STATEMENTS])
