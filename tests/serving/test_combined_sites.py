"""Pools, fleets and jobs that share nodes, in any combination: serving's own planners and controller beside the real
scheduler on one database, and a hand in place of admission, agents, model servers and the optimizer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from services.contracts.background import WorkState
from services.contracts.pools import PoolsProblem, PoolsRequest
from services.contracts.serving import InstanceState, PlaceIntensity, PoolPlanResult, PoolSpec
from services.core.domain.signal import Signal
from services.kit.background.work_queue import Sweeper
from services.kit.problems import ProblemError
from services.serving import worker
from services.serving.controller.advance import Seen
from services.serving.controller.controller import Controller
from services.serving.controller.probes import KeyCheck, Prober
from services.serving.controller.server_jobs import ServerJobs, job_document
from services.serving.instances import Instance
from services.serving.planning.planner import EventWatch, Planner
from services.serving.planning.plans import Plans
from services.serving.repository.plans import PlanRepository, plan_repository
from services.serving.settings import ServingSettings
from services.serving.solver import NotSolvedError
from services.solving.pools import solve_pools
from tests.scheduler.world import World, a_world
from tests.serving.fleets import ACME, MODEL, OPERATOR, ZONE, FleetWorld, a_fleet, a_fleet_world
from tests.serving.pools import LIMITS, SERVED, add_pool, revise
from tests.serving.test_combined_fleets import an_application
from tests.support.servers import fresh_database

PROBES = {"drain_min_s": 0, "load_path": None, "grace_s": 1}
TURN_S = 6.0  #: Longer than what the controller waits before it takes a job as one that waits for GPUs
TURNS = 160
QUIET = 8  #: Turns without a change, after which an hour passes

CANCEL = (
    "UPDATE jobs SET cancel_requested = true, state = CASE state WHEN 'queued' THEN 'cancelled' ELSE state END "
    "WHERE id = $1"
)


class Admission(ServerJobs):
    """Takes every job and cancels it."""

    def __init__(self, site: World) -> None:
        self.site = site

    async def submit(self, instances: Sequence[Instance]) -> dict[str, Seen]:
        for each in instances:
            await self.site.fetch(
                "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at) "
                "VALUES ($1, 'acme', 'server', 'default', '{}', $2, 'queued', now()) ON CONFLICT DO NOTHING",
                *(f"job_{each.id}", orjson.loads(job_document(each))),
            )
        return {each.id: Seen(InstanceState.WANTED, job_id=f"job_{each.id}") for each in instances}

    async def cancel(self, instance: Instance) -> None:
        await self.site.fetch(CANCEL, instance.job_id)


class Servers(Prober):
    """Answer as soon as they run."""

    def __init__(self) -> None: ...

    async def answers(self, url: str) -> bool:
        return True

    async def key_check(self, url: str, key: str) -> KeyCheck:
        return KeyCheck.UNCHECKED


@dataclass
class Hand:
    """A worker that plans on this loop."""

    loop: asyncio.AbstractEventLoop
    progress: dict[str, Any] = field(default_factory=dict[str, Any])

    def ask(self, question: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(question(), self.loop).result()

    def save(self, **_: Any) -> bool:
        return True


class Maker(worker.PlanMaker):
    """Makes plans of pools; the optimizer is a function, or fails."""

    away: str | None = None

    async def _solve(self, plan_id: str, request: PoolsRequest, within_s: float) -> Any:
        if self.away == "time":
            raise NotSolvedError
        if self.away == "error":
            raise ProblemError(503, "unavailable", "The solver is away.")  # type: ignore[arg-type]
        result = solve_pools(PoolsProblem.model_validate(request.model_dump()))
        return SimpleNamespace(failure=None, state=WorkState.SUCCEEDED, result=result, id=plan_id)


class SiteWorld(FleetWorld):
    """A site whose controller and scheduler are the real ones."""

    site: World
    pools: Planner
    maker: Maker
    store: PlanRepository
    control: Controller
    sweeper: Sweeper

    def start(self, site: World) -> None:
        self.site, self.store = site, plan_repository(self.engine)
        self.restart()

    def restart(self) -> None:
        """Have all of serving start anew, as after a kill."""
        away = getattr(self, "maker", None) and self.maker.away
        self.maker = Maker(self.engine, self.settings)
        self.maker.away = away
        plans = Plans(self.repository, self.store, self.settings)
        self.pools = Planner(plans, EventWatch(self.repository, self.grid, self.settings), 1)
        self.control = Controller(self.repository, Admission(self.site), Servers(), self.settings)
        self.sweeper = Sweeper("plan", self.store, None, self.settings)
        self.planner = self.another()

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            await self.pools.look()
            for plan in await self.store.queued(0):
                await self._make(plan)
            await self.pools.look()
            await self.sweeper.sweep()
            await super().turn()
            await self.passes(TURN_S)

    async def _make(self, plan_id: str) -> None:
        work = await self.store.claim(plan_id, "hand", 60)
        assert work is not None
        hand = Hand(asyncio.get_running_loop())
        answer = await asyncio.to_thread(self.maker.answer, work, cast(Any, hand))
        await self.maker.turn.end()
        if isinstance(answer, worker.WorkFailure):
            await self.store.fail(plan_id, "hand", answer)
        else:
            await self.store.succeed(plan_id, "hand", answer)

    async def _controller(self) -> None:
        await self.control.look()

    async def _scheduler(self) -> None:
        await self.site.scheduler.turn()
        rows = await self.site.fetch(
            "SELECT a.id, a.state, a.shares, j.state AS job FROM allocations a JOIN jobs j ON j.id = a.job_id "
            "WHERE a.state <> 'ended' ORDER BY a.id"
        )
        for row in rows:
            if row["state"] in ("starting", "running", "pending"):
                await self.site.report(row["id"], "running")
            else:
                await self.site.report(row["id"], "exited", exit_code=0, ended_by="stop")
        await self.site.scheduler.turn()

    async def passes(self, seconds: float) -> None:
        """Have all that happened have happened so much earlier."""
        for table, columns in SHIFTED.items():
            moved = ", ".join(f"{each} = {each} - make_interval(secs => $1)" for each in columns)
            await self.database.execute(f"UPDATE {table} SET {moved}", seconds)
        made_at = "problem = jsonb_set(problem, '{made_at}', to_jsonb(p.created_at))"
        await self.database.execute(f"UPDATE pool_plans SET {made_at} FROM pools p WHERE p.name = pool")
        for row in await self.database.fetch("SELECT id, progress FROM fleet_plans WHERE state = 'carrying_out'"):
            begun = {name: at_s for name in ("since_s", "cut_since_s") if (at_s := row["progress"][name]) is not None}
            progress = row["progress"] | {name: at_s - seconds for name, at_s in begun.items()}
            await self.database.execute("UPDATE fleet_plans SET progress = $2 WHERE id = $1", row["id"], progress)


SHIFTED = {
    "pools": ("created_at", "updated_at", "planned_at"),
    "pool_plans": ("from_at", "deadline_at", "submitted_at", "started_at", "ended_at", "decided_at"),
    "pool_instances": ("created_at", "ready_at", "silent_since", "draining_at", "stopping_at", "ended_at"),
    "fleets": ("retry_at", "created_at", "updated_at"),
    "fleet_plans": ("made_at", "ended_at"),
    "apps": ("created_at", "updated_at"),
    "jobs": ("queued_at", "submitted_at"),
    "allocations": ("running_at",),
}


def a_pool(draw: random.Random, number: int) -> PoolSpec:
    modes = [
        {"name": f"m{size}", "gpu_model": MODEL, "gpus": size, "command": ["serve"]}
        for size in draw.choice(((1,), (2,), (1, 2), (1, 3)))
    ]
    profiles = [
        {"mode": each["name"], "max_qps": each["gpus"], "power_w": 250.0 * each["gpus"], **SERVED} for each in modes
    ]
    one = {"name": "all", **LIMITS, "profiles": profiles}
    qps = draw.choice((0.0, 0.7, 1.7, 3.2, 6.0))
    return PoolSpec.model_validate(
        {
            "places": [{"name": "here", "zone": ZONE}],
            "modes": modes,
            "partitions": [{"name": "one", "classes": [one], "assumed_qps": {"all": qps}}],
            "objective": draw.choice(("carbon", "energy")),
            "models": [f"model-{number}"],
            "head_room": 1.0,
            "probes": PROBES,
        }
    )


@asynccontextmanager
async def a_site_world(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SiteWorld]:
    changes = {
        "plan_interval_s": 604_800,
        "plan_lead_s": 0,
        "plan_retry_s": 10,
        "plan_settle_s": 0,
        "instance_probe_s": 1e-6,
    }
    async with (
        a_fleet_world(database_url, world=SiteWorld, **changes) as made,
        a_world(database_url, redis_url) as site,
    ):
        world = cast(SiteWorld, made)

        async def intensities(_: ServingSettings, spec: PoolSpec, *__: float) -> dict[str, PlaceIntensity]:
            source = {"provider": "p", "method": "m", "generated_at": "2026-01-01T00:00:00Z", "is_stale": False}
            gco2 = [world.grid.gco2_per_kwh[ZONE]] * 6
            return {
                place.name: PlaceIntensity.model_validate(
                    {**source, "zone": ZONE, "signal": Signal.AVERAGE_DIRECT, "gco2_per_kwh": gco2}
                )
                for place in spec.places
            }

        monkeypatch.setattr(worker, "place_intensities", intensities)
        world.start(site)
        yield world


KINDS = (
    *("grid", "pool", "pool", "pool", "app", "app", "fleet", "node", "node", "job", "job", "job_ends", "unpool"),
    *("unapp", "unfleet", "away", "away", "search", "refuse", "kill", "order"),
)


class Site:
    """Who is on some nodes, and what becomes of them."""

    def __init__(self, world: SiteWorld, seed: int) -> None:
        self.world, self.draw = world, random.Random(seed)
        self.gpus: dict[str, int] = {"n0": 4}
        self.lost, self.done = set[str](), list[object]()
        self.pools: dict[str, PoolSpec] = {}
        self.fleets: dict[str, int] = {}
        self.apps: dict[str, str] = {}
        self.jobs = list[str]()
        self.ordered = False
        self.numbers = 0
        self.known = set[tuple[str, int, str]]()

    async def begin(self) -> None:
        draw = self.draw
        for name in [f"n{at}" for at in range(1, draw.randint(1, 3))]:
            self.gpus[name] = draw.randint(1, 3)
            await self.world.node(name, self.gpus[name])
        for kind in (*draw.sample(("pool", "fleet"), 2), *draw.choices(("pool", "fleet", "app", "app", "job"), k=5)):
            await self.do(kind)
            if draw.random() < 0.3:
                for _ in range(draw.randint(1, 4)):
                    await self.turn()

    async def change(self) -> None:
        await self.do(self.draw.choice(KINDS))
        if self.draw.random() < 0.3:
            await self.do(self.draw.choice(KINDS))

    async def do(self, kind: str) -> None:
        """Change one thing."""
        draw, world, database = self.draw, self.world, self.world.database
        self.done.append(kind)
        match kind:
            case "grid":
                world.grid.gco2_per_kwh[ZONE] = draw.choice((30, 120, 300, 600))
            case "pool":
                name = draw.choice(("chat", "code"))
                spec = a_pool(draw, 0 if name == "chat" else 1)
                if name in self.pools:
                    await revise(database, name, spec)
                elif not await database.fetchval("SELECT count(*) FROM pools WHERE name = $1", name):
                    await add_pool(database, name, spec)
                else:
                    return
                self.pools[name] = spec
            case "unpool" if self.pools:
                gone = draw.choice(sorted(self.pools))
                del self.pools[gone]
                await database.execute("UPDATE pools SET deleted_at = now() WHERE name = $1", gone)
            case "fleet":
                name = draw.choice(("core", "edge", "edge"))
                if name in self.fleets or not await database.fetchval(
                    "SELECT count(*) FROM fleets WHERE name = $1", name
                ):
                    least = max(1, sum(fleet == name for fleet in self.apps.values()))
                    self.fleets[name] = draw.randint(least, max(least, 3))
                    await world.fleets.put(name, a_fleet(gpus=self.fleets[name]), OPERATOR)
            case "unfleet" if self.fleets:
                name = draw.choice(sorted(self.fleets))
                if not await database.fetchval("SELECT count(*) FROM apps WHERE fleet = $1", name):
                    del self.fleets[name]
                    await world.fleets.delete(name, OPERATOR)
            case "app" if self.fleets:
                await self.app(draw.choice(sorted(self.fleets)))
            case "unapp" if self.apps:
                gone = draw.choice(sorted(self.apps))
                del self.apps[gone]
                await world.apps.delete(gone, ACME)
            case "node" if len(self.gpus) > 1:
                node = draw.choice(sorted(self.gpus)[1:])
                self.lost ^= {node}
                await world.lose(node, back=node not in self.lost)
            case "job":
                count = draw.choice((1, 1, 2))
                self.jobs.append(await world.site.job(count, preemptible=draw.random() < 0.4))
            case "job_ends" if self.jobs:
                job = self.jobs.pop(draw.randrange(len(self.jobs)))
                await world.site.fetch(CANCEL, job)
            case "away":
                world.maker.away = None if world.maker.away else draw.choice(("time", "error"))
            case "search":
                world.fails = None if world.fails else "The solver is away."
            case "refuse":
                world.refusing = set() if world.refusing else {draw.randrange(4)}
            case "kill":
                world.restart()
            case "order":
                self.ordered = not self.ordered
                await database.execute("DELETE FROM grid_orders")
                if self.ordered:
                    await world.order(ZONE)
            case _:
                pass

    async def app(self, fleet: str) -> None:
        mine = [name for name, of in self.apps.items() if of == fleet]
        room = self.fleets[fleet] - await self.world.database.fetchval(
            "SELECT count(*) FROM apps WHERE fleet = $1", fleet
        )
        if mine and (room < 1 or self.draw.random() < 0.5):
            name = self.draw.choice(mine)
        elif room >= 1:
            self.numbers += 1
            name = f"{fleet}-{self.numbers}"
        else:
            return
        spec = an_application(self.draw, fleet)
        await self.world.apps.put(name, spec.model_copy(update={"probes": spec.probes.model_copy(update=PROBES)}), ACME)
        self.apps[name] = fleet

    # The account

    async def claims(self) -> list[Any]:
        return await self.world.database.fetch(
            "SELECT c.node_id, coalesce(c.parent, c.device) AS gpu, c.parent, c.allocation_id, j.id AS job, "
            "j.spec #>> '{service,fleet}' AS fleet, j.spec ->> 'preemptible' = 'true' AS preemptible, i.pool, "
            "p.owner, n.state AS node FROM device_claims c JOIN allocations a ON a.id = c.allocation_id "
            "JOIN jobs j ON j.id = a.job_id LEFT JOIN pool_instances i ON i.job_id = j.id AND i.state <> 'ended' "
            "LEFT JOIN gpu_partitions p ON p.node_id = c.node_id AND p.gpu = coalesce(c.parent, c.device) "
            "LEFT JOIN nodes n ON n.id = c.node_id ORDER BY 1, 2"
        )

    async def turn(self) -> None:
        await self.world.turn()
        await self.check()

    async def check(self) -> None:
        """What holds at any moment."""
        cuts, holders, seen = await self.world.cuts(), dict[tuple[str, int], set[str]](), set[tuple[str, int, str]]()
        for row in await self.claims():
            at = row["node_id"], row["gpu"]
            holders.setdefault(at, set()).add(row["allocation_id"] if row["parent"] is None else "slices")
            assert (row["parent"] is None) <= (not cuts.get(at)), ("a whole GPU and its slices", row)
            key = (*at, row["allocation_id"])
            seen.add(key)
            if key not in self.known:
                assert row["owner"] == row["fleet"], ("placed on what is another's", row)
        assert all(len(each) == 1 for each in holders.values()), ("two holders", holders)
        self.known = seen

    async def state(self) -> object:
        database = self.world.database
        return [
            [tuple(row) for row in await database.fetch(query)]
            for query in (
                "SELECT node_id, device, allocation_id FROM device_claims ORDER BY 1, 2",
                "SELECT id, state FROM pool_instances WHERE state <> 'ended' ORDER BY 1",
                "SELECT node_id, gpu, owner, sizes::text, state FROM gpu_partitions ORDER BY 1, 2",
                "SELECT name, plan_id FROM pools ORDER BY 1",
                "SELECT id, state FROM fleet_plans WHERE state <> 'failed' ORDER BY 1",
                "SELECT name FROM apps ORDER BY 1",
            )
        ]

    async def rest(self) -> None:
        """Take turns, with time for whatever waits, until nothing changes."""
        quiet, hours, before = 0, 0, None
        for _ in range(TURNS):
            await self.turn()
            now = await self.state()
            quiet, before = quiet + 1 if now == before else 0, now
            if quiet >= QUIET:
                if hours == 3:
                    return
                hours, quiet = hours + 1, 0
                await self.world.passes(3_700)
        raise AssertionError(("it does not come to rest", before))

    async def check_rest(self) -> None:
        """What everybody is owed once nothing changes."""
        world, database = self.world, self.world.database
        claims = await self.claims()
        held = {(row["node_id"], row["gpu"]) for row in claims}
        owned = {
            (row["node_id"], row["gpu"]): row
            for row in await database.fetch("SELECT * FROM gpu_partitions WHERE owner IS NOT NULL")
        }
        there = {(node, gpu) for node, count in self.gpus.items() if node not in self.lost for gpu in range(count)}
        broken = {
            (row["node_id"], row["gpu"])
            for row in await database.fetch("SELECT node_id, gpu FROM gpu_partitions WHERE state <> 'applied'")
        }
        free = there - held - owned.keys() - broken
        for row in claims:
            if row["pool"] is None and row["fleet"] is None:
                assert row["job"] in self.jobs, ("what ended is not given back", row)
            elif row["pool"].startswith("app:"):
                assert (row["pool"][4:] in self.apps, row["owner"]) == (True, row["fleet"]), ("of nobody", row)
            else:
                assert row["pool"] in self.pools, ("of nobody", row)
        assert {row["owner"] for row in owned.values()} <= self.fleets.keys(), "what ended is not given back"
        for name in self.fleets:
            shown = await world.fleets.find(name, OPERATOR)
            assert not (shown.missing_gpus and free), ("a fleet lacks GPUs beside free ones", shown, free)
        for name in self.pools:
            await self.check_pool(name, free)

    async def check_pool(self, name: str, free: set[tuple[str, int]]) -> None:
        database = self.world.database
        row = await database.fetchrow("SELECT * FROM pools WHERE name = $1", name)
        plan = await database.fetchrow("SELECT * FROM pool_plans WHERE id = $1", row["plan_id"])
        if plan is None or plan["revision"] != row["revision"]:
            made = [dict(each) for each in await self.plans(name)]  # once one is late, the next is by the clock
            assert made[-1]["failure"]["code"] in ("unavailable", "time_limit"), ("not planned", name, made)
            return
        made = PoolPlanResult.as_stored(plan["result"])
        wanted, has = Counter[str](), Counter[str]()
        for each in made.plan.instances:
            wanted[each.mode] += each.count
        for each in await database.fetch(
            "SELECT mode, state FROM pool_instances WHERE pool = $1 AND state <> 'ended'", name
        ):
            assert each["state"] == "ready", ("an instance waits for ever", name, dict(each), made.plan)
            has[each["mode"]] += 1
        assert has == wanted, ("what is planned is not carried out", name, has, made.plan)
        short = sum(each.qps for each in made.plan.shortfall)
        spec = self.pools[name]
        size = {mode.name: mode.gpus for mode in spec.modes}
        asked = sum((spec.partitions[0].assumed_qps or {}).values())
        assert sum(size[mode] * count for mode, count in has.items()) + short >= asked - 1e-6, (
            "a shortage is not said",
            name,
        )
        if short > 1e-6 and not self.world.maker.away and not self.ordered:
            room = Counter(node for node, _ in free)
            assert max(room.values(), default=0) < min(size.values()), ("short beside free GPUs", name, free, made.plan)

    async def plans(self, name: str) -> list[Any]:
        return await self.world.database.fetch(
            "SELECT id, trigger, state, outcome, failure FROM pool_plans WHERE pool = $1 ORDER BY id", name
        )


@pytest.mark.parametrize(
    ("seeds", "changes"),
    [((3,), 1), pytest.param(range(200), 3, marks=[pytest.mark.slow, pytest.mark.timeout(7_200)])],
    ids=["few", "many"],
)
async def test_pools_and_fleets_that_share_nodes_come_to_rest(
    seeds: range, changes: int, postgres_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fresh_database(postgres_url)
    for seed in seeds:
        async with a_site_world(url, redis_url, monkeypatch) as world:
            site = Site(world, seed)
            try:
                await site.begin()
                for _ in range(changes):
                    await site.rest()
                    await site.check_rest()
                    await site.change()
                await site.rest()
                await site.check_rest()
            except BaseException as error:
                error.add_note(f"site {seed}, {site.gpus}, {site.done}, {await world.plans()}")
                raise
