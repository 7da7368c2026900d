"""Queries on applications, and on what routers saw of their requests."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import RowMapping, delete, select, text
from sqlalchemy.dialects.postgresql import insert as upsert

from services.contracts.apps import AppInstance, AppObservation, AppObservations, AppSpec
from services.contracts.serving import InstanceState
from services.db.tables import app_observations, apps, pool_instances
from services.kit.readable import Unread, each_readable
from services.serving.instances import APP_PREFIX
from services.serving.repository.fleets import variant_and_slice
from services.serving.repository.specs import SpecRows, record_of

INSTANCES = text("""
SELECT DISTINCT ON (i.id) i.id, i.mode, i.state, i.url, i.job_id, i.reason, i.detail, i.created_at, i.ready_at,
       i.draining_at, i.ended_at, c.node_id, c.gpu
  FROM pool_instances i LEFT JOIN held_devices c ON c.job_id = i.job_id
 WHERE i.pool = :key AND i.created_at >= :since AND i.state = ANY(CAST(:states AS text[]))
   AND (CAST(:before AS text) IS NULL OR i.id < :before)
 ORDER BY i.id DESC LIMIT :limit
""")

_SEEN = """
SELECT {of}, sum(arrivals) AS arrivals, sum(answered) AS answered, sum(failed) AS failed,
       sum(accuracy_sum) AS accuracy_sum, min(start_at) AS start_at,
       max(start_at) + interval '5 seconds' AS end_at
  FROM app_observations
 WHERE app = ANY(CAST(:apps AS text[])) AND start_at >= :since
   AND start_at < coalesce(CAST(:until AS timestamptz), 'infinity') GROUP BY 1
"""
_COUNTED = """
SELECT {of}, key, sum(count::int) AS count FROM app_observations, jsonb_each_text({what}) AS of(key, count)
 WHERE app = ANY(CAST(:apps AS text[])) AND start_at >= :since
   AND start_at < coalesce(CAST(:until AS timestamptz), 'infinity') GROUP BY 1, 2
"""
SEEN, SEEN_LATENCY = text(_SEEN.format(of="app")), text(_COUNTED.format(of="app", what="latency"))
ARRIVALS = text("""
SELECT app, (extract(epoch FROM start_at) / 5)::int, sum(arrivals)::int FROM app_observations
 WHERE app = ANY(CAST(:apps AS text[])) AND start_at >= :since GROUP BY 1, 2
""")
WAITING = text("""
SELECT DISTINCT ON (app, router) app, waiting FROM app_observations
 WHERE app = ANY(CAST(:apps AS text[])) AND start_at < :until AND start_at >= :until - interval '15 seconds'
 ORDER BY app, router, start_at DESC
""")
ENERGY = text("""
SELECT i.pool, i.job_id, max(l.end_at) AS end_at,
       coalesce(sum(l.gpu_energy_j * extract(epoch FROM least(l.end_at, :until) - greatest(l.start_at, :since))
                    / nullif(extract(epoch FROM l.end_at - l.start_at), 0)), 0) AS energy_j
  FROM pool_instances i
  LEFT JOIN energy_lines l ON l.job_id = i.job_id AND l.end_at > :since AND l.start_at < :until
       AND l.start_at > :since - interval '1 hour'
 WHERE i.pool = ANY(CAST(:keys AS text[])) AND i.state = 'ready' GROUP BY 1, 2
""")
"""Lines of the ledger count by their part within the time. None is longer than ten minutes while an agent runs; the
hour before lets the index leave out the rest of an instance's life."""

_STEP = "floor(extract(epoch FROM {at} - :since) / :step_s)::int AS step"
_OF_STEP = _STEP.format(at="start_at")
STEPS, STEPS_LATENCY, STEPS_VARIANTS = (
    text(_SEEN.format(of=_OF_STEP)),
    *(text(_COUNTED.format(of=_OF_STEP, what=what)) for what in ("latency", "variants")),
)
STEPS_ENERGY = text(f"""
SELECT {_STEP.format(at="l.start_at")},
       sum(l.energy_j) AS energy_j, sum(l.carbon_gco2) AS carbon_gco2, sum(l.host_energy_j) AS host_j,
       sum(greatest(0, date_part('epoch', l.end_at - l.start_at)) * substring(i.mode FROM '([0-9]+)g$')::int / 7)
         AS gpu_s,
       sum(l.intensity_gco2_per_kwh * extract(epoch FROM l.end_at - l.start_at))
         / nullif(sum(extract(epoch FROM l.end_at - l.start_at)), 0) AS gco2_per_kwh,
       max(l.pue) AS pue
  FROM energy_lines l JOIN pool_instances i ON i.job_id = l.job_id
 WHERE i.pool = :key AND i.created_at >= :made_at
   AND l.start_at >= :since AND l.start_at < :until
 GROUP BY 1
""")


@dataclass(frozen=True)
class AppRecord:
    """A row of ``apps``."""

    name: str
    tenant_id: str
    fleet: str
    spec: AppSpec
    revision: int
    planned_revision: int
    plan_id: str | None
    target: dict[str, Any]
    deleted_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def key(self) -> str:
        """Its name in ``pool_instances``."""
        return APP_PREFIX + self.name


REPORTED_WITHIN_S = 12.0  #: After the end of a window of 5 seconds; the next window's report is due then, too
LEAST_SPAN_S = 10.0


@dataclass(frozen=True)
class Seen:
    """Requests that routers saw in a period."""

    arrivals: int
    answered: int
    failed: int
    accuracy_sum: float  #: Sum of the accuracies of the answers
    latency: Mapping[int, int]  #: Numbers of answers by the index of their bucket of ``LATENCY_BOUNDS_MS``
    start_at: datetime | None = None  #: Start of the first window; None without any
    end_at: datetime | None = None  #: End of the last window that was reported

    def rate_per_s(self, now: datetime) -> float:
        """Return the mean arrival rate over the time reported; if there was no report for some time, nothing came."""
        if self.start_at is None or self.end_at is None:
            return 0.0
        end_at = max(self.end_at, now - timedelta(seconds=REPORTED_WITHIN_S))
        return self.arrivals / max((end_at - self.start_at).total_seconds(), LEAST_SPAN_S)


@dataclass
class StepSeen:
    """One step of a report."""

    answered: int = 0
    failed: int = 0
    accuracy_sum: float = 0.0
    energy_j: float = 0.0
    carbon_gco2: float = 0.0
    host_j: float = 0.0  #: The part of the energy that is not the GPUs'
    gpu_s: float = 0.0  #: GPU seconds that its instances held, a slice as its share of a GPU
    gco2_per_kwh: float | None = None
    pue: float = 1.0
    latency: dict[int, int] = field(default_factory=dict[int, int])  #: As in ``Seen``
    variants: dict[str, int] = field(default_factory=dict[str, int])  #: Answers by variant


class AppRows(SpecRows[AppRecord]):
    """Queries on applications."""

    table, what = apps, "app"

    def _record(self, row: RowMapping) -> AppRecord:
        return record_of(AppRecord, row, spec=AppSpec.as_stored(row["spec"]))

    async def of_fleet(self, fleet: str) -> list[AppRecord]:
        """Return the applications of a fleet by name, including those that are being deleted."""
        return await self._read(select(apps).where(apps.c.fleet == fleet).order_by(apps.c.name))

    async def routed(self) -> list[AppRecord]:
        """Return the applications that can be read and are not being deleted, by name."""
        return [app for app in await self.all() if app.deleted_at is None]

    async def remove(self, name: str) -> None:
        """Remove an application and what was seen of its requests."""
        await self._connection.execute(delete(app_observations).where(app_observations.c.app == name))
        await super().remove(name)

    async def instances(
        self, app: AppRecord, *, states: Sequence[InstanceState], before: str | None, limit: int
    ) -> list[AppInstance | Unread]:
        values = {"key": app.key, "since": app.created_at, "states": [state.value for state in states]}
        values |= {"before": before, "limit": limit}

        def read(row: RowMapping) -> AppInstance:
            variant, size = variant_and_slice(row["mode"])
            shown = {name: value for name, value in row.items() if name != "mode"}
            return AppInstance.model_validate({**shown, "variant": variant, "slice": size})

        return each_readable(await self._rows(INSTANCES, values), read, "instance")

    # What routers saw

    async def modes_of(self, ids: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the application and the variant of instances, by id."""
        c = pool_instances.c
        query = select(c.id, c.pool, c.mode).where(c.id.in_(ids), c.pool.like(f"{APP_PREFIX}%"))
        return {
            each: (key.removeprefix(APP_PREFIX), variant_and_slice(mode)[0])
            for each, key, mode in await self._connection.execute(query)
        }

    async def observe(
        self, report: AppObservations, found: Sequence[tuple[AppObservation, Mapping[str, int], float]]
    ) -> None:
        """Write what a router saw in a window, replacing its earlier reports of it.

        Args:
            found: Applications, each with its answers by variant and the sum of their accuracies.
        """
        rows = [
            each.model_dump(mode="json", include={"app", "arrivals", "failed", "waiting", "servers"})
            | {"start_at": report.start_at, "router": report.router, "accuracy_sum": accuracy_sum}
            | {"answered": sum(variants.values()), "variants": variants}
            | {"latency": {str(bucket): count for bucket, count in enumerate(each.latency) if count}}
            for each, variants, accuracy_sum in found
        ]
        statement, keys = upsert(app_observations), ["app", "start_at", "router"]
        replaced = {c.name: statement.excluded[c.name] for c in app_observations.c if c.name not in keys}
        await self._connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=replaced), rows)

    async def seen(self, names: Collection[str], since: datetime, until: datetime | None = None) -> dict[str, Seen]:
        """Return what routers saw of applications' requests since a moment, until another one if given."""
        values = {"apps": list(names), "since": since, "until": until}
        latency: dict[str, dict[int, int]] = {name: {} for name in names}
        for app, bucket, count in await self._connection.execute(SEEN_LATENCY, values):
            latency[app][int(bucket)] = count
        found = {name: Seen(0, 0, 0, 0.0, {}) for name in names}
        for row in await self._connection.execute(SEEN, values):
            found[row.app] = Seen(
                row.arrivals, row.answered, row.failed, row.accuracy_sum, latency[row.app], row.start_at, row.end_at
            )
        return found

    async def arrivals(self, names: Collection[str], since: datetime) -> dict[str, dict[int, int]]:
        """Return how many requests came in each window of 5 s since a moment, by the windows' number since 1970."""
        found: dict[str, dict[int, int]] = {name: {} for name in names}
        for app, window, count in await self._connection.execute(ARRIVALS, {"apps": list(names), "since": since}):
            found[app][window] = count
        return found

    async def waiting(self, names: Collection[str], until: datetime) -> dict[str, int]:
        """Return how many requests waited in applications' queues at a moment, as routers last reported."""
        found = dict.fromkeys(names, 0)
        for app, waiting in await self._connection.execute(WAITING, {"apps": list(names), "until": until}):
            found[app] += waiting
        return found

    async def energy(
        self, names: Collection[str], since: datetime, until: datetime
    ) -> tuple[dict[str, float], datetime | None]:
        """Return the GPU energy that applications' present instances used in a period, in J, by the ledger.

        Also return up to which moment it has lines of all of them; None if one has none.
        """
        values = {"keys": [APP_PREFIX + name for name in names], "since": since, "until": until}
        found = dict.fromkeys(names, 0.0)
        ends: list[datetime | None] = []
        for row in await self._connection.execute(ENERGY, values):
            found[row.pool.removeprefix(APP_PREFIX)] += row.energy_j
            ends.append(row.end_at)
        known = [each for each in ends if each is not None]
        return found, min(known) if known and len(known) == len(ends) else None

    async def steps(self, app: AppRecord, start_at: datetime, end_at: datetime, step_s: float) -> dict[int, StepSeen]:
        values: dict[str, Any] = {"since": start_at, "until": end_at, "step_s": step_s, "apps": [app.name]}
        steps: dict[int, StepSeen] = defaultdict(StepSeen)
        for row in await self._connection.execute(STEPS, values):
            steps[row.step] = StepSeen(row.answered, row.failed, row.accuracy_sum)
        for at, bucket, count in await self._connection.execute(STEPS_LATENCY, values):
            steps[at].latency[int(bucket)] = count
        for at, variant, count in await self._connection.execute(STEPS_VARIANTS, values):
            steps[at].variants[variant] = count
        for row in await self._connection.execute(STEPS_ENERGY, values | {"key": app.key, "made_at": app.created_at}):
            step = steps[row.step]
            step.energy_j, step.carbon_gco2 = row.energy_j, row.carbon_gco2
            step.host_j, step.gpu_s = row.host_j, row.gpu_s
            step.gco2_per_kwh = None if row.gco2_per_kwh is None else float(row.gco2_per_kwh)
            step.pue = row.pue or 1.0
        return steps
