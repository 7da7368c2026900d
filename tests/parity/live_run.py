"""Runs of the live scheduler on two nodes, by a clock that this module sets, and the same runs in the simulator.

``python -m tests.parity.live_run`` records the live runs anew, in ``live_runs.json``. The scheduler is the real one on
its database; nodes, meters and users are played here: gangs run, draw power and end as the kinds of jobs below say, and
what agents and telemetry would have written of it stands in the database whenever the scheduler takes a turn. Of the
database's functions only ``now()`` is replaced, in its views too.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import asyncpg
import numpy as np

from services.core.cycle import run_cycle as rounds
from services.core.cycle.plan import Action, Preempt, SetControl, Start
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS
from services.core.profiles.sharing import shared_gpu
from services.kit.policies import load_policies
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.grid import Grid
from services.simulator.workload import Behaviour, ClusterSpec, JobProfile, Workload
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database, postgres_server, valkey_server
from tests.support.workloads import START_S, a_wave, a_workload

RECORDING = Path(__file__).with_name("live_runs.json")
MODEL, NODES, GPUS = "RTX3090", ("n0", "n1"), 2
BOARD = GPU_MODELS[MODEL]
INTERVAL_S = 1_800.0
CURVE = ControlCurve(
    np.array([150.0, 200.0, 250.0, 350.0]), np.array([0.6, 0.85, 0.97, 1.0]), np.array([0.5, 0.62, 0.78, 1.0])
)
CLOCK = """
CREATE SCHEMA clock;
CREATE TABLE clock.present (at timestamptz NOT NULL);
INSERT INTO clock.present VALUES (to_timestamp({start_s}));
CREATE FUNCTION clock.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT at FROM clock.present';
DO $$ DECLARE each record; BEGIN
    FOR each IN SELECT table_name, column_name FROM information_schema.columns
                 WHERE table_schema = 'public' AND column_default = 'now()' LOOP
        EXECUTE format('ALTER TABLE %I ALTER COLUMN %I SET DEFAULT clock.now()', each.table_name, each.column_name);
    END LOOP;
END $$;
DO $$ DECLARE each record; BEGIN
    CREATE TEMP TABLE views AS
        SELECT c.oid::regclass AS view, pg_get_viewdef(c.oid) AS query FROM pg_class c
         WHERE relkind = 'v' AND relnamespace = 'public'::regnamespace ORDER BY c.oid;
    SET LOCAL search_path = clock, public, pg_catalog;
    FOR each IN SELECT * FROM pg_temp.views LOOP
        EXECUTE format('CREATE OR REPLACE VIEW %s AS %s', each.view, each.query);
    END LOOP;
END $$;
DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = clock, public, pg_catalog', current_database()); END $$;
"""
ABLE = """
UPDATE nodes SET devices = (
    SELECT jsonb_agg(each || '{"can_set_power_limit": true}') FROM jsonb_array_elements(devices) each) RETURNING 1
"""
RoundAt = dict[str, Any]
"""A round: seconds after the start, whether it was active, and what it did."""


@dataclass(frozen=True)
class Case:
    """A policy with its parameters, and the jobs of a run; whether those permit that two of them share a GPU."""

    policy: str
    parameters: Mapping[str, Any]
    workload: Workload
    may_share: bool = False


OPTIONS = EngineOptions(round_interval_s=INTERVAL_S, settings_known=True)


def a_kind(name: str, gpu_w: float, scaling: float) -> JobProfile:
    """Return a kind of job that is measured at four sizes and four power limits."""
    sizes = np.array([1, 2, 3, 4])
    controls = {ControlKind.POWER_LIMIT: replace(CURVE, power_w=CURVE.power_w * gpu_w)}
    behaviour = Behaviour(sizes, sizes**scaling, np.full(4, gpu_w), controls=controls)
    return JobProfile(name, {MODEL: behaviour}, host_power_w=20.0, checkpoint_s=15.0, restart_s=30.0)


KINDS = tuple(
    a_kind(f"hot-{at}", 330.0 - 3.0 * at, 0.97 - 0.002 * at)
    if hot
    else a_kind(f"cool-{at}", 140.0 + at, 0.6 + 0.01 * at)
    for at, hot in enumerate([True, False, False, True, False, True, False, True, True])
)
"""One per job: no two jobs are equally efficient, as no two are in life, where meters round."""
ROWS = [
    *((0.0, 9_000.0, 1), (70.0, 14_000.0, 1), (200.0, 5_000.0, 1), (2_500.0, 20_000.0, 1), (4_000.0, 800.0, 1)),
    *((4_100.0, 7_000.0, 2), (9_100.0, 3_000.0, 1), (9_400.0, 12_000.0, 1), (12_700.0, 2_000.0, 1)),
]
JOBS = a_workload(ROWS, KINDS, profile=range(len(KINDS)), most=4)
WAITING = a_workload([(60.0 * at, 5_000.0 + 900.0 * at, 1) for at in range(9)], KINDS, profile=range(len(KINDS)))
"""Nine jobs that come at once to four GPUs."""
CASES = {
    "green": Case("green", {"mu": 2.0}, JOBS),
    "zeus+las": Case("zeus+las", {}, JOBS.rigid()),
    "gandiva": Case("gandiva", {}, WAITING, may_share=True),
}


def told(action: Action) -> str:
    """Return what an action does, in words; nothing of a hold."""
    match action:
        case Start():
            where = " ".join(f"{on.node_id}:{','.join(map(str, on.devices))}" for on in action.placement.shares)
            return f"{action.job_id} starts {'beside another ' if action.shares else ''}on {where}"
        case Preempt():
            return f"{action.job_id} stops, comes back with {action.next_gpus}"
        case SetControl(kind=ControlKind.POWER_LIMIT):
            return f"{action.job_id} gets {action.value} W"
        case _:
            return ""


def listening(rounds_held: list[RoundAt]) -> Callable[..., Any]:
    """Return a ``run_cycle`` that notes every round which did something or was held by the clock."""

    def noted(policy: Any, snapshot: Any, memory: Any) -> Any:
        result = rounds.run_cycle(policy, snapshot, memory)
        done = sorted(each for action in result.plan.actions if (each := told(action)))
        if done or snapshot.trigger == "active":
            at_s = round(snapshot.now_s - START_S, 3)
            rounds_held.append({"at_s": at_s, "active": snapshot.trigger == "active", "actions": done})
        return result

    return noted


def simulated(case: Case) -> list[RoundAt]:
    """Return the rounds of a case in the simulator."""
    held: list[RoundAt] = []
    with patch("services.simulator.engine.simulation.run_under_orders", listening(held)):
        simulate(
            case.policy,
            case.workload,
            ClusterSpec.parse(f"{len(NODES)}x{GPUS}:{MODEL}"),
            a_wave(3),
            parameters=dict(case.parameters),
            options=OPTIONS,
        )
    return held


@dataclass
class Gang:
    """A gang that holds devices; it works from ``run_from_s`` until ``stopped``."""

    allocation: str
    gpus: int
    where: str
    run_from_s: float
    limit_w: float | None = None
    stopped: bool = False


@dataclass
class Record:
    """What a job has had and done: work seconds, joules, grams, GPU seconds; and by size of its gangs."""

    done: float = 0.0
    energy_j: float = 0.0
    gpu_energy_j: float = 0.0
    carbon_gco2: float = 0.0
    gpu_s: float = 0.0
    by_size: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    generation: dict[int, int] = field(default_factory=dict[int, int])


class Site:
    """The nodes, their meters and the users of a live run."""

    def __init__(self, world: World, case: Case) -> None:
        self.world, self.case, self.workload = world, case, case.workload
        self.now_s = START_S
        self.grid = Grid(a_wave(3), OPTIONS.history_s, OPTIONS.horizon_s)
        self.gangs: dict[str, Gang] = {}
        self.records = {job_id: Record() for job_id in self.workload.ids}
        self.row = {job_id: at for at, job_id in enumerate(self.workload.ids)}
        self.events: list[tuple[float, int, str, str, str]] = []

    def push(self, at_s: float, what: str, job_id: str, allocation: str = "") -> None:
        """Plan what happens to a job."""
        heapq.heappush(self.events, (at_s, len(self.events), what, job_id, allocation))

    async def run(self) -> None:
        """Run until every job has ended."""
        for name in NODES:
            await self.world.node(name, GPUS, lease_s=1e7, model=MODEL)
        await self.world.fetch(ABLE)
        await self.world.fetch(
            "INSERT INTO scheduler_state (id, policy, parameters, policy_changed_by, memory, version) "
            "VALUES (1, $1, $2, 'test', '{}', 0) RETURNING 1",
            self.case.policy,
            dict(self.case.parameters),
        )
        for job_id, at_s in zip(self.workload.ids, self.workload.submitted_s.tolist(), strict=True):
            self.push(at_s, "submit", job_id)
        left, active_s = len(self.workload), START_S
        while left:
            assert self.now_s < START_S + 86_400.0, f"{left} jobs have not ended within a day"
            at_s = min(active_s, self.events[0][0] if self.events else math.inf)
            await self.advance(at_s)
            while self.events and self.events[0][0] <= at_s:
                _, _, what, job_id, allocation = heapq.heappop(self.events)
                left -= await self.happens(what, job_id, allocation)
            if at_s >= active_s:
                active_s += INTERVAL_S
            await self.write()
            for _ in range(3):
                await self.world.scheduler.turn()
                await self.follow()

    async def advance(self, at_s: float) -> None:
        """Move the clock, and count what gangs did and drew meanwhile."""
        grams_per_j = (self.grid.integral(at_s) - self.grid.integral(self.now_s)) / 3.6e6
        seconds = at_s - self.now_s
        for job_id, gang in self.gangs.items():
            record, (speed, gpu_w, draw_w) = self.records[job_id], self.figures(job_id, gang)
            worked_s = 0.0 if gang.stopped else max(at_s - max(self.now_s, gang.run_from_s), 0.0)
            record.done += speed * worked_s
            record.energy_j += draw_w * seconds
            record.gpu_energy_j += gpu_w * seconds
            record.carbon_gco2 += draw_w * grams_per_j
            record.gpu_s += gang.gpus * seconds
            sums = record.by_size.setdefault(gang.gpus, [0.0, 0.0, 0.0])
            for at, amount in enumerate((speed * worked_s, draw_w * worked_s, worked_s)):
                sums[at] += amount
        self.now_s = at_s
        await self.world.fetch("UPDATE clock.present SET at = to_timestamp($1::float8) RETURNING 1", at_s)

    def figures(self, job_id: str, gang: Gang) -> tuple[float, float, float]:
        """Return a gang's speed, the power of its GPUs and that with its hosts."""
        speed, gpu_w, host_w = self.alone(job_id, gang)
        other = self.beside(job_id, gang)
        if other is None:
            return speed, gpu_w, gpu_w + host_w
        _, other_w, _ = self.alone(other, self.gangs[other])
        part = shared_gpu(gpu_w, other_w, idle_w=BOARD.idle_w, limit_w=BOARD.peak_w)
        return speed * part.pace, part.gpu_w, part.gpu_w + host_w * part.pace

    def alone(self, job_id: str, gang: Gang) -> tuple[float, float, float]:
        """Return a gang's speed, the power of its GPUs and that of its hosts, if it shares no GPU."""
        kind = self.workload.profiles[int(self.workload.profile[self.row[job_id]])]
        behaviour = kind.true[MODEL]
        size = np.array([gang.gpus])
        slower, cooler = behaviour.factors_at({} if gang.limit_w is None else {ControlKind.POWER_LIMIT: gang.limit_w})
        gpu_w = gang.gpus * float(behaviour.power_w_at(size)[0]) * cooler
        return float(behaviour.speed_at(size)[0]) * slower, gpu_w, gang.gpus * kind.host_power_w

    def beside(self, job_id: str, gang: Gang) -> str | None:
        """Return the job on the same GPU, if there is one."""
        return next((other for other, on in self.gangs.items() if other != job_id and on.where == gang.where), None)

    def ends_anew(self, job_id: str | None) -> None:
        """Plan the end of a gang that works faster or slower from now on."""
        if job_id is not None and not (gang := self.gangs[job_id]).stopped:
            begins_s = max(self.now_s, gang.run_from_s)
            self.push(begins_s + self.left_s(job_id, gang), "ends", job_id, gang.allocation)

    def leaves(self, job_id: str) -> None:
        """Take a gang off its devices."""
        other = self.beside(job_id, self.gangs[job_id])
        del self.gangs[job_id]
        self.ends_anew(other)

    async def happens(self, what: str, job_id: str, allocation: str) -> int:
        """Let something happen to a job; return how many jobs it ends."""
        gang = self.gangs.get(job_id)
        if what == "submit":
            await self.submit(job_id)
        elif gang is None or gang.allocation != allocation:
            return 0
        elif what == "runs" and not gang.stopped:
            await self.world.report(allocation, "running")
        elif what == "released":
            await self.world.report(allocation, "exited", exit_code=-15, ended_by="stop")
            self.leaves(job_id)
        elif what == "ends" and not gang.stopped and self.left_s(job_id, gang) <= 1e-6:
            await self.world.report(allocation, "exited", exit_code=0, ended_by="itself")
            self.leaves(job_id)
            return 1
        return 0

    async def submit(self, job_id: str) -> None:
        """Store a job as admission does."""
        at, kind = self.row[job_id], self.workload.profiles
        low, high = int(self.workload.min_gpus[at]), int(self.workload.max_gpus[at])
        spec: dict[str, Any] = {"name": job_id, "command": ["true"], "gpus": {"min": low, "max": high}}
        if self.case.may_share:
            spec |= {"may_share_gpu": True, "work": {"total": float(self.workload.work_s[at])}}
            spec["gpus"]["memory_gib"] = 10.0
        await self.world.fetch(
            "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at) "
            "VALUES ($1, 'default', 'a', 'default', $2, $3, 'queued', now()) RETURNING 1",
            job_id,
            {"kind": kind[int(self.workload.profile[at])].name},
            spec,
        )

    def left_s(self, job_id: str, gang: Gang) -> float:
        """Return how long a gang still works."""
        return (float(self.workload.work_s[self.row[job_id]]) - self.records[job_id].done) / self.figures(job_id, gang)[
            0
        ]

    async def write(self) -> None:
        """Write what telemetry would have written."""
        for job_id, record in self.records.items():
            if not record.gpu_s:
                continue
            await self.world.fetch(
                "INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s) "
                "VALUES ($1, $2, $3, 0, $4, $5) ON CONFLICT (job_id) DO UPDATE "
                "SET energy_j = $2, gpu_energy_j = $3, carbon_gco2 = $4, gpu_s = $5 RETURNING 1",
                *(job_id, record.energy_j, record.gpu_energy_j, record.carbon_gco2, record.gpu_s),
            )
            if self.case.may_share:
                await self.world.fetch(
                    "INSERT INTO job_progress (job_id, done) VALUES ($1, $2) "
                    "ON CONFLICT (job_id) DO UPDATE SET done = $2 RETURNING 1",
                    *(job_id, record.done),
                )
            for gpus, (progress, energy_j, seconds) in record.by_size.items():
                await self.world.fetch(
                    "INSERT INTO job_profiles (job_id, gpus, progress, energy_j, gpu_energy_j, duration_s, generation) "
                    "VALUES ($1, $2, $3, $4, 0, $5, $6) ON CONFLICT (job_id, gpus) DO UPDATE "
                    "SET progress = $3, energy_j = $4, duration_s = $5, generation = $6 RETURNING 1",
                    *(job_id, gpus, progress, energy_j, seconds, record.generation[gpus]),
                )

    async def follow(self) -> None:
        """Do what the scheduler's last plan asks of the nodes."""
        rows = await self.world.fetch(
            "SELECT id, job_id, gpus, generation, state, power_limit_w, shares FROM allocations "
            "WHERE state <> 'ended' ORDER BY id"
        )
        for row in rows:
            job_id, gang = row["job_id"], self.gangs.get(row["job_id"])
            kind = self.workload.profiles[int(self.workload.profile[self.row[job_id]])]
            if gang is None or gang.allocation != row["id"]:
                where = json.dumps(row["shares"])
                gang = self.gangs[job_id] = Gang(row["id"], row["gpus"], where, self.now_s + kind.restart_s)
                self.records[job_id].generation[gang.gpus] = row["generation"]
                self.push(gang.run_from_s, "runs", job_id, row["id"])
                self.ends_anew(job_id)
                self.ends_anew(self.beside(job_id, gang))
            if row["state"] == "stopping" and not gang.stopped:
                gang.stopped = True
                self.push(self.now_s + kind.checkpoint_s, "released", job_id, row["id"])
            if row["power_limit_w"] != gang.limit_w and not gang.stopped:
                gang.limit_w = row["power_limit_w"]
                self.ends_anew(job_id)


async def recorded(case: Case, postgres_url: str, redis_url: str, folder: Path) -> list[RoundAt]:
    """Return the rounds of a case under the live scheduler."""
    url = fresh_database(postgres_url)
    connection = await asyncpg.connect(url)
    await connection.execute(CLOCK.format(start_s=START_S))
    await connection.close()
    curves = [
        {"kind": kind.name, "gpu_model": MODEL, "setting": "power_limit", "values": CURVE.values.tolist()}
        | {
            "speed": CURVE.speed.tolist(),
            "power_w": kind.true[MODEL].controls[ControlKind.POWER_LIMIT].power_w.tolist(),
        }
        for kind in KINDS
    ]
    (folder / "curves.json").write_text(json.dumps(curves))
    held: list[RoundAt] = []
    async with a_world(
        url, redis_url, policy=case.policy, round_interval_s=INTERVAL_S, control_curves=folder / "curves.json"
    ) as world:
        site = Site(world, case)

        async def outlooks(zones: Iterable[str], now_s: float) -> tuple[CarbonOutlook, ...]:
            return site.grid.outlooks(site.now_s)

        world.scheduler._carbon.outlooks = outlooks  # type: ignore[method-assign]
        with patch("services.scheduler.loop.run_under_orders", listening(held)):
            await site.run()
    return held


async def main() -> None:
    """Record every case."""
    load_policies()
    with postgres_server() as postgres_url, valkey_server() as redis_url, TemporaryDirectory() as folder:
        found = {name: await recorded(case, postgres_url, redis_url, Path(folder)) for name, case in CASES.items()}
    RECORDING.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
