"""Telemetry and schedulers as real processes, and agents to be that live: they obey commands and can tell a twin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.commands import SetDevices, StartGang, StopGang, command_adapter
from services.contracts.nodes import EndedBy, RankState
from services.contracts.streams import COMMAND_FIELD, command_stream
from services.db.database import Database
from services.kit.redis import connect
from tests.support.carbon import FakeCarbon
from tests.support.control_plane import JOIN_TOKEN, OPERATOR, SERVICE_TOKEN, FakeAgent, eventually, service_headers
from tests.support.ports import Ports
from tests.support.servers import ROOT, fresh_database, http_ready

FAST = {
    "SCHEDULER_ROUND_INTERVAL_S": "3600",
    "SCHEDULER_POLICY": "fifo",
    "SCHEDULER_TICK_S": "0.1",
    "SCHEDULER_PASSIVE_INTERVAL_S": "0.02",
    "SCHEDULER_REPUBLISH_AFTER_S": "0.5",
    "SCHEDULER_LEASE_MARGIN_S": "0.3",
    "TELEMETRY_LEASE_TTL_S": "30",
}


@dataclass
class Twins:
    """Which gang of each job runs where; two gangs of one job at once are twins."""

    running: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)

    def enter(self, job_id: str, allocation_id: str, node_id: str) -> None:
        """A share starts to run."""
        here = self.running.setdefault(job_id, set())
        if any(other != allocation_id or node == node_id for other, node in here):
            self.seen.append(f"{allocation_id} on {node_id} beside {sorted(here)}")
        here.add((allocation_id, node_id))
        self.started[allocation_id] = self.started.get(allocation_id, 0) + 1

    def leave(self, job_id: str, allocation_id: str, node_id: str) -> None:
        """A share runs no more."""
        self.running.get(job_id, set()).discard((allocation_id, node_id))


class LivingAgent(FakeAgent):
    """An agent by the book: starts what was commanded once a reply names it, and stops what a reply no longer names."""

    def __init__(self, plant: Plant, node_id: str, gpus: int) -> None:
        super().__init__(plant.http, node_id, gpus, base_url=plant.telemetry_url)
        for device in self.registration["devices"]:
            device["can_set_power_limit"] = True
        self.settings: dict[str, dict[str, Any]] = {}
        self.plant = plant
        self.known: dict[str, StartGang] = {}
        self.beats_left: dict[str, int] = {}
        self.answers: list[list[str]] = []
        self.is_cut_off = False
        self.is_alive = True
        self._last_command = "0"
        self._lease_until = 0.0

    async def live(self) -> None:
        """Live until told otherwise; whoever does not answer is asked again.

        A flag and no cancellation, which the HTTP client may swallow.
        """
        loop = asyncio.get_running_loop()
        while self.is_alive:
            with contextlib.suppress(RedisError):
                await self._read_commands()
            if not self.is_cut_off:
                asked = loop.time()
                with contextlib.suppress(httpx.HTTPError):
                    await self._beat(asked)
            if loop.time() > self._lease_until:
                self._fence()
            self._work()
            await asyncio.sleep(0.03)

    async def _beat(self, asked: float) -> None:
        if not self.token:
            answer = await self.post("/v1/nodes/register", self.registration, token=JOIN_TOKEN)
            self.token = answer.json()["token"] if answer.status_code == 200 else ""
            return
        for gang, rank in self.ranks.items():
            rank["settings"] = self.settings.get(gang) if gang in self.beats_left else None
        answer = await self.post(f"/v1/nodes/{self.node_id}/heartbeat", self.heartbeat())
        if answer.status_code == 401:
            self.token = ""
        elif answer.status_code == 200:
            self._lease_until = asked + answer.json()["lease_ttl_s"]
            self._obey(answer.json()["allocations"])

    async def _read_commands(self) -> None:
        entries: Any = await self.plant.redis.xrange(command_stream(self.node_id), min=f"({self._last_command}")
        for entry_id, fields in entries:
            self._last_command = entry_id
            match command_adapter.validate_json(fields[COMMAND_FIELD]):
                case StartGang() as start:
                    self.known.setdefault(start.allocation_id, start)
                case StopGang(allocation_id=gang):
                    self._end(gang, EndedBy.STOP)
                case SetDevices(allocation_id=gang, settings=settings) if gang in self.known:
                    if settings.revision > self.settings.get(gang, {"revision": 0})["revision"]:
                        self.settings[gang] = settings.model_dump(mode="json")

    def _obey(self, named: list[str]) -> None:
        self.answers.append(named)
        for gang, start in self.known.items():
            if gang in named and gang not in self.ranks:
                self.plant.twins.enter(start.job_id, gang, self.node_id)
                self.beats_left[gang] = self.plant.beats
                self.say(gang, RankState.RUNNING)
        for gang in [gang for gang in self.ranks if gang not in named]:
            self._end(gang, EndedBy.STOP)
            if self.ranks[gang]["state"] is RankState.EXITED and gang not in named:
                self.known.pop(gang, None)
                del self.ranks[gang]

    def _work(self) -> None:
        for gang, left in list(self.beats_left.items()):
            self.beats_left[gang] = left - 1
            if left <= 1:
                self._end(gang, EndedBy.ITSELF)

    def _end(self, gang: str, ended_by: EndedBy) -> None:
        rank = self.ranks.get(gang)
        if rank is not None and rank["state"] is RankState.EXITED:
            return
        if gang in self.beats_left and (start := self.known.get(gang)):
            self.plant.twins.leave(start.job_id, gang, self.node_id)
        self.beats_left.pop(gang, None)
        self.say(gang, RankState.EXITED, code=0 if ended_by is EndedBy.ITSELF else -15, ended_by=ended_by)

    def _fence(self) -> None:
        for gang in list(self.beats_left):
            self._end(gang, EndedBy.LEASE)

    async def forget_redis(self) -> None:
        """Read commands from the beginning, as after Redis has lost everything."""
        self._last_command = "0"


@dataclass
class Plant:
    """The processes of a test."""

    database_url: str
    redis_url: str
    carbon_url: str
    database: Database
    redis: Redis
    http: httpx.AsyncClient
    ports: Ports
    twins: Twins = field(default_factory=Twins)
    beats: int = 5
    telemetry_port: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def telemetry_url(self) -> str:
        """Where telemetry answers."""
        return f"http://127.0.0.1:{self.telemetry_port}"

    async def start(
        self, name: str, port: int | None = None, *, cut_off: bool = False, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start ``telemetry`` or ``scheduler`` and wait until it is ready; one ``cut_off`` from Redis only lives."""
        if cut_off:
            environment["REDIS_URL"] = "redis://127.0.0.1:1/0"
        port = port or self.ports.take(23_000 + os.getpid() % 2_000)
        if name == "telemetry":
            self.telemetry_port = port
        variables = {
            **os.environ,
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "WATTSHIFT_CARBON_URL": self.carbon_url,
            "WATTSHIFT_SERVICE_TOKEN": SERVICE_TOKEN,
            "WATTSHIFT_NODE_JOIN_TOKEN": JOIN_TOKEN,
            **FAST,
            f"{name.upper()}_PORT": str(port),
            **environment,
        }
        command = [sys.executable, "-P", "-m", f"services.{name}.app"]
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
        self.processes.append(process)

        async def is_ready() -> bool:
            assert process.poll() is None, f"{name} ended with {process.returncode}"
            if cut_off:
                with contextlib.suppress(httpx.HTTPError):
                    return (await self.http.get(f"http://127.0.0.1:{port}/healthz")).is_success
                return False
            return await asyncio.to_thread(http_ready, ("127.0.0.1", port))

        await eventually(is_ready, within_s=90)
        return process

    async def ask(self, query: str, *arguments: Any) -> list[Any]:
        """Return rows of the database."""
        async with self.database.connection() as connection:
            return await connection.fetch(query, *arguments)

    async def states(self) -> dict[str, int]:
        """Return how many jobs are in each state."""
        return {row["state"]: row["n"] for row in await self.ask("SELECT state, count(*) AS n FROM jobs GROUP BY 1")}

    async def broken_rules(self) -> list[str]:
        """Return what telemetry's invariants complain of."""
        answer = await self.http.get(f"{self.telemetry_url}/v1/invariants", headers=service_headers(OPERATOR))
        found = orjson.loads(answer.content)["invariants"]
        return [f"{entry['name']}: {entry['detail']}" for entry in found if not entry["holds"]]

    @asynccontextmanager
    async def agents(self, *sizes: int) -> AsyncIterator[list[LivingAgent]]:
        """Run agents ``n0``, ``n1``, ... with so many GPUs."""
        agents = [LivingAgent(self, f"n{number}", gpus) for number, gpus in enumerate(sizes)]
        tasks = [asyncio.create_task(agent.live()) for agent in agents]
        try:
            yield agents
            assert not [task for task in tasks if task.done()], "an agent died"
        finally:
            for agent in agents:
                agent.is_alive = False
            await asyncio.gather(*tasks, return_exceptions=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """``kill -9``."""
    process.kill()
    process.wait()


@asynccontextmanager
async def a_plant(postgres_url: str, redis_url: str) -> AsyncIterator[Plant]:
    """Yield a plant on an empty database, with no process running yet."""
    database_url = fresh_database(postgres_url)
    async with FakeCarbon().serve() as carbon, httpx.AsyncClient(timeout=60) as http:
        carbon.flat(300.0)
        database, redis = await Database.open(database_url, size=4), connect(redis_url)
        await redis.flushdb()
        plant = Plant(database_url, redis_url, carbon.url, database, redis, http, Ports())
        try:
            yield plant
        finally:
            for process in plant.processes:
                if process.poll() is None:
                    kill(process)
            plant.ports.release()
            await redis.aclose()
            await database.close()
