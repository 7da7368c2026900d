"""What telemetry takes in: heartbeats and energy reports of 625 nodes of 8 GPUs, two gangs on each.

    ./test --bench heartbeats

At the default interval of 2 s, such a cluster sends 312 heartbeats and as many energy intervals a second. Telemetry
runs as one process of its own; the nodes share this one, so that two cores carry telemetry, PostgreSQL and the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import psutil

from services.kit.http import new_session
from tests.benchmarks.results import write_result
from tests.integration.plant import Plant, a_plant
from tests.support.control_plane import JOIN_TOKEN, FakeAgent, usage
from tests.support.servers import postgres_server, valkey_server

NODES, GPUS, CONNECTIONS, SECONDS = 625, 8, 32, 5.0

FILL = """
WITH gangs AS (
    SELECT n, g, 'job_' || lpad((2 * n + g)::text, 26, '0') AS job_id
    FROM generate_series(0, $1 - 1) n, generate_series(0, 1) g
), made AS (
    INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, generation)
    SELECT job_id, 't', 'j', 'default', '{}', '{}', 'running', 1 FROM gangs
), held AS (
    INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port)
    SELECT job_id || '.1', job_id, 1, 'running', 4, jsonb_build_array(jsonb_build_object(
        'node_id', 'n' || n, 'devices', jsonb_build_array(4 * g, 4 * g + 1, 4 * g + 2, 4 * g + 3))), 29500 FROM gangs
)
INSERT INTO device_claims SELECT 'n' || n, 4 * g + d, job_id || '.1' FROM gangs, generate_series(0, 3) d
"""

Send = Callable[[FakeAgent], Awaitable[None]]


async def measure(postgres_url: str, redis_url: str) -> dict[str, Any]:
    """Return rates and latencies."""
    async with a_plant(postgres_url, redis_url) as plant, new_session(CONNECTIONS) as session:
        await plant.start("telemetry", WATTSHIFT_LOG_LEVEL="WARNING")
        # The foreign keys are checked as rows are written: the claims wait for their gangs.
        await plant.ask("ALTER TABLE allocations DROP CONSTRAINT allocations_job_id_fkey")
        await plant.ask("ALTER TABLE device_claims DROP CONSTRAINT device_claims_allocation_id_fkey")
        await plant.ask(FILL, NODES)
        agents = [FakeAgent(plant.http, f"n{number}", GPUS, base_url=plant.telemetry_url) for number in range(NODES)]
        posts = _Posts(session, plant)
        await _each(agents, posts.register)
        await _each(agents, posts.heartbeat)
        return {
            "nodes": NODES,
            "connections": CONNECTIONS,
            "needed_per_s": NODES / 2,
            "heartbeats": await _rate(agents, posts.heartbeat, plant),
            "energy_intervals": await _rate(agents, posts.energy, plant),
        }


class _Posts:
    def __init__(self, session: aiohttp.ClientSession, plant: Plant) -> None:
        self._session = session
        self._url = plant.telemetry_url
        self._began_s = time.time()

    async def register(self, agent: FakeAgent) -> None:
        agent.token = (await self._post("register", agent.registration, JOIN_TOKEN))["token"]

    async def heartbeat(self, agent: FakeAgent) -> None:
        if not agent.ranks:
            number = int(agent.node_id[1:])
            for gang in (2 * number, 2 * number + 1):
                agent.say(f"job_{gang:026d}.1", "running", progress_done=1.0)  # type: ignore[arg-type]
        for rank in agent.ranks.values():
            rank["progress_done"] += 1
        reply = await self._post(f"{agent.node_id}/heartbeat", agent.heartbeat(), agent.token)
        assert len(reply["allocations"]) == 2

    async def energy(self, agent: FakeAgent) -> None:
        start_s = self._began_s + 2 * agent.sequence
        usages = [usage(gang, 800, gpus=4, done=agent.sequence) for gang in agent.ranks]
        interval = agent.interval(start_s, start_s + 2, *usages)
        receipt = await self._post(f"{agent.node_id}/energy", {"intervals": [interval]}, agent.token)
        assert receipt["accepted"] == 1

    async def _post(self, path: str, body: Any, token: str) -> Any:
        headers = {"authorization": f"Bearer {token}"}
        async with self._session.post(f"{self._url}/v1/nodes/{path}", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


async def _each(agents: list[FakeAgent], send: Send) -> None:
    queue = list(agents)

    async def work() -> None:
        while queue:
            await send(queue.pop())

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def _rate(agents: list[FakeAgent], send: Send, plant: Plant) -> dict[str, float]:
    latencies_ms: list[float] = []
    before_s = _cpu_s(plant)
    began = time.perf_counter()

    async def work(mine: list[FakeAgent]) -> None:
        while True:
            for agent in mine:
                sent = time.perf_counter()
                if sent - began > SECONDS:
                    return
                await send(agent)
                latencies_ms.append((time.perf_counter() - sent) * 1e3)

    await asyncio.gather(*(work(agents[at::CONNECTIONS]) for at in range(CONNECTIONS)))
    after_s = _cpu_s(plant)
    marks = statistics.quantiles(latencies_ms, n=100)
    return {
        "per_s": round(len(latencies_ms) / (time.perf_counter() - began), 1),
        "p50_ms": round(marks[49], 1),
        "p99_ms": round(marks[98], 1),
        "telemetry_cpu_ms": round(1e3 * (after_s[0] - before_s[0]) / len(latencies_ms), 2),
        "database_cpu_ms": round(1e3 * (after_s[1] - before_s[1]) / len(latencies_ms), 2),
    }


def _cpu_s(plant: Plant) -> tuple[float, float]:
    """Return the CPU time used so far by telemetry, and by PostgreSQL's sessions and helpers, seconds."""
    used = [0.0, 0.0]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used[process.pid != plant.processes[0].pid] += times.user + times.system
    return used[0], used[1]


def main() -> None:
    """Measure, print and write the result."""
    with postgres_server() as postgres_url, valkey_server() as redis_url:
        figures = asyncio.run(measure(postgres_url, redis_url))
    for kind in ("heartbeats", "energy_intervals"):
        print(f"{kind:<18}" + "  ".join(f"{name} {value}" for name, value in figures[kind].items()))
    write_result("heartbeats", figures)


if __name__ == "__main__":
    main()
