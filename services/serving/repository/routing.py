"""Queries for the routers' table, and on registered endpoints."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping, select, text

from services.contracts.routing import Endpoint
from services.db.tables import model_endpoints, secrets
from services.serving.repository.specs import Rows, SpecRows

POOLS = text("""
SELECT q.name, q.tenant_id, q.spec::text AS spec, p.result #>> '{plan,partition}' AS partition,
       (SELECT count(*) FROM pool_instances i
         WHERE i.pool = q.name AND i.state IN ('wanted', 'starting')) AS starting
  FROM pools q LEFT JOIN pool_plans p ON p.id = q.plan_id
 WHERE q.deleted_at IS NULL AND jsonb_array_length(coalesce(q.spec -> 'models', '[]')) > 0
 ORDER BY q.name
""")

SERVERS = text("""
SELECT i.id, i.pool, i.tenant_id, i.place, i.mode, i.partition, i.request_class, i.state, i.url, i.job_id,
       i.terms::text AS terms, CASE WHEN i.sealed_key IS NOT NULL THEN i.created_at END AS key_set_at,
       a.leader AS node_id, n.zone,
       u.power_w, u.pue, u.intensity_gco2_per_kwh, u.intensity_estimated
  FROM pool_instances i
  LEFT JOIN live_gangs a ON a.job_id = i.job_id AND a.state = 'running'
  LEFT JOIN known_nodes n ON n.id = a.leader
  LEFT JOIN LATERAL (
       SELECT sum(l.energy_j) / nullif(sum(extract(epoch FROM l.end_at - l.start_at)), 0)::float8 AS power_w,
              (array_agg(l.pue ORDER BY l.start_at DESC))[1] AS pue,
              (array_agg(l.intensity_gco2_per_kwh ORDER BY l.start_at DESC))[1] AS intensity_gco2_per_kwh,
              (array_agg(l.intensity_estimated ORDER BY l.start_at DESC))[1] AS intensity_estimated
         FROM energy_lines l
        WHERE l.job_id = i.job_id AND l.start_at > now() - make_interval(secs => :recent_s)) u ON true
 WHERE i.state IN ('ready', 'draining') AND i.url IS NOT NULL
 ORDER BY i.id
""")
"""Power is the mean over the newest lines of the ledger, the GPUs' and the share of the host."""

TAKEN = text("""
SELECT name, model FROM pools, jsonb_array_elements_text(coalesce(spec -> 'models', '[]')) AS model
 WHERE tenant_id = :tenant AND name <> :pool AND deleted_at IS NULL AND model = ANY(CAST(:models AS text[]))
 ORDER BY name LIMIT 1
""")
KEYS = text("""
SELECT e.name AS of, e.tenant_id, s.name AS secret, s.updated_at AS set_at, s.sealed
  FROM model_endpoints e
  JOIN secrets s ON s.tenant_id = e.tenant_id AND s.project = '' AND s.name = e.spec ->> 'upstream_secret'
 ORDER BY e.name
""")
INSTANCE_KEYS = text("""
SELECT id AS of, tenant_id, NULL AS secret, created_at AS set_at, sealed_key AS sealed FROM pool_instances
 WHERE state IN ('ready', 'draining') AND sealed_key IS NOT NULL ORDER BY id
""")
LOCK_MODELS = text("SELECT pg_advisory_xact_lock(hashtextextended('models of ' || :tenant, 0))")


@dataclass(frozen=True)
class PoolRow:
    """A pool that serves models; ``starting`` counts its instances that are wanted or starting."""

    name: str
    tenant_id: str
    spec: str
    partition: str | None
    starting: int


@dataclass(frozen=True)
class ServerRow:
    """An instance that serves or drains; ``power_w`` and later fields are unknown before its first ledger line."""

    id: str
    pool: str
    tenant_id: str
    place: str
    mode: str
    partition: str | None
    request_class: str | None
    state: str
    url: str
    job_id: str | None
    terms: str
    key_set_at: datetime | None
    node_id: str | None
    zone: str | None
    power_w: float | None
    pue: float | None
    intensity_gco2_per_kwh: float | None
    intensity_estimated: bool | None


@dataclass(frozen=True)
class KeyRow:
    """The API key of an endpoint or of an instance; ``secret``: its name among the tenant's; None for an instance's."""

    of: str
    tenant_id: str
    secret: str | None
    set_at: datetime
    sealed: bytes


class RoutingRows(Rows):
    """Queries for routers."""

    async def pools(self) -> list[PoolRow]:
        """Return the pools that serve models, by name."""
        return [PoolRow(**row) for row in await self._rows(POOLS)]

    async def servers(self, recent_s: float) -> list[ServerRow]:
        """Return the instances that serve or drain, with figures from the ledger's lines of the last seconds."""
        return [ServerRow(**row) for row in await self._rows(SERVERS, {"recent_s": recent_s})]

    async def keys(self) -> list[KeyRow]:
        """Return the secrets that endpoints have as their keys, as far as they exist."""
        return [KeyRow(**row) for row in await self._rows(KEYS)]

    async def instance_keys(self) -> list[KeyRow]:
        """Return the keys of the instances that routers may send requests to."""
        return [KeyRow(**row) for row in await self._rows(INSTANCE_KEYS)]

    async def has_secret(self, tenant_id: str, name: str) -> bool:
        """Return whether a tenant has this secret for all its projects."""
        place = (secrets.c.tenant_id == tenant_id, secrets.c.project == "", secrets.c.name == name)
        return (await self._connection.execute(select(secrets.c.version).where(*place))).one_or_none() is not None

    async def other_pool_of(self, pool: str, models: list[str], tenant_id: str) -> tuple[str, str] | None:
        """Return another pool of the tenant that serves one of these models, and that model.

        Until the transaction ends, no other transaction of the tenant can pass this check.
        """
        await self._connection.execute(LOCK_MODELS, {"tenant": tenant_id})
        row = await self._connection.execute(TAKEN, {"tenant": tenant_id, "pool": pool, "models": models})
        found = row.one_or_none()
        return None if found is None else (found.name, found.model)


class EndpointRows(SpecRows[Endpoint]):
    """Queries on registered endpoints."""

    table, what = model_endpoints, "endpoint"

    def _record(self, row: RowMapping) -> Endpoint:
        return Endpoint.as_stored({name: row[name] for name in Endpoint.model_fields})
