"""Cells: the loop that places jobs in other installations, on a real PostgreSQL, with cells that may do anything.

Admission dies, loses connections and runs twice, while cells refuse, are cut off, answer late or in vain after it took
effect, take in a submission minutes after nobody waits for its answer any more, and start and end jobs as they like.
Jobs that may move are stopped by cells that are asked to give them back, or by the scheduler of home, or end first.
Home is restored from a backup once, when nothing of what it sent before is under way any more.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import orjson

from services.admission.cells.placing import Placing
from services.admission.cells.remote import COPY_LABEL, HOME_LABEL, RemoteCell, RemoteJob, RemoteSpec
from services.admission.jobs import Jobs
from services.admission.steering import Command
from services.contracts.cells import GIVEN_BACK, WITHDRAWN
from services.contracts.codes import ProblemCode
from services.contracts.explanations import EmissionEstimate, StartEstimate
from services.contracts.jobs import JobFootprint, JobProgress
from services.core.domain.errors import TransitionError
from services.core.domain.jobs import GENERATIONS, JobState
from services.db.engine import create_engine
from services.kit.ids import new_id
from services.kit.problems import ProblemError, conflict, not_found, unavailable
from services.kit.repeating import repeat
from services.scheduler.repository.rounds import RENUMBER, UNPLACE
from tests.simulation import model_servers, postgres, system
from tests.simulation.loop import Simulation
from tests.simulation.postgres import SimulatedPostgres

S = JobState
STEPS = 60_000
CALM_S = 1_200
"""A submission that is in doubt is so for ten minutes."""
POLL_S = 4.0
NAMES = ("north", "south", "east", "west", "mid")
ENDED = frozenset({"succeeded", "failed", "cancelled"})


@dataclass
class _Copy:
    """A job in a cell."""

    id: str
    job_id: str
    labels: dict[str, str]
    state: JobState = S.QUEUED
    generation: int = 0
    energy_j: float = 0.0
    ended_at: datetime | None = None
    detail: str | None = None
    is_to_stop: bool = False
    is_forgotten: bool = False
    """Whether it had ended before home was restored from a backup, which does not know that."""

    @property
    def is_given_back(self) -> bool:
        return self.state is S.CANCELLED and self.detail == GIVEN_BACK

    def seen(self) -> RemoteJob:
        footprint = JobFootprint(energy_j=self.energy_j, carbon_gco2=self.energy_j / 10, gpu_s=self.energy_j / 100)
        now = datetime.fromtimestamp(time.time(), UTC)
        return RemoteJob(
            id=self.id,
            spec=RemoteSpec(labels=self.labels),
            state=self.state,
            generation=self.generation,
            gpus=int(self.state is S.RUNNING),
            started_at=now - timedelta(minutes=10) if self.generation else None,
            progress=JobProgress(done=0.1, total=1.0, updated_at=now) if self.generation else None,
            footprint=footprint,
            ended_at=self.ended_at,
            detail=self.detail,
        )

    def become(self, state: JobState) -> None:
        self.state = state
        if state.is_final:
            self.ended_at = datetime.fromtimestamp(time.time(), UTC)


@dataclass
class _Tide:
    """How clean power is at home and in cells, as a share of what it may be; in some runs it turns, and jobs follow."""

    here: float = 1.0
    in_cells: float = 1.0

    @property
    def turns(self) -> bool:
        """Whether it does in this run."""
        return self.here != self.in_cells

    def turn(self) -> None:
        """Have the others be the clean ones, who have room."""
        self.here, self.in_cells = (0.05, 1.0) if self.here == 1.0 else (1.0, 0.05)


@dataclass(eq=False)
class _Cell:
    """Another installation, which is durable and does what it likes."""

    simulation: Simulation
    name: str
    tide: _Tide
    copies: dict[str, _Copy] = field(default_factory=dict[str, _Copy])
    keys: dict[str, str] = field(default_factory=dict[str, str])
    cut_off_until_s: float = 0.0
    refuses: bool = False
    under_way: int = 0

    async def _exchange(self, work: Callable[[], Any]) -> Any:
        draw, loop = self.simulation.choices.below, self.simulation.loop
        await asyncio.sleep(0.01 * draw(4, often=0.2))
        outcome = 0 if self.simulation.is_calm else draw(5, often=0.12)
        if outcome == 1 or (loop.time() < self.cut_off_until_s and not self.simulation.is_calm):
            raise unavailable(self.name)
        if outcome == 3:  # it is under way for long, and nobody waits for it
            self.under_way += 1
            loop.call_later((1.0, 20.0, 120.0, 400.0)[draw(4)], self._arrives, work)
            await asyncio.sleep(1.0)
            raise unavailable(self.name)
        if outcome == 4:
            _try(work)
        answer = work()
        if outcome == 2:
            raise unavailable(self.name)
        return answer

    def _arrives(self, work: Callable[[], Any]) -> None:
        self.under_way -= 1
        _try(work)

    async def live(self, home: str) -> dict[str, RemoteJob]:
        def work() -> dict[str, RemoteJob]:
            found = [each for each in self.copies.values() if each.labels[HOME_LABEL] == home]
            return {each.id: each.seen() for each in found if not each.state.is_final}

        return cast(Any, await self._exchange(work))

    async def made(self, copy: str) -> str | None:
        def work() -> str | None:
            return next((each.id for each in self.copies.values() if each.labels[COPY_LABEL] == copy), None)

        return cast(Any, await self._exchange(work))

    async def submit(self, body: bytes, key: str) -> str:
        def work() -> str:
            if self.refuses:  # as where no node has such GPUs any more, whatever was accepted before
                raise ProblemError(422, ProblemCode.GANG_IMPOSSIBLE, "No node has them.")
            if key not in self.keys:
                labels = orjson.loads(body)["labels"]
                made = _Copy(new_id("job"), labels[COPY_LABEL].partition(".")[0], labels)
                self.copies[made.id] = made
                self.keys[key] = made.id
            return self.keys[key]

        return cast(Any, await self._exchange(work))

    async def job(self, remote_id: str) -> RemoteJob:
        return cast(Any, await self._exchange(lambda: self._copy(remote_id).seen()))

    async def steer(self, remote_id: str, command: str) -> RemoteJob:
        def work() -> RemoteJob:
            copy = self._copy(remote_id)
            if not self.simulation.is_calm and self.simulation.choices.below(3) == 1:
                self._turn(copy)  # it starts at the last moment
            if command == Command.WITHDRAW and copy.generation:
                raise conflict("It has been started.")
            if copy.state.is_final and not (
                copy.state is S.CANCELLED and command in ("cancel", "withdraw", "give-back")
            ):
                raise conflict(f"It has {copy.state}.")
            if command == Command.GIVE_BACK and copy.state is S.RUNNING:
                copy.is_to_stop = True
            elif not copy.state.is_final:
                copy.become({"hold": S.HELD, "release": S.QUEUED}.get(command, S.CANCELLED))
                copy.detail = {Command.WITHDRAW: WITHDRAWN, Command.GIVE_BACK: GIVEN_BACK}.get(Command(command))
            return copy.seen()

        return cast(Any, await self._exchange(work))

    async def terms(self, remote_id: str) -> tuple[str, str, float] | None:
        return cast(Any, await self._exchange(lambda: ("NO", "average_direct", 1.2)))

    async def estimate(self, body: bytes) -> StartEstimate:
        tide = self.tide
        return cast(
            Any, await self._exchange(lambda: _estimate(self.simulation, tide.in_cells, suits=not self.refuses))
        )

    def _copy(self, remote_id: str) -> _Copy:
        if remote_id not in self.copies:
            raise not_found("job")
        return self.copies[remote_id]

    async def run(self) -> None:
        """Start, stop and end jobs."""
        draw = self.simulation.choices.below
        while True:
            await asyncio.sleep(2.0 + draw(3))
            for copy in self.copies.values():
                self._turn(copy)
            if self.simulation.is_calm or self.tide.in_cells < 1.0:
                self.refuses = False
            elif draw(5) == 1:
                self.refuses = not self.refuses
            elif not self.tide.turns and draw(12) == 1:
                self.cut_off_until_s = self.simulation.loop.time() + (5.0, 60.0, 700.0)[draw(3)]

    def _turn(self, copy: _Copy) -> None:
        draw = self.simulation.choices.below
        if copy.state is S.QUEUED and (draw(3) == 1) is not self.simulation.is_calm:
            copy.state, copy.generation = S.RUNNING, copy.generation + 1
        elif copy.state is S.RUNNING and copy.is_to_stop and draw(2):
            copy.become(S.CANCELLED)
            copy.detail = GIVEN_BACK
        elif copy.state is S.RUNNING:
            copy.energy_j += 1e6  # so much that what is left pays for a move
            way = draw(6 if self.simulation.is_calm else 60)
            if way < 2:
                copy.become((S.SUCCEEDED, S.FAILED)[way])
            elif way == 2 and not self.simulation.is_calm:
                copy.state = S.QUEUED
        elif copy.state.is_final and copy.generation and draw(4) == 1 and copy.energy_j % 1e6 < 4_000:
            copy.energy_j += 10.0  # the last interval arrives after the end


def _try(work: Callable[[], Any]) -> None:
    try:
        work()
    except ProblemError:
        return


def _estimate(simulation: Simulation, share: float, *, suits: bool) -> StartEstimate:
    draw = simulation.choices.below
    now = datetime.fromtimestamp(time.time(), UTC)
    run = EmissionEstimate(
        starts_at=now,
        zone="NO",
        signal="average_direct",
        intensity_gco2_per_kwh=(100.0, 20.0, 400.0)[draw(3)] * share,
        carbon_gco2_per_hour=(10.0, 50.0, 200.0, 1_000.0)[draw(4)] * share,
    )
    return StartEstimate(
        policy="joint",
        starts_now=bool(draw(2)) or share < 1.0,
        gpus=1,
        placement=[],
        free_gpus=1,
        suitable_gpus=int(suits),
        waiting_jobs=0,
        now=run,
        assumptions=[],
    )


class World(system.World):
    """Also the cells, and the jobs that were started at home."""

    cells: dict[str, _Cell]
    tide: _Tide
    at_home: set[str]
    made: list[str]
    held: set[str]
    backup: dict[str, str]

    def restore(self) -> None:
        """Have home know what it knew when the backup was made: what ran there is queued, and no admission runs on."""
        for running in self.running.values():
            self.kill(running)
        self.database.restart()
        self.database.rows("DELETE FROM allocations")
        for table, rows in self.backup.items():
            filled = f"INSERT INTO {table} SELECT * FROM json_populate_recordset(NULL::{table}, $rows${rows}$rows$)"
            self.database.rows(f"DELETE FROM {table}; {filled}")
        self.database.rows(f"{UNPLACE}; {RENUMBER.replace('$1', str(GENERATIONS))}")
        for state, wish in _LEAVES.items():  # as the scheduler has it of gangs that are lost
            ended_at = "now()" if state == "cancelled" else "NULL"
            back = f"UPDATE jobs SET state = '{state}', hold_requested = false, ended_at = {ended_at}"
            self.database.rows(f"{back} WHERE coalesce(cell, '') = '' AND state = 'running' AND {wish}")
        known = {str(row[0]) for row in self.database.rows("SELECT id FROM jobs")}
        self.made = [each for each in self.made if each in known]
        self.at_home.clear()
        for copy in (copy for cell in self.cells.values() for copy in cell.copies.values()):
            copy.is_forgotten = copy.state.is_final or copy.job_id not in known


async def _begin(world: World) -> Jobs:
    engine = create_engine(postgres.URL, application_name="admission")

    async def here(tenant_id: str, body: bytes) -> StartEstimate:
        draw = world.simulation.choices.below
        if not world.simulation.is_calm and draw(8) == 1:
            raise unavailable("The scheduler")
        return _estimate(world.simulation, world.tide.here, suits=draw(3) > 0 or world.tide.turns)

    def connect(name: str, url: str, key: bytes) -> RemoteCell:
        return cast(Any, world.cells[name])

    placing = Placing(engine, connect, here, lambda: None, again_s=4.0)
    world.simulation.loop.create_task(repeat(placing.turn, POLL_S, failed="cells.not_followed"))
    return Jobs(engine, lambda: None)


def play(simulation: Simulation) -> Coroutine[Any, Any, None]:
    """Users submit jobs that may run in any cell, cancel and hold some; at the end each ran in one place at most."""
    system.server()
    return _play(simulation)


async def _play(simulation: Simulation) -> None:
    draw = simulation.choices.below
    simulation.most_steps = STEPS
    database = SimulatedPostgres(simulation, system.server())
    try:
        nothing = cast(Any, SimpleNamespace(all={}, agents={}))
        world = World(simulation, database, nothing, nothing, nothing)
        names = NAMES[: (2, 5)[draw(2)]]
        world.tide = _Tide()
        world.cells = {name: _Cell(simulation, name, world.tide) for name in names}
        if draw(2) == 1:
            world.tide.turn()
        world.at_home, world.made, world.held, world.backup = set(), [], set(), {}
        database.rows("INSERT INTO tenants (id, limits) VALUES ('t', '{}') ON CONFLICT DO NOTHING")
        for name in names:
            database.rows(
                f"INSERT INTO cells (name, url, key, home, tenant_id) VALUES ('{name}', 'http://x', '', 'me', 't')"
            )
        database.trouble(3)
        world.most_deaths = (3, 0, 8)[draw(3)]
        world.has_two = "admission"
        simulation.holds("processes die", world.step)
        simulation.holds("at most one installation runs a job", lambda: _twice(world))
        processes = [
            simulation.loop.create_task(world.keep(name, functools.partial(_begin, world)))
            for name in ("admission", "admission" + system.SECOND)[: 1 + draw(2)]
        ]
        if len(processes) == 1:
            world.has_two = None
        living = [simulation.loop.create_task(each.run()) for each in world.cells.values()]
        living.append(simulation.loop.create_task(_schedule(world)))
        users = [simulation.start(_use(world)) for _ in range(1 + draw(2))]
        disturbing = simulation.loop.create_task(_disturb(world))
        await asyncio.wait(users)
        await asyncio.sleep(30.0 * draw(6))
        disturbing.cancel()
        world.calm_down()
        database.rows("UPDATE cells SET draining = false")
        left: list[Any] = []
        for _ in range(0, CALM_S, 10):
            await asyncio.sleep(10)
            left = database.rows("SELECT id, state, cell, reason, detail FROM jobs WHERE ended_at IS NULL")
            if not left:
                break
            for job_id, state, *_ in left:
                if state == "held":
                    simulation.check("nothing is held that nobody holds", job_id in world.held, str(job_id))
                    await _ask(world, str(job_id), Command.RELEASE)
        simulation.check("every job ends", not left, str(left))
        await asyncio.sleep(120)
        _check(world)
        for task in (*processes, *living):
            task.cancel()
    finally:
        database.close()


async def _ask(world: World, job_id: str, command: Command) -> None:
    if command is Command.HOLD:
        world.held.add(job_id)
    with suppress(TransitionError, ProblemError):
        await model_servers.insist(world, "admission", lambda it: it.steer(system.OPERATOR, job_id, command))


def _twice(world: World) -> str | None:
    """Return a job that was started in two places, of which none has given it back."""
    started = [*world.at_home]
    copies = (copy for cell in world.cells.values() for copy in cell.copies.values() if not copy.is_forgotten)
    started += [copy.job_id for copy in copies if copy.generation and not copy.is_given_back]
    return next((each for each in started if started.count(each) > 1), None)


def _check(world: World) -> None:
    """Check that jobs have ended as their copies did, and that what these used is noted once."""
    check = world.simulation.check
    rows = {str(row[0]): row for row in world.database.rows("SELECT id, state, cell FROM jobs")}
    check("accepted is kept", set(rows) == set(world.made), f"{set(world.made) ^ set(rows)}")
    used: dict[str, float] = {
        str(row[0]): float(row[1] or 0.0)
        for row in world.database.rows("SELECT job_id, sum(energy_j) FROM cell_energy GROUP BY job_id")
    }
    for cell in world.cells.values():
        for copy in cell.copies.values():
            if copy.is_forgotten:
                continue
            check("no copy is left behind", copy.state.is_final, f"{copy}")
            if copy.generation and not copy.is_given_back:
                state, where = rows[copy.job_id][1:]
                check("a job ends as its copy", (str(state), where) == (copy.state.value, cell.name), f"{copy} {state}")
    copies = [copy for cell in world.cells.values() for copy in cell.copies.values()]
    for job_id in {copy.job_id for copy in copies if copy.generation and not copy.is_forgotten}:
        of_job = [copy for copy in copies if copy.job_id == job_id]
        late_j = 10.0 * 500  # what became known after the end was settled is not noted
        known_j = sum(copy.energy_j - late_j for copy in of_job if not copy.is_forgotten)
        most_j, noted = sum(copy.energy_j for copy in of_job), used.get(job_id, 0.0)
        check("energy is noted once", known_j <= noted <= most_j, f"{of_job}: {noted}")
    for job_id in world.at_home:
        check("a job of ours ends here", not rows[job_id][2], f"{rows[job_id]}")


_JOB = """
INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at, cell)
VALUES ('{id}', 't', 'j', 'default', '{{}}',
        '{{"name": "j", "command": ["x"], "cells": {cells}, "may_move": {may_move}, "checkpoint_dir": "/c",
          "gpus": {{"min": 1}}}}', 'queued', now(), '')
"""


async def _use(world: World) -> None:
    """Submit jobs, and have some of them cancelled, held and released."""
    draw = world.simulation.choices.below
    for _ in range(1 + draw(4)):
        await asyncio.sleep(1.0 * draw(20))
        job_id = new_id("job")
        cells = ('["any"]', '["north"]', '["south", "north"]')[draw(3)]
        world.database.rows(_JOB.format(id=job_id, cells=cells, may_move=("false", "true", "true", "true")[draw(4)]))
        world.made.append(job_id)
        for _ in range(draw(3)):
            await asyncio.sleep(2.0 * draw(15))
            command = (Command.CANCEL, Command.HOLD, Command.RELEASE)[draw(3)]
            await _ask(world, job_id, command)


_START = """
WITH started AS (
    UPDATE jobs SET state = 'running', generation = generation + 1, started_at = now() WHERE id IN (
        SELECT id FROM jobs WHERE cell IS NULL AND state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id, generation
), gang AS (
    INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, running_at)
    SELECT id || '.' || generation, id, generation, 'running', 1, '[]', 1, now() FROM started
), progress AS (
    INSERT INTO job_progress (job_id, done, total) SELECT id, 0.1, 1 FROM started ON CONFLICT DO NOTHING
), used AS (
    INSERT INTO job_footprints SELECT id, 1e8, 1e8, 0, 1e7, 1e6 FROM started ON CONFLICT DO NOTHING
)
SELECT id FROM started
"""

_STOP = """
WITH stopped AS (
    UPDATE jobs SET state = '{state}', hold_requested = false, ended_at = {ended_at}
     WHERE id IN (SELECT id FROM jobs WHERE id = '{id}' AND state = 'running' AND {which} FOR UPDATE SKIP LOCKED)
    RETURNING id
)
UPDATE allocations a SET state = 'ended' FROM stopped WHERE a.job_id = stopped.id RETURNING a.job_id
"""


_LEAVES = {
    "cancelled": "cancel_requested",
    "held": "hold_requested AND NOT cancel_requested",
    "queued": "NOT (hold_requested OR cancel_requested)",
}
"""What becomes of a job that is to move and is stopped, by what its user wants."""


async def _schedule(world: World) -> None:
    """Start, stop and end jobs at home, as a scheduler does that knows what is its own."""
    draw = world.simulation.choices.below
    while True:
        await asyncio.sleep(3.0 + draw(4))
        if world.tide.turns and draw(6) == 1:
            world.tide.turn()
        if draw(2) or world.simulation.is_calm:
            world.at_home.update(str(row[0]) for row in world.database.rows(_START))
        for job_id in sorted(world.at_home):
            way = draw(3 if world.simulation.is_calm else 40 if world.tide.turns else 8)
            if (way == 1) is not world.simulation.is_calm:
                world.database.rows(_STOP.format(state="succeeded", ended_at="now()", id=job_id, which="true"))
            else:
                for state, wish in _LEAVES.items():
                    ended_at = "now()" if state == "cancelled" else "NULL"
                    leaves = f"cell = '' AND {wish}"
                    if world.database.rows(_STOP.format(state=state, ended_at=ended_at, id=job_id, which=leaves)):
                        world.at_home.discard(job_id)


async def _disturb(world: World) -> None:
    """Restart the database, and drain cells now and then."""
    draw = world.simulation.choices.below
    for at in itertools.count():
        await asyncio.sleep(2.0 * (1 + draw(8)))
        match draw(5, often=0.6):
            case 1:
                world.database.restart()
            case 2:
                free = f"SELECT name FROM cells WHERE name = '{NAMES[at % len(world.cells)]}' FOR UPDATE SKIP LOCKED"
                world.database.rows(f"UPDATE cells SET draining = NOT draining WHERE name IN ({free})")
            case 3 if not world.backup:
                tables = ("jobs", "cell_jobs", "cell_energy")
                found = "SELECT coalesce(json_agg(t), '[]') FROM {} t"
                world.backup = {each: str(world.database.rows(found.format(each))[0][0]) for each in tables}
            case 3 if not any(cell.under_way for cell in world.cells.values()):
                world.restore()
                return
            case _:
                pass
