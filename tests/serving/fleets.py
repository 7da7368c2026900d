"""A fleet's planner on a real database, and a hand in place of scheduler, agents, controller and optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.apps import AppObservation, AppObservations, AppServerObservation, AppSpec, FleetSpec
from services.contracts.identity import Identity, Role
from services.contracts.partition import PartitionProblem, PartitionRequest, PartitionResult
from services.core.domain.mig import parent_of, placed, slice_index
from services.core.domain.signal import Signal
from services.db.database import connect
from services.db.engine import create_engine
from services.kit.ids import new_id
from services.serving.carbon import Baselines, CarbonZones
from services.serving.fleets.assignment import slots_of
from services.serving.fleets.observations import bucket_of, observe
from services.serving.fleets.planner import FleetPlanner
from services.serving.fleets.service import Apps, Fleets
from services.serving.repository import ServingRepository
from services.serving.settings import ServingSettings
from services.serving.solver import Answer
from services.solving.partition import solve_partition
from tests.serving.world import Grid

OPERATOR = Identity(tenant_id="ops", role=Role.OPERATOR, key_id="key_ops")
ACME = Identity(tenant_id="acme", role=Role.USER, key_id="key_acme")
MODEL = "H200-SXM-141GB"
ZONE = "GB"


def a_fleet(**changes: Any) -> FleetSpec:
    return FleetSpec.model_validate(
        {"gpus": 2, "gpu_model": MODEL, "zone": ZONE, "baseline_gco2_per_kwh": 200, **changes}
    )


def an_app(**changes: Any) -> AppSpec:
    def variant(name: str, accuracy_pct: float, *figures: tuple[str, float, float]) -> dict[str, Any]:
        profiles = [{"slice": size, "service_ms": ms, "busy_w": watts} for size, ms, watts in figures]
        return {"name": name, "accuracy_pct": accuracy_pct, "command": ["serve", name], "profiles": profiles}

    spec: dict[str, Any] = {
        "fleet": "edge",
        "variants": [
            variant("small", 78, ("1g", 25, 17), ("2g", 21, 24), ("3g", 20, 36), ("7g", 15, 60)),
            variant("big", 84, ("3g", 97, 95), ("4g", 87, 127), ("7g", 61, 138)),
        ],
        "sla_p95_ms": 400,
        "requests_per_s": 12,
        "min_interval_s": 1,
    }
    return AppSpec.model_validate({**spec, **changes})


@cache
def _solved(request: str) -> PartitionResult:
    """Return the answer to a problem, found once by all tests of a process, with one seed."""
    return solve_partition(PartitionProblem.model_validate_json(request))


@dataclass
class FleetWorld:
    """A planner, its database, and what obeys it."""

    engine: AsyncEngine
    database: Any
    repository: ServingRepository
    grid: Grid
    settings: ServingSettings
    asked: list[str] = field(default_factory=list[str])
    refusing: set[int] = field(default_factory=set[int])
    crashing: set[str] = field(default_factory=set[str])
    failing: set[str] = field(default_factory=set[str])
    fails: str | None = None

    def __post_init__(self) -> None:
        self.fleets, self.apps = Fleets(self.repository, _Zones()), Apps(self.repository, self.settings)
        self.planner = self.another()

    def another(self) -> FleetPlanner:
        """Return a planner that remembers nothing: that of another process, or after a kill."""
        baselines = Baselines(None)  # type: ignore[arg-type]  # fleets have a baseline of their own
        return FleetPlanner(self.repository, self.grid, baselines, self._search, self.settings)

    async def _search(self, plan_id: str, request: PartitionRequest) -> Answer:
        self.asked.append(plan_id)
        return self.fails or _solved(request.model_dump_json(exclude={"seed"}))

    async def node(self, name: str, gpus: int, model: str = MODEL) -> None:
        devices = [
            {"index": index, "model": model, "memory_gib": 141.0, "uuid": f"GPU-{index}"} for index in range(gpus)
        ]
        await self.database.execute(
            "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices, "
            "lease_until) VALUES ($1, '', '10.0.0.1', '', $2, 'simulated', false, 'modelled', $3, now() + '1 day')",
            *(name, ZONE, devices),
        )

    async def use(self, gpu: int, job: str | None) -> None:
        """Have a job of others run on a GPU of the first node, or end."""
        allocation = f"allocation_{gpu}"
        if job is None:
            await self.database.execute("DELETE FROM device_claims WHERE allocation_id = $1", allocation)
            return
        await self.database.execute(
            "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state) "
            "VALUES ($1, 'acme', 'job', 'default', '{}', '{}', 'running')",
            job,
        )
        await self.database.execute(
            "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
            "VALUES ($1, $2, 1, 'running', 1, '[]', 1)",
            *(allocation, job),
        )
        await self.database.execute(
            "INSERT INTO device_claims (node_id, device, allocation_id) VALUES ('n0', $1, $2)", gpu, allocation
        )

    async def lose(self, node: str, *, back: bool = False) -> None:
        await self.database.execute("UPDATE nodes SET state = $2 WHERE id = $1", node, "up" if back else "down")

    async def turn(self, times: int = 1) -> None:
        """Have the planner look, and do a little of what it says, so often."""
        for _ in range(times):
            await self.planner.look()
            await self._agents()
            await self._controller()
            await self._scheduler()

    async def settle(self, state: str = "applied", turns: int = 60) -> dict[str, Any]:
        """Take turns until the newest plan is in this state; return it."""
        for _ in range(turns):
            await self.turn()
            plan = await self.plan()
            if plan is not None and plan["state"] == state:
                await self.turn()
                return plan
        raise AssertionError(f"the newest plan is {await self.plan()}")

    async def order(self, zone: str, within: timedelta = timedelta(), name: str = "cut") -> None:
        """Have an order of the grid in force in a zone, or soon."""
        await self.database.execute(
            "INSERT INTO grid_orders (id, key_id, source, body_sha256, name, zone, start_at, end_at, notice_s, steps) "
            "VALUES ($1, 'k', 'api', '', '', $2, now() + $3, now() + '1 h', 0, '[]')",
            *(name, zone, within),
        )

    async def plan(self) -> Any:
        return await self.database.fetchrow("SELECT * FROM fleet_plans ORDER BY id DESC LIMIT 1")

    async def plans(self) -> list[tuple[str, str]]:
        rows = await self.database.fetch("SELECT trigger, state FROM fleet_plans ORDER BY id")
        return [(row["trigger"], row["state"]) for row in rows]

    async def later(self, seconds: float) -> None:
        """Have all that happened have happened so much earlier."""
        await self.database.execute(
            "UPDATE fleet_plans SET made_at = made_at - make_interval(secs => $1), "
            "ended_at = ended_at - make_interval(secs => $1)",
            seconds,
        )
        await self.database.execute("UPDATE fleets SET retry_at = retry_at - make_interval(secs => $1)", seconds)
        for row in await self.database.fetch("SELECT id, progress FROM fleet_plans WHERE state = 'carrying_out'"):
            begun = {name: at_s for name in ("since_s", "cut_since_s") if (at_s := row["progress"][name]) is not None}
            progress = row["progress"] | {name: at_s - seconds for name, at_s in begun.items()}
            await self.database.execute("UPDATE fleet_plans SET progress = $2 WHERE id = $1", row["id"], progress)

    async def running(self) -> Counter[str]:
        """Return the instances that are ready: application, variant and slice."""
        rows = await self.database.fetch("SELECT pool, mode FROM pool_instances WHERE state = 'ready'")
        return Counter(f"{row['pool'].removeprefix('app:')} {row['mode']}" for row in rows)

    async def cuts(self) -> dict[tuple[str, int], list[int]]:
        """Return how GPUs are cut, by their nodes' devices."""
        found: dict[tuple[str, int], list[int]] = {}
        for row in await self.database.fetch("SELECT id, devices FROM nodes ORDER BY id"):
            for device in row["devices"]:
                if device.get("parent") is None:
                    found.setdefault((row["id"], device["index"]), [])
                else:
                    found.setdefault((row["id"], device["parent"]), []).append(device["sevenths"])
        return found

    async def see(
        self, app: str, *, answers: int, latency_ms: float, arrivals: int | None = None, at: datetime | None = None
    ) -> None:
        """Report requests of the last seconds, answered by the first instance that is ready."""
        row = await self.database.fetchrow(
            "SELECT id FROM pool_instances WHERE pool = $1 AND state = 'ready' ORDER BY id", f"app:{app}"
        )
        latency = [0] * bucket_of(latency_ms) + [answers]
        servers = [AppServerObservation(server=row["id"], answered=answers, mean_service_ms=latency_ms)]
        seen = AppObservation(app=app, arrivals=arrivals or answers, answered=answers, latency=latency, servers=servers)
        at = (at or datetime.now(UTC)).replace(microsecond=0)
        at -= timedelta(seconds=at.second % 5)
        await observe(self.repository, AppObservations(router="r", start_at=at, apps=[seen]))

    async def serve(
        self, figures: Callable[[Counter[str]], tuple[float, float]], *, answers: int = 200, seconds: float = 20
    ) -> None:
        """Have what is measured now have run and been asked for so long already.

        Args:
            figures: From an application's instances to latency in ms and GPU energy of its instances in J per answer.
            answers: Of each application in each 5 s.
            seconds: Since when it has been measured.
        """
        plan = await self.plan()
        if plan is None or plan["state"] != "measuring" or plan["search"]["present"]["measured_from"] is None:
            return
        at = datetime.fromtimestamp(5 * ((datetime.now(UTC).timestamp() - seconds) // 5), UTC)
        search = plan["search"]
        search["present"]["measured_from"] = at.isoformat()
        await self.database.execute("UPDATE fleet_plans SET search = $2 WHERE id = $1", plan["id"], search)
        await self.database.execute("DELETE FROM app_observations")
        await self.database.execute("DELETE FROM energy_usages")
        now = datetime.now(UTC)
        for app in await self.database.fetch("SELECT name FROM apps ORDER BY name"):
            rows = await self.database.fetch(
                "SELECT job_id, mode FROM pool_instances WHERE pool = $1 AND state = 'ready' ORDER BY id",
                f"app:{app['name']}",
            )
            if not rows:
                continue
            latency_ms, energy_j = figures(Counter(row["mode"] for row in rows))
            windows = int(seconds // 5)
            for window in range(windows):
                start_at = at + timedelta(seconds=5 * window)
                await self.see(app["name"], answers=answers, latency_ms=latency_ms, at=start_at)
            total_j = energy_j * answers / 5 * (now - at).total_seconds()
            for row in rows:
                await self.database.execute(
                    "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, "
                    "gpu_energy_j, cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, "
                    "intensity_estimated, pue, carbon_gco2) VALUES "
                    "('n0', 'b', 1, $1, $1, $2, $3, 1, $4, 5, 5, 'measured', 'GB', '', 200, false, 1, 0)",
                    *(row["job_id"], at, now, total_j / len(rows)),
                )

    async def _agents(self) -> None:
        for row in await self.database.fetch("SELECT * FROM gpu_partitions WHERE state = 'pending'"):
            node, gpu, sizes = row["node_id"], row["gpu"], row["sizes"]
            held = await self.database.fetch("SELECT device FROM device_claims WHERE node_id = $1", node)
            cut = sorted((await self.cuts())[node, gpu])
            if cut != sorted(sizes) and any(gpu in (each["device"], parent_of(each["device"])) for each in held):
                continue
            if gpu in self.refusing and cut != sorted(sizes):
                await self._answer(node, gpu, "failed", "the driver says no")
                continue
            devices = await self.database.fetchval("SELECT devices FROM nodes WHERE id = $1", node)
            others = [each for each in devices if each.get("parent") != gpu]
            for each in others:
                if each["index"] == gpu:
                    each["mig_enabled"] = bool(sizes)
            slices = [
                {
                    **{"index": slice_index(gpu, place.start), "uuid": f"MIG-{gpu}-{place.start}", "parent": gpu},
                    **{"sevenths": place.sevenths, "model": MODEL, "memory_gib": 20.0 * place.sevenths},
                }
                for place in placed(sizes)
            ]
            await self.database.execute("UPDATE nodes SET devices = $2 WHERE id = $1", node, others + slices)
            await self._answer(node, gpu, "applied", "")

    async def _answer(self, node: str, gpu: int, state: str, detail: str) -> None:
        await self.database.execute(
            "UPDATE gpu_partitions SET state = $3, detail = $4 WHERE node_id = $1 AND gpu = $2",
            *(node, gpu, state, detail),
        )

    async def _controller(self) -> None:
        for app in await self.database.fetch("SELECT name, target, deleted_at FROM apps"):
            key = f"app:{app['name']}"
            wanted = {f"{variant}.{size}": count for variant, size, count in app["target"]["wanted"]}
            if app["deleted_at"] is not None:
                wanted = {}
            there = await self.database.fetch(
                "SELECT id, mode, job_id FROM pool_instances WHERE pool = $1 AND state <> 'ended' ORDER BY id", key
            )
            leave = set(app["target"]["leave"])
            for mode in {*wanted, *(row["mode"] for row in there)}:
                mine = sorted((row for row in there if row["mode"] == mode), key=lambda row: row["id"] in leave)
                for row in mine[wanted.get(mode, 0) :]:
                    await self.end(row["id"])
                for _ in range(wanted.get(mode, 0) - len(mine)):
                    await self.database.execute(
                        "INSERT INTO pool_instances (id, pool, tenant_id, place, mode, terms, state, job_id) "
                        "VALUES ($1, $2, 'acme', 'edge', $3, '{}', 'starting', $4)",
                        *(new_id("instance"), key, mode, new_id("job")),
                    )
            if app["deleted_at"] is not None and not there:
                await self.database.execute("DELETE FROM apps WHERE name = $1", app["name"])

    async def end(self, instance: str) -> None:
        await self.database.execute(
            "DELETE FROM device_claims c USING allocations a, pool_instances i "
            "WHERE c.allocation_id = a.id AND a.job_id = i.job_id AND i.id = $1",
            instance,
        )
        await self.database.execute("UPDATE pool_instances SET state = 'ended' WHERE id = $1", instance)

    async def _scheduler(self) -> None:
        rows = await self.database.fetch(
            "SELECT i.id, i.pool, i.mode, i.job_id, a.id AS allocation, p.fleet FROM pool_instances i "
            "JOIN apps p ON i.pool = 'app:' || p.name "
            "LEFT JOIN allocations a ON a.job_id = i.job_id WHERE i.state = 'starting' ORDER BY i.id"
        )
        for row in rows:
            if row["allocation"] is None:
                await self._place(row["job_id"], row["mode"].rpartition(".")[2], row["fleet"])
            elif row["pool"].removeprefix("app:") in self.failing:
                await self.end(row["id"])
                failed = "UPDATE pool_instances SET reason = 'failed', ended_at = now() WHERE id = $1"
                await self.database.execute(failed, row["id"])
            elif row["mode"] not in self.crashing:
                await self.database.execute("UPDATE pool_instances SET state = 'ready' WHERE id = $1", row["id"])

    async def _place(self, job: str, size: str, fleet: str) -> None:
        held = {(row["node_id"], row["device"]) for row in await self.database.fetch("SELECT * FROM device_claims")}
        partitions = await self.database.fetch(
            "SELECT p.node_id, p.gpu, p.sizes, n.devices FROM gpu_partitions p JOIN nodes n ON n.id = p.node_id "
            "WHERE owner = $1 AND p.state = 'applied' AND n.state = 'up' ORDER BY 1, 2",
            fleet,
        )
        for row in partitions:
            node, gpu = row["node_id"], row["gpu"]
            if not slots_of(tuple(row["sizes"]))[size]:
                continue
            device = next(
                (
                    each["index"]
                    for each in row["devices"]
                    if (node, each["index"]) not in held
                    and (each["index"] == gpu if not row["sizes"] else each.get("parent") == gpu)
                    and each.get("sevenths", 7) == int(size[0])
                ),
                None,
            )
            if device is None:
                continue
            allocation = new_id("allocation")
            await self.database.execute(
                "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state) "
                "VALUES ($1, 'acme', 'job', 'default', '{}', $2, 'running') ON CONFLICT DO NOTHING",
                *(job, {"service": {"fleet": fleet}}),
            )
            await self.database.execute(
                "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
                "VALUES ($1, $2, 1, 'running', 1, $3, 1)",
                *(allocation, job, [{"node_id": node, "devices": [device]}]),
            )
            await self.database.execute(
                "INSERT INTO device_claims (node_id, device, allocation_id, parent) VALUES ($1, $2, $3, $4)",
                *(node, device, allocation, parent_of(device)),
            )
            return


class _Zones(CarbonZones):
    def __init__(self) -> None: ...

    async def signals(self) -> dict[str, set[Signal]]:
        return {ZONE: {Signal.AVERAGE_DIRECT}}


@asynccontextmanager
async def a_fleet_world(
    database_url: str, world: type[FleetWorld] = FleetWorld, **changes: Any
) -> AsyncIterator[FleetWorld]:
    """Yield a world with a node of four GPUs, and no fleet."""
    asked = {"database_url": database_url, "fleet_retry_s": 10, **changes}
    settings = ServingSettings(WATTSHIFT_SERVICE_TOKEN="x" * 16, **asked)  # type: ignore[arg-type]
    engine = create_engine(database_url, pool_size=10)
    database = await connect(database_url, application_name="test")
    await database.execute("SET session_replication_role = replica")  # rows stand for jobs that are not there
    await database.execute(
        "TRUNCATE fleets, apps, fleet_plans, app_observations, pool_instances, gpu_partitions, device_claims, "
        "allocations, nodes, audit_log, energy_usages, grid_orders, jobs, pools, pool_plans CASCADE"
    )
    made = world(engine, database, ServingRepository(engine), Grid(), settings)
    made.grid.gco2_per_kwh[ZONE] = 200
    await made.node("n0", 4)
    try:
        yield made
    finally:
        await database.execute("TRUNCATE nodes, allocations, gpu_partitions, fleets, apps CASCADE")
        await database.close()
        await engine.dispose()
