"""Queries on the clocks of instances, which telemetry records."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.clocks import ClockPolicy
from services.contracts.nodes import ClockMinute
from services.contracts.serving import InstanceClock, InstanceClockMinute
from services.serving.repository.pools import PoolRecord

NOW = text("""
SELECT a.job_id, a.shares -> 0 -> 'devices' AS devices, n.readings,
       m.policy, m.dry_run, m.exceeded::float8 / m.decisions AS exceeded_share,
       m.unobserved::float8 / m.decisions AS unobserved_share, m.model_error, m.unused
  FROM live_gangs a
  JOIN known_nodes n ON n.id = a.leader AND n.state = 'up'
  LEFT JOIN LATERAL (
       SELECT * FROM server_clocks c WHERE c.job_id = a.job_id ORDER BY c.start_at DESC LIMIT 1) m ON true
 WHERE a.job_id = ANY(CAST(:jobs AS text[])) AND a.state = 'running'
""")
HISTORY = text("""
SELECT i.id AS instance, c.*
  FROM pool_instances i JOIN server_clocks c ON c.job_id = i.job_id
 WHERE i.pool = :pool AND i.created_at >= :made_at
   AND (CAST(:instance AS text) IS NULL OR i.id = :instance)
   AND (CAST(:since AS timestamptz) IS NULL OR c.start_at >= :since)
   AND (CAST(:until AS timestamptz) IS NULL OR c.start_at < :until)
   AND (CAST(:before_at AS timestamptz) IS NULL OR (c.start_at, i.id) < (:before_at, CAST(:before_id AS text)))
 ORDER BY c.start_at DESC, i.id DESC LIMIT :limit
""")
"""Instances of an earlier pool of this name may have been another tenant's."""

_MINUTE = {*ClockMinute.model_fields, "instance", "job_id"}


class ClockRows:
    """Queries on clocks."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def now(self, jobs: Collection[str]) -> dict[str, InstanceClock]:
        rows = (await self._connection.execute(NOW, {"jobs": list(jobs)})).mappings()
        return {row["job_id"]: _clock(row) for row in rows}

    async def history(
        self,
        pool: PoolRecord,
        *,
        instance: str | None,
        since: datetime | None,
        until: datetime | None,
        before: tuple[datetime, str] | None,
        limit: int,
    ) -> list[InstanceClockMinute]:
        """Return minutes of clocks, newest first: those before a minute and instance, if given."""
        before_at, before_id = before or (None, None)
        terms = {
            "pool": pool.name,
            "made_at": pool.created_at,
            "instance": instance,
            "since": since,
            "until": until,
            "before_at": before_at,
            "before_id": before_id,
            "limit": limit,
        }
        rows = (await self._connection.execute(HISTORY, terms)).mappings()
        return [InstanceClockMinute.model_validate({name: row[name] for name in _MINUTE}) for row in rows]


def _clock(row: RowMapping) -> InstanceClock:
    devices = set(row["devices"])
    readings = [each for each in row["readings"] if each["index"] in devices]
    measured = [each["clock_mhz"] for each in readings if each["clock_mhz"] is not None]
    wanted = next((each["latency_clock_mhz"] for each in readings if each.get("latency_clock_mhz") is not None), None)
    known = {"clock_mhz": min(measured, default=None), "wanted_mhz": wanted}
    if wanted is None or row["policy"] is None:  # what the newest minute says is over, or has not arrived
        return InstanceClock.model_validate({**known, "policy": ClockPolicy.DEFAULT})
    names = ("policy", "dry_run", "exceeded_share", "unobserved_share", "model_error", "unused")
    return InstanceClock.model_validate({**known, **{name: row[name] for name in names}})
