"""The planning of one pool: read what there is, foretell demand and intensity, solve.

The worker reads everything itself, at the moment it begins: what waited in the queue is not planned from old news.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.background import WorkFailure, WorkFailureCode
from services.contracts.carbon import IntensityForecast
from services.contracts.pools import PoolsProblem, PoolsResult, pools_result
from services.contracts.serving import (
    DemandForecast,
    PlaceIntensity,
    PlanForecasts,
    PoolPlace,
    PoolPlanResult,
    PoolSpec,
)
from services.core.domain.errors import DomainError
from services.core.policies.freesh.pool_planning import plan_pools
from services.core.profiles.traffic import STEP_S, STEPS_AHEAD
from services.core.solvers.model import SolveStatus
from services.db.database import connect
from services.db.engine import is_connection_error
from services.kit.background.worker import Worker
from services.kit.celery import leave_process
from services.kit.http import ServiceClient, new_session
from services.kit.logging import Log as Logger
from services.kit.problems import ProblemError
from services.serving.instances import InstanceTerms
from services.serving.planning.demand import Log, foretold, read_logs
from services.serving.planning.plans import plan_repository
from services.serving.planning.problem import (
    Need,
    Node,
    PlaceGpus,
    Running,
    check_signals,
    gpus_by_place,
    incumbent_of,
    intensity_of,
    problem_of,
    result_of,
    without_needs,
)
from services.serving.settings import ServingSettings

log = Logger(__name__)

SPARE_S = 2.0
"""Before the deadline, for what is done besides solving."""

NODES = """
SELECT n.id, n.zone, n.labels, n.devices
  FROM nodes n LEFT JOIN node_power p ON p.node_id = n.id
 WHERE n.state = 'up' AND NOT n.draining AND coalesce(p.state, 'on') <> 'failed'
   AND (n.lease_until > now() OR p.state IN ('off', 'waking'))
 ORDER BY n.id
"""

HELD = """
SELECT c.node_id, c.device
  FROM device_claims c JOIN allocations a ON a.id = c.allocation_id JOIN jobs j ON j.id = a.job_id
 WHERE NOT coalesce((j.spec ->> 'preemptible')::bool, true)
   AND NOT EXISTS (SELECT FROM pool_instances i WHERE i.job_id = j.id AND i.pool = $1 AND i.state <> 'ended')
"""
"""What neither this pool's instances hold nor jobs that may be preempted."""

AWAITED = """
SELECT i.terms
  FROM pool_instances i LEFT JOIN allocations a ON a.job_id = i.job_id AND a.state <> 'ended'
 WHERE i.pool <> $1 AND i.state IN ('wanted', 'starting') AND a.id IS NULL
 ORDER BY i.id
"""

PLANNED = """
SELECT q.name, q.spec, p.instances
  FROM pools q
  JOIN LATERAL (
       SELECT result #> '{plan,instances}' AS instances FROM pool_plans
        WHERE pool = q.name AND revision = q.revision AND state = 'succeeded'
          AND (id = q.plan_id OR outcome IS NULL AND q.spec ->> 'mode' = 'automatic')
        ORDER BY submitted_at DESC LIMIT 1) p ON true
 WHERE q.name <> $1 AND q.deleted_at IS NULL
 ORDER BY q.name
"""
"""What other pools are to have: as the plan in force says, or one that is about to be."""

MADE = """
SELECT pool, place, mode, count(*) AS count FROM pool_instances
 WHERE pool <> $1 AND state IN ('wanted', 'starting', 'ready') GROUP BY pool, place, mode
"""

INSTANCES = """
SELECT place, mode, terms, extract(epoch FROM now() - coalesce(ready_at, created_at))::float8 AS up_s
  FROM pool_instances WHERE pool = $1 AND state IN ('wanted', 'starting', 'ready') ORDER BY id
"""

IN_FORCE = """
SELECT p.result -> 'plan' FROM pools q JOIN pool_plans p ON p.id = q.plan_id WHERE q.name = $1
"""


@dataclass(frozen=True)
class Known:
    """What the database tells at one moment.

    Attributes:
        now_s: That moment, UTC seconds.
        logs: Of requests, by partition.
        nodes: Those that take work, with the GPUs that the pool may have.
        instances: The pool's own.
        in_force: The plan in force.
    """

    now_s: float
    logs: Mapping[str, Log]
    nodes: list[Node]
    instances: list[Running]
    in_force: PoolsResult | None


def plan_worker(
    engine: AsyncEngine, settings: ServingSettings, *, on_lost_claim: Callable[[], None] = leave_process
) -> Worker:
    """Return a worker that plans pools."""

    def answer(row: Any, worker: Worker) -> Any:
        began_s = time.monotonic()
        spec = PoolSpec.model_validate(row.problem["spec"])
        known = worker.ask(lambda: _read(settings.database_url, row.pool, spec))
        left_s = row.deadline_at.timestamp() - known.now_s - SPARE_S
        from_s = max(row.from_at.timestamp(), known.now_s)

        def is_late() -> bool:
            return time.monotonic() - began_s >= left_s

        try:
            intensity = worker.ask(lambda: _intensities(settings, spec, from_s, known.now_s))
        except ProblemError as error:
            return WorkFailure(code=WorkFailureCode.UNAVAILABLE, detail=error.detail)
        check_signals(spec, intensity)
        demand: dict[str, DemandForecast] = {}
        for part in spec.partitions:
            if is_late():
                return _too_late("The forecasts took until the deadline.")
            demand[part.name] = foretold(
                part,
                known.logs[part.name],
                from_s=from_s,
                now_s=known.now_s,
                head_room=spec.head_room,
                max_age_s=settings.traffic_max_age_s,
            )
        gpus = gpus_by_place(spec, known.nodes)
        limit_s = left_s - (time.monotonic() - began_s)
        if limit_s <= 0:
            return _too_late("The forecasts took until the deadline.")
        return _plan(spec, demand, intensity, gpus, known, limit_s)

    return Worker(
        "plan",
        plan_repository(engine),
        answer,
        lease_s=settings.lease_s,
        took="plan_s",
        is_away=is_connection_error,
        on_lost_claim=on_lost_claim,
    )


def _plan(
    spec: PoolSpec,
    demand: Mapping[str, DemandForecast],
    intensity: Mapping[str, PlaceIntensity],
    gpus: Mapping[str, PlaceGpus],
    known: Known,
    limit_s: float,
) -> Any:
    request = problem_of(spec, demand, intensity, gpus, known.instances, limit_s)
    problem = PoolsProblem.model_validate(request.model_dump())
    asked = problem.in_core()
    found = plan_pools(
        asked,
        problem.solver,
        time_limit_s=problem.time_limit_s,
        relative_gap=problem.gap,
        incumbent=incumbent_of(request, known.in_force),
    )
    plan = result_of(request, pools_result(problem, asked, found), intensity)
    if plan.status is SolveStatus.TIME_LIMIT:
        return _too_late(f"No plan was found in {request.time_limit_s:.0f} s of solving.")
    if plan.partition is None:
        raise DomainError(f"There is no plan: {plan.status}. {plan.note}".rstrip())
    forecasts = PlanForecasts(
        step_s=STEP_S,
        demand=dict(demand),
        intensity=dict(intensity),
        gpus={place: dict(has.models) for place, has in gpus.items()},
    )
    return PoolPlanResult(forecasts=forecasts, plan=plan).model_dump(mode="json")


def _too_late(detail: str) -> WorkFailure:
    return WorkFailure(code=WorkFailureCode.TIME_LIMIT, detail=detail)


async def _read(database_url: str, pool: str, spec: PoolSpec) -> Known:
    """Return what the database tells of a pool, in one consistent view."""
    connection: Any = await connect(database_url, application_name="planner-worker")
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            now_s: float = await connection.fetchval("SELECT extract(epoch FROM now())::float8")
            in_force = await connection.fetchval(IN_FORCE, pool)
            return Known(
                now_s=now_s,
                logs=await read_logs(connection, pool, spec.partitions, now_s),
                nodes=await _nodes(connection, pool),
                instances=[
                    Running(place, mode, InstanceTerms.model_validate(terms), up_s)
                    for place, mode, terms, up_s in await connection.fetch(INSTANCES, pool)
                ],
                in_force=None if in_force is None else PoolsResult.model_validate(in_force),
            )
    finally:
        await connection.close()


async def _nodes(connection: Any, pool: str) -> list[Node]:
    held = {(row["node_id"], row["device"]) for row in await connection.fetch(HELD, pool)}
    nodes = [
        Node(
            row["zone"],
            row["labels"],
            Counter(each["model"] for each in row["devices"] if (row["id"], each["index"]) not in held),
        )
        for row in await connection.fetch(NODES)
    ]
    return without_needs(nodes, [*await _awaited(connection, pool), *await _planned(connection, pool)])


async def _awaited(connection: Any, pool: str) -> list[Need]:
    """Return what other pools' instances wait for."""
    awaited = [InstanceTerms.model_validate(terms) for (terms,) in await connection.fetch(AWAITED, pool)]
    return [Need(of.place.zone, of.place.node_labels, of.mode.gpu_model, of.mode.gpus) for of in awaited]


async def _planned(connection: Any, pool: str) -> list[Need]:
    """Return what other pools' instances will need that are planned and not made yet.

    All pools are planned at the same moment of the clock: the next one must not count on what the last one was given.
    """
    made = Counter({tuple(row[:3]): row["count"] for row in await connection.fetch(MADE, pool)})
    needs: list[Need] = []
    for name, document, planned in await connection.fetch(PLANNED, pool):
        spec = PoolSpec.model_validate(document)
        places, modes = {each.name: each for each in spec.places}, {each.name: each for each in spec.modes}
        target = Counter[tuple[str, str]]()
        for each in planned:
            target[each["location"], each["mode"]] += each["count"]
        for (location, mode_name), count in target.items():
            place, mode = places[location], modes[mode_name]
            missing = count - made[name, location, mode_name]
            needs += [Need(place.zone, place.node_labels, mode.gpu_model, mode.gpus)] * missing
    return needs


async def _intensities(
    settings: ServingSettings, spec: PoolSpec, from_s: float, now_s: float
) -> dict[str, PlaceIntensity]:
    """Return the means over the six steps, by place.

    Lengths are everyone's seconds, as those of the requests are: a replay's clock runs faster, and its grid with it.

    Raises:
        ProblemError: The carbon service does not answer.
        DomainError: It does not know what is asked for.
    """
    async with new_session() as session:
        carbon = ServiceClient(
            session,
            settings.carbon_url,
            "The carbon service",
            token=settings.service_token,
            timeout_s=settings.carbon_timeout_s,
        )
        horizon_s = from_s - now_s + (STEPS_AHEAD + 1) * STEP_S

        async def ask(place: PoolPlace) -> PlaceIntensity:
            params: dict[str, str | float] = {"horizon_s": horizon_s, "clock": "real"}
            if place.signal is not None:
                params["signal"] = str(place.signal)
            try:
                path = f"/v1/carbon/{place.zone}/forecast"
                return intensity_of(await carbon.call("GET", path, IntensityForecast, params=params), from_s)
            except ProblemError as error:
                if error.status >= 500:
                    raise
                raise DomainError(f"Place {place.name}, zone {place.zone}: {error.detail}") from error

        found = await asyncio.gather(*(ask(place) for place in spec.places))
    return {place.name: each for place, each in zip(spec.places, found, strict=True)}
