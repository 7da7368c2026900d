"""A day of the temperatures of GPUs, taken from what heartbeats report."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from services.contracts.nodes import GpuTrend, NodeTrend
from services.db.database import Database

STEP_S = 600
KEPT_S = 86_400

_NOTE = f"""
INSERT INTO gpu_temperatures (at, node_id, celsius)
SELECT date_bin('{STEP_S} s', now(), 'epoch'), n.id,
       jsonb_object_agg(r ->> 'index', round((r ->> 'temperature_c')::numeric))
  FROM nodes n, jsonb_array_elements(n.readings) r
 WHERE n.state = 'up' AND n.lease_until > now() AND r ->> 'temperature_c' IS NOT NULL
 GROUP BY n.id ORDER BY n.id
ON CONFLICT DO NOTHING
"""

_FORGET = f"DELETE FROM gpu_temperatures WHERE at <= now() - interval '{KEPT_S} s'"

_READ = f"""
SELECT node_id, at, celsius, date_bin('{STEP_S} s', now(), 'epoch') AS newest FROM gpu_temperatures
 WHERE at > now() - interval '{KEPT_S} s' AND node_id = ANY($1::text[])
"""


async def note(database: Database) -> None:
    """Record the temperatures of this step, unless that is done, and forget those of a day ago."""
    async with database.transaction() as connection:
        await connection.execute(_NOTE)
        await connection.execute(_FORGET)


async def trends(database: Database, node_ids: Sequence[str]) -> dict[str, NodeTrend]:
    """Return the recorded temperatures of nodes, in steps of ``STEP_S`` up to now; none of those without any."""
    async with database.connection() as connection:
        rows = await connection.fetch(_READ, list(node_ids))
    known: defaultdict[str, dict[datetime, dict[str, int]]] = defaultdict(dict)
    for row in rows:
        known[row["node_id"]][row["at"]] = row["celsius"]
    step = timedelta(seconds=STEP_S)
    newest = rows[0]["newest"] if rows else datetime.now(UTC)
    found: dict[str, NodeTrend] = {}
    for node_id, at in known.items():
        start = min(at)
        times = [start + number * step for number in range((newest - start) // step + 1)]
        gpus = sorted({int(gpu) for celsius in at.values() for gpu in celsius})
        found[node_id] = NodeTrend(
            start_at=start,
            step_s=STEP_S,
            gpus=[GpuTrend(gpu=gpu, temperature_c=[at.get(time, {}).get(str(gpu)) for time in times]) for gpu in gpus],
        )
    return found
