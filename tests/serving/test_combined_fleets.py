"""Fleets that share nodes with jobs and pools, in any combination, changed and planned until nothing is due: by the
planner on a real database, beside a plain account of who has which GPU and of what its applications can be given."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from services.contracts.apps import AppSpec
from services.serving.repository.cluster import read_cluster
from tests.serving.fleets import ACME, OPERATOR, FleetWorld, a_fleet, a_fleet_world, an_app

ACTIVE = ("solving", "carrying_out", "measuring")
WAITS = "It waits until a GPU can be spared"
KINDS = (
    *("grid", "grid", "app", "app", "node", "node", "job", "delete", "search", "refuse", "kill", "size"),
    *("late", "order"),
)
TURNS = 150  #: Within which whatever changed has been planned for and carried out


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[FleetWorld]:
    async with a_fleet_world(database_url) as made:
        yield made


def an_application(draw: random.Random, fleet: str) -> AppSpec:
    """An application that asks for little, for much, or for what no GPU can give."""
    return an_app(
        fleet=fleet,
        requests_per_s=draw.choice((2, 8, 20, 45, 400)),
        sla_p95_ms=draw.choice((70, 150, 400, 1_000)),
        carbon_weight=draw.choice((0.0, 0.3, 0.9)),
        max_accuracy_loss_pct=draw.choice((None, 0, 3, 10)),
        min_interval_s=draw.choice((1, 60)),
        repartition=draw.choice(("within_sla", "within_sla", "any_time")),
    )


def is_easy(app: AppSpec) -> bool:
    """Whether one GPU that is cut into equal slices keeps the limits with room to spare, whatever others want."""
    best = app.most_accurate.accuracy_pct
    floor = 0.0 if app.max_accuracy_loss_pct is None else best * (1 - app.max_accuracy_loss_pct / 100)
    return any(
        variant.accuracy_pct >= floor
        and profile.service_ms <= app.sla_p95_ms / 3
        and app.requests_per_s * profile.service_ms / 1_000 <= 0.4 * (7 // int(profile.slice[0]))
        for variant in app.variants
        for profile in variant.profiles
        if profile.slice in ("1g", "2g", "3g", "7g")
    )


class Site:
    """Fleets and applications on some nodes, and what becomes of them."""

    def __init__(self, world: FleetWorld, seed: int) -> None:
        self.world, self.draw = world, random.Random(seed)
        self.gpus: dict[str, int] = {"n0": 4}
        self.apps: dict[str, AppSpec] = {}
        self.fleets: dict[str, int] = {}
        self.jobs: dict[int, str] = {}
        self.lost = set[str]()
        self.ordered = False
        self.done = list[object]()

    async def begin(self) -> None:
        draw, world = self.draw, self.world
        for name in [f"n{at}" for at in range(1, draw.randint(1, 3))]:
            self.gpus[name] = draw.randint(1, 3)
            await world.node(name, self.gpus[name])
        await world.node("plain", 2, model="V100-SXM2-32GB")
        for gpu in range(4):
            if draw.random() < 0.2:
                await self.job(gpu)
        for fleet in draw.choice((["edge"], ["edge"], ["core", "edge"])):
            self.fleets[fleet] = draw.randint(1, 3)
            await world.fleets.put(fleet, a_fleet(gpus=self.fleets[fleet]), OPERATOR)
            for at in range(draw.randint(1, self.fleets[fleet])):
                await self.app(f"{fleet}-{at}", fleet)

    async def app(self, name: str, fleet: str) -> None:
        self.apps[name] = an_application(self.draw, fleet)
        await self.world.apps.put(name, self.apps[name], ACME)

    async def job(self, gpu: int) -> None:
        """Have a job of others begin on a GPU of the first node that nobody has set aside, or end there."""
        owned = await self.world.database.fetchval(
            "SELECT count(*) FROM gpu_partitions WHERE node_id = 'n0' AND gpu = $1 AND owner IS NOT NULL", gpu
        )
        job = self.jobs.pop(gpu, None)
        if job is None and not owned:
            self.jobs[gpu] = f"job_{gpu}_{len(self.done)}"
        if job is not None or not owned:
            await self.world.use(gpu, self.jobs.get(gpu))

    async def change(self) -> None:
        """Change one thing."""
        draw, world = self.draw, self.world
        self.done.append(kind := draw.choice(KINDS))
        match kind:
            case "grid":
                world.grid.gco2_per_kwh["GB"] = draw.choice((30, 120, 300, 600))
            case "app" if self.apps:
                name = draw.choice(sorted(self.apps))
                await self.app(name, self.apps[name].fleet)
            case "node" if len(self.gpus) > 1:
                node = draw.choice(sorted(self.gpus)[1:])
                await world.lose(node, back=node in self.lost)
                self.lost ^= {node}
            case "job":
                await self.job(draw.randrange(4))
            case "delete" if len(self.apps) > 1:
                gone = draw.choice(sorted(self.apps))
                del self.apps[gone]
                await world.apps.delete(gone, ACME)
            case "search":
                world.fails = None if world.fails else "There was no answer within 300 s of solving."
            case "refuse":
                world.refusing = set() if world.refusing else {draw.randrange(4)}
            case "late" if self.apps:
                await self.late()
            case "order":
                self.ordered = not self.ordered
                await world.database.execute("DELETE FROM grid_orders")
                if self.ordered:
                    await world.order("GB")
            case "kill":
                world.planner = world.another()
            case "size":
                fleet = draw.choice(sorted(self.fleets))
                least = max(1, sum(app.fleet == fleet for app in self.apps.values()))
                self.fleets[fleet] = draw.randint(least, 4)
                await world.fleets.put(fleet, a_fleet(gpus=self.fleets[fleet]), OPERATOR)
            case _:
                pass

    async def late(self) -> None:
        """Have answers of an application be late for some seconds, if it gives any."""
        name = self.draw.choice(sorted(self.apps))
        now = datetime.now(UTC)
        if any(each.partition(" ")[0] == name for each in await self.world.running()):
            for ago_s in range(0, 25, 5):
                latency_ms = 5 * self.apps[name].sla_p95_ms
                await self.world.see(name, answers=60, latency_ms=latency_ms, at=now - timedelta(seconds=ago_s))

    # The account

    async def check(self) -> None:
        """What holds at any moment."""
        database = self.world.database
        foreign = await database.fetch(
            "SELECT p.node_id, p.gpu, p.sizes FROM gpu_partitions p JOIN device_claims c ON c.node_id = p.node_id "
            "AND c.device = p.gpu WHERE c.allocation_id LIKE 'allocation\\__'"
        )
        cuts = await self.world.cuts()
        for row in foreign:
            assert sorted(row["sizes"]) == sorted(cuts[row["node_id"], row["gpu"]]), ("cut under a job", row)
        held = Counter[tuple[str, int]]()
        for row in await database.fetch("SELECT node_id, device, parent FROM device_claims"):
            held[row["node_id"], row["device"] if row["parent"] is None else row["parent"]] |= 1
            whole = row["parent"] is None
            assert whole <= (not cuts.get((row["node_id"], row["device"]))), ("a whole GPU and its slices", row)
        owned = {
            (row["node_id"], row["gpu"])
            for row in await database.fetch("SELECT node_id, gpu FROM gpu_partitions WHERE owner IS NOT NULL")
        }
        async with self.world.repository.reading() as queries:
            cluster = await read_cluster(queries.connection)
        for node in cluster.nodes:
            for gpu in node.devices:
                assert (node.id, gpu) not in owned, "pools may plan a fleet's GPU"
        pools = {(node.id, gpu) for node in cluster.nodes for gpu in node.devices}
        there = {(node, gpu) for node, count in self.gpus.items() if node not in self.lost for gpu in range(count)}
        waiting = await database.fetch("SELECT node_id, gpu FROM gpu_partitions WHERE state IN ('pending', 'busy')")
        assert there - owned - {(row["node_id"], row["gpu"]) for row in waiting} <= pools, "a GPU is nobody's"

    async def rest(self) -> None:
        """Take turns, with time for whatever waits, until nothing is due."""
        world, quiet, plans, before = self.world, 0, 0, None
        for _ in range(TURNS):
            await world.turn()
            await self.check()
            states = [state for _, state in await world.plans()]
            waits = [plan["detail"] for plan in await self.newest() if (plan["detail"] or "").startswith(WAITS)]
            if waits and waits == before:
                await world.later(130)  # longer than a plan waits for it
            before = waits
            is_active = any(state in ACTIVE for state in states)
            quiet = 0 if is_active or len(states) != plans else quiet + 1
            plans = len(states)
            if quiet and not world.fails and not world.refusing and quiet < 4:
                await world.later(3_600)
                await world.database.execute("DELETE FROM app_observations")
            if quiet > 4:
                return
            if any(each["failures"] > 1 for each in await world.database.fetch("SELECT failures FROM fleets")) and all(
                plan["state"] == "applied" or self.may_fail(plan["detail"]) for plan in await self.newest()
            ):
                return  # what is tried again ever later is no unrest
        raise AssertionError(("it does not come to rest", await world.plans(), dict(await world.plan() or {})))

    async def newest(self) -> list[Any]:
        return await self.world.database.fetch("SELECT DISTINCT ON (fleet) * FROM fleet_plans ORDER BY fleet, id DESC")

    def may_fail(self, detail: str | None) -> bool:
        """Whether a plan may fail for this: all GPUs are needed, or a driver or the optimizer refuses."""
        said = detail or ""
        refused = "the driver says no" in said and bool(self.world.refusing)
        return refused or said == self.world.fails or said.startswith("No GPU could be spared within the SLA of")

    async def check_rest(self) -> None:
        """What a fleet's applications are owed once nothing is due."""
        world = self.world
        running = await world.running()
        has = Counter[str]()
        for each, count in running.items():
            has[each.partition(" ")[0]] += count
        assert set(has) <= set(self.apps), "what is deleted runs on"
        for fleet in self.fleets:
            shown = await world.fleets.find(fleet, OPERATOR)
            mine = {name: app for name, app in self.apps.items() if app.fleet == fleet}
            usable = self.fleets[fleet] - shown.missing_gpus
            served = sum(has[name] > 0 for name in mine)
            assert served >= min(usable, len(mine)), ("somebody has nothing", fleet, running, shown.plan)
            if not mine or usable < len(mine):
                continue
            if world.fails or world.refusing or shown.plan is None:
                continue
            is_base = not shown.plan.applications or shown.plan.state == "failed"
            for name, app in mine.items():
                if is_easy(app) and not is_base:
                    self.keeps(name, app, running)
                said = next((each for each in shown.plan.applications if each.name == name), None)
                is_told = is_base or name in (shown.plan.detail or "")
                assert said is None or said.keeps_limits or is_told, ("a shortage is not said", name, shown.plan)
                assert said is None or said.keeps_limits or not is_easy(app), ("an easy one is not kept", name)
                most = 100.0 if app.max_accuracy_loss_pct is None else app.max_accuracy_loss_pct
                assert said is None or said.accuracy_loss_pct <= most + 1e-6, ("below its floor", name, said)
            is_planned = is_base or shown.plan.state == "applied" or self.may_fail(shown.plan.detail)
            assert is_planned, ("what can be served is not planned", shown.plan)

    def keeps(self, name: str, app: AppSpec, running: Counter[str]) -> None:
        served, accuracy = 0.0, list[float]()
        profiles = {
            f"{name} {variant.name}.{profile.slice}": (profile, variant)
            for variant in app.variants
            for profile in variant.profiles
        }
        for each, count in running.items():
            if each in profiles:
                served += 1_000 / profiles[each][0].service_ms * count
                accuracy.append(profiles[each][1].accuracy_pct)
        floor = app.most_accurate.accuracy_pct * (1 - (app.max_accuracy_loss_pct or 100) / 100)
        assert served > app.requests_per_s, ("less than what is asked for", name, running)
        assert max(accuracy) >= floor - 1e-9, ("below its floor", name, running)


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 120), marks=[pytest.mark.slow, pytest.mark.timeout(3_600)])],
    ids=["few", "many"],
)  # fmt: skip
async def test_fleets_that_share_nodes_come_to_rest_and_give_what_they_can(seeds: range, database_url: str) -> None:
    for seed in seeds:
        async with a_fleet_world(database_url) as world:
            site = Site(world, seed)
            try:
                await site.begin()
                for _ in range(4):
                    await site.rest()
                    await site.check_rest()
                    await site.change()
            except BaseException as error:
                error.add_note(f"site {seed}, {site.apps}, {site.done}, {await world.plans()}")
                raise
