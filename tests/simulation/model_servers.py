"""Serving in the system: its composition root as it is, with stand-ins for model servers, routers and workers.

Workers claim plans as real ones do, and answer with any number of instances. What a router knows comes from serving's
own table; the requests that it sends stay at a server for a while.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from services.admission.steering import Command
from services.contracts.background import WorkFailure, WorkFailureCode, WorkRecord, WorkState
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, Role
from services.contracts.jobs import SubmissionAnswers
from services.contracts.pools import PlannedInstances, PoolsResult
from services.contracts.routing import HeldRequests
from services.contracts.serving import (
    InstanceQuery,
    InstanceState,
    PlanForecasts,
    PlanOutcome,
    PoolPlanQuery,
    PoolPlanResult,
    PoolSpec,
)
from services.core.domain.errors import TransitionError
from services.core.domain.solving import SolveStatus
from services.db.engine import create_engine
from services.kit.ids import new_id
from services.kit.problems import ProblemError, unavailable
from services.serving import app
from services.serving.repository.plans import PlanRepository, plan_repository
from services.serving.settings import ServingSettings
from tests.simulation import postgres
from tests.support.pools import a_partition, a_pool

if TYPE_CHECKING:
    from tests.simulation.system import World

POOL = "chat"
MODEL, PLACE, MODE, CLASS = "A100-SXM4-40GB", "here", "one", "any"
ROUTER = "router"
CLAIM_S = 4.0
DRAIN_S = 10.0
"""An instance that drains for longer is stopped, whatever it holds."""
TENANT = "servers"
OPERATOR = Identity(tenant_id=TENANT, role=Role.OPERATOR, key_id="operator")


@functools.cache
def _settings(secret: str) -> ServingSettings:
    return cast(Any, ServingSettings)(
        WATTSHIFT_SERVICE_TOKEN=secret,
        DATABASE_URL=postgres.URL,
        lease_s=CLAIM_S,
        sweep_s=2,
        plan_settle_s=1,
        plan_event_gap_s=6,
        plan_retry_s=2,
        plan_look_s=1,
        instance_probe_s=2,
    )


@functools.cache
def _spec(version: int, most: int) -> PoolSpec:
    mode = {"name": MODE, "gpu_model": MODEL, "gpus": 1, "command": ["serve"], "environment": {"VERSION": str(version)}}
    return PoolSpec.model_validate(
        a_pool(
            places=[{"name": PLACE, "zone": "US-CAL-CISO", "gpus": {MODEL: most}}],
            modes=[mode],
            partitions=[a_partition(thresholds=None)],
            probes={
                "ready_timeout_s": 20,
                "unhealthy_timeout_s": 4,
                "drain_min_s": 2,
                "drain_timeout_s": DRAIN_S,
                "grace_s": 1,
            },
            models=["model"],
        )
    )


class _Client:
    """HTTP to another service, in the place of what ``client_of`` returns."""

    def __init__(self, world: World, _: Any, settings: Any, name: str, *, timeout_s: float = 10.0) -> None:
        self._world, self._name, self._timeout_s = world, name, timeout_s

    async def call(self, method: str, path: str, answer: Any, *, body: Any = None, **_: Any) -> Any:
        """Submit jobs; what is no part of the system does not answer."""
        if path != "/internal/submissions":
            raise unavailable(self._name)
        entries = [each.model_copy() for each in body.entries]
        found = await self._world.ask("admission", lambda it: it.submissions.submit(entries), self._timeout_s)
        return SubmissionAnswers(answers=found)

    async def request(self, method: str, path: str, *, identity: Identity) -> None:
        """Cancel a job."""
        job = path.split("/")[3]
        self._world.to_be_cancelled.add(job)
        try:
            await self._world.ask("admission", lambda it: it.jobs.steer(identity, job, Command.CANCEL), self._timeout_s)
        except TransitionError as error:
            raise ProblemError(409, ProblemCode.INVALID_TRANSITION, str(error)) from error


class _Prober:
    """Questions to model servers, which answer while their processes run, mostly."""

    def __init__(self, world: World, _: Any, **__: Any) -> None:
        self._world = world

    async def answers(self, url: str) -> bool:
        """Whether a server answers."""
        simulation = self._world.simulation
        await asyncio.sleep(0.01 * simulation.choices.below(8, often=0.2))
        fails = not simulation.is_calm and simulation.choices.below(8, often=0.5) == 1
        return not fails and self._world.server_at(url) is not None

    async def held(self, url: str, _: Any) -> float | None:
        """Return how many requests a server holds."""
        if not await self.answers(url) or (server := self._world.server_at(url)) is None:
            return None
        return len(self._world.requests.get(server, ()))


class _Idle:
    """What serving does besides, and nothing here asks for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    async def run(self) -> None:
        """Do nothing until cancelled."""
        await asyncio.Event().wait()


class _Service:
    """An app without routes."""

    def __init__(self, *_: Any, lifespan: Any, **__: Any) -> None:
        self.lifespan = lifespan
        self.state: Any = SimpleNamespace(metrics=None)

    def include_router(self, _: Any) -> None:
        """There is no HTTP."""


@contextmanager
def stand_ins(world: World) -> Iterator[None]:
    """Have serving begin with stand-ins for what is beyond it."""
    instead = {
        "create_service": _Service,
        "answer_unavailable": lambda *_, **__: None,
        "show_figures": lambda *_: None,
        "new_session": lambda *_, **__: nullcontext(),
        "new_probe_session": nullcontext,
        "client_of": functools.partial(_Client, world),
        "Prober": functools.partial(_Prober, world),
        "PlanWorkers": _Idle,
        "FleetPlanner": _Idle,
        "BatchWorker": _Idle,
    }
    with ExitStack() as stack:
        for name, stand_in in instead.items():
            stack.enter_context(patch.object(app, name, stand_in))
        yield


async def begin(world: World, secret: str) -> Any:
    """Begin serving; return what its routes would ask."""
    made = cast(Any, app.create_app(_settings(secret)))
    running = made.lifespan(made)
    world.simulation.at_end(lambda: running)  # kept: as garbage it would end what a process that is killed leaves
    await running.__aenter__()
    return made.state


async def begin_worker(world: World) -> PlanRepository:
    """Begin a worker that makes plans."""
    store = plan_repository(create_engine(postgres.URL, pool_size=1, application_name="serving-planner"))
    world.simulation.loop.create_task(_work(world, store))
    return store


async def _work(world: World, store: PlanRepository) -> None:
    while True:
        try:
            for waiting in (await store.queued(0))[:1]:
                await _make_plan(world, store, waiting)
        except Exception:  # the database is away
            await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)


async def _make_plan(world: World, store: PlanRepository, plan_id: str) -> None:
    draw, claim = world.simulation.choices.below, new_id("claim")
    work = await store.claim(plan_id, claim, CLAIM_S)
    if work is None:
        return
    for _ in range(draw(4)):
        await asyncio.sleep(0.5 + draw(2, often=0.1) * CLAIM_S)  # it may stand still for longer than its lease
        if not await store.renew(plan_id, claim, CLAIM_S):
            return
    if draw(8) == 1:
        failure = WorkFailure(code=WorkFailureCode.UNAVAILABLE, detail="The optimizer does not answer.")
        await store.fail(plan_id, claim, failure, plan_s=1.0)
    else:
        await store.succeed(
            plan_id, claim, _answer(work, (2, 1, 3, 1, 2, 0)[draw(6)], is_sure=draw(4) == 1), plan_s=1.0
        )


def _answer(work: WorkRecord, count: int, *, is_sure: bool) -> Any:
    most = work.problem["spec"]["places"][0]["gpus"][MODEL]
    planned = PlannedInstances(location=PLACE, request_class=CLASS, mode=MODE, count=min(count, most), power_w=300.0)
    plan = PoolsResult(status=SolveStatus.OPTIMAL, solver="greedy", partition="halves", instances=[planned])
    gpus = {PLACE: {MODEL: most}} if is_sure else {}
    forecasts = PlanForecasts(step_s=300.0, demand={}, intensity={}, gpus=gpus)
    return PoolPlanResult(forecasts=forecasts, plan=plan).model_dump(mode="json")


async def operate(world: World) -> None:
    """Have a pool planned, change it now and then, and delete it at the end."""
    draw = world.simulation.choices.below
    for version in range(1 + draw(2)):
        spec = _spec(version, 1 + draw(3))
        await insist(world, "serving", lambda it, s=spec: it.pools.put(POOL, s, OPERATOR))
        for _ in range(120):  # until a server runs
            await asyncio.sleep(0.5)
            if "ready" in world.instances.values():
                break
        await asyncio.sleep(0.5 * draw(8))
        if draw(2):
            await insist(world, "serving", lambda it: it.pools.plan_now(POOL, OPERATOR), 1)
            await asyncio.sleep(1.0 * draw(6))
    await insist(world, "serving", lambda it: it.pools.delete(POOL, OPERATOR))


async def insist(world: World, name: str, work: Callable[[Any], Awaitable[Any]], times: int = 60) -> Any:
    """Ask again while nobody answers; return the answer, or None if there is none or it is a refusal."""
    for _ in range(times):
        try:
            return await world.ask(name, cast(Any, work), 6.0)
        except ProblemError as error:
            if error.status < 500:
                return None
            await asyncio.sleep(1.0)
    return None


async def visit(world: World) -> None:
    """Send requests to servers by serving's table, and say what draining ones hold, as a router does."""
    draw = world.simulation.choices.below
    while True:
        await asyncio.sleep(1.0 + 0.5 * draw(3))
        try:
            table = await world.ask("serving", lambda it: it.routing.table(), 3.0)
        except ProblemError:
            continue
        held: dict[str, int] = {}
        for each in table.servers:
            server = world.server_at(each.url)
            if server is None:
                continue
            if each.state == "ready" and draw(3) == 1:
                world.simulation.loop.create_task(_request(world, server))
            held[each.id] = len(world.requests.get(server, ()))
        if held:
            try:
                await world.ask("serving", lambda it, h=held: _hold(it, h), 3.0)
            except ProblemError:
                continue


async def read(world: World) -> None:
    """Read plans and instances page by page while they change: none twice, none out of order, and none left out."""
    draw = world.simulation.choices.below
    while True:
        await asyncio.sleep(2.0 + 1.0 * draw(6))
        match draw(4):
            case 0:
                await _read(world, "pool_instances", "serving", _instances)
            case 1:
                await _read(world, "pool_plans", "serving", _plans)
            case 2:
                outcomes = list(PlanOutcome)[: 1 + draw(3)]
                await _read(world, "pool_plans", "serving", functools.partial(_plans, outcome=outcomes), outcomes)
            case _:
                states = (list(WorkState), (), [WorkState.QUEUED, WorkState.RUNNING])[draw(3)]
                may_be = None if len(states) != 2 else states
                await _read(world, "pool_plans", "planner", functools.partial(_work_of, states), may_be)


POOLS = "SELECT name FROM pools"
"""Of a pool that is removed meanwhile, nothing needs to be shown."""

Page = tuple[Sequence[Any], str | None]
"""Rows, and where the next page begins."""


async def _instances(serving: Any, cursor: str | None, limit: int) -> Page:
    query = InstanceQuery(cursor=cursor, limit=limit, state=list(InstanceState))
    found = await serving.pools.instances(POOL, query, OPERATOR)
    return found.items, found.next_cursor


async def _plans(serving: Any, cursor: str | None, limit: int, outcome: Sequence[PlanOutcome] = ()) -> Page:
    found = await serving.pools.plans(POOL, PoolPlanQuery(cursor=cursor, limit=limit, outcome=[*outcome]), OPERATOR)
    return found.items, found.next_cursor


async def _work_of(states: Sequence[WorkState], store: Any, cursor: str | None, limit: int) -> Page:
    found = await store.page(None, states, cursor, limit)
    return found, found[-1].id if len(found) == limit else None


async def _read(
    world: World, table: str, name: str, ask: Callable[..., Any], only: Sequence[Any] | None = None
) -> None:
    """Read all pages of a table; with ``only`` rows in one of these states, or of these outcomes, are asked for."""
    check, limit = world.simulation.check, 1 + world.simulation.choices.below(3)
    there = {row[0] for row in world.database.rows(f"SELECT id FROM {table}")}
    seen: list[Any] = []
    cursor: str | None = None
    while True:
        page = await insist(world, name, lambda it, at=cursor: ask(it, at, limit), 20)
        if page is None:
            return
        rows, cursor = page
        check("no page has more than was asked for", len(rows) <= limit, f"{len(rows)} of {limit}")
        seen += rows
        if cursor is None:
            break
    ids = [each.id for each in seen]
    check(
        "a reader of pages sees each row once, newest first", ids == sorted(set(ids), reverse=True), f"{table}: {ids}"
    )
    if only is None:
        still = world.database.rows(f"SELECT id FROM {table} WHERE pool IN ({POOLS})")
        lost = there.intersection(row[0] for row in still).difference(ids)
        check("a reader of pages sees what was there all the time", not lost, f"{table}: {lost}, not of {ids}")
    else:
        other = [each.id for each in seen if not {each.state, getattr(each, "outcome", None)} & {*only}]
        check("a reader of pages sees what was asked for", not other, f"{table}: {other}, not {only}")


async def _hold(serving: Any, held: dict[str, int]) -> None:
    serving.routing.hold(HeldRequests(router=ROUTER, held=held))


async def _request(world: World, server: str) -> None:
    """Stay at a server for a while."""
    began_s = world.simulation.loop.time()
    here = world.requests.setdefault(server, [])
    here.append(began_s)
    await asyncio.sleep(0.5 * (1 + world.simulation.choices.below(12)))
    here.remove(began_s)
