"""What telemetry takes in: heartbeats and energy reports of 1,250 nodes of 8 GPUs, two gangs on each.

    ./test --bench heartbeats

At the default interval of 2 s, such a cluster sends 625 heartbeats and as many energy intervals a second. Measured are
each of them as fast as 32 connections can; both together at that pace, whatever the answers take; and many more than
can be answered, which are to be refused with a time to come back, without memory growing, and leave nothing behind.
Telemetry runs as one process of its own; the nodes share this one, so that two cores carry telemetry, PostgreSQL and
the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import psutil

from services.kit.http import new_session
from tests.benchmarks.results import write_result
from tests.integration.plant import Plant, a_plant
from tests.support.control_plane import JOIN_TOKEN, FakeAgent, usage
from tests.support.servers import postgres_server, valkey_server

NODES, GPUS, CONNECTIONS, SECONDS = 1_250, 8, 32, 5.0
INTERVAL_S, PACED_S = 2.0, 20.0
AT_ONCE = 3_000
"""So many requests are under way at any moment of the overload: three times what a process works on."""

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
    async with a_plant(postgres_url, redis_url) as plant, new_session(AT_ONCE) as session:
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
            "needed_per_s": NODES / INTERVAL_S,
            "heartbeats": await _rate(agents, posts.heartbeat, plant),
            "energy_intervals": await _rate(agents, posts.energy, plant),
            "both_at_their_pace": await _paced(agents, posts, plant, PACED_S),
            "overload": await _overload(agents, posts, plant),
            "after_overload": await _paced(agents, posts, plant, 2 * INTERVAL_S),
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

    async def offer(self, agent: FakeAgent) -> tuple[int, bool]:
        """Send a heartbeat; return the status of the answer, and whether it says when to come back."""
        url, headers = f"{self._url}/v1/nodes/{agent.node_id}/heartbeat", {"authorization": f"Bearer {agent.token}"}
        async with self._session.post(url, json=agent.heartbeat(), headers=headers) as answer:
            await answer.read()
            return answer.status, answer.headers.get("retry-after", "").isdigit()

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


async def _paced(agents: list[FakeAgent], posts: _Posts, plant: Plant, seconds: float) -> dict[str, float]:
    """Send both reports of each node every two seconds, spread evenly, for so long."""
    latencies_ms: list[float] = []
    sending: set[asyncio.Task[None]] = set()

    async def timed(send: Send, agent: FakeAgent) -> None:
        sent = time.perf_counter()
        await send(agent)
        latencies_ms.append((time.perf_counter() - sent) * 1e3)

    before_s, began = _cpu_s(plant), time.perf_counter()
    for at in range(round(seconds / INTERVAL_S * len(agents))):
        due = began + at * INTERVAL_S / len(agents)
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        for send in (posts.heartbeat, posts.energy):
            sending.add(task := asyncio.create_task(timed(send, agents[at % len(agents)])))
            task.add_done_callback(sending.discard)
    await asyncio.gather(*sending)
    took_s, after_s = time.perf_counter() - began, _cpu_s(plant)
    marks, pairs = statistics.quantiles(latencies_ms, n=100), len(latencies_ms) / 2
    telemetry, database = ((after - before) / pairs for after, before in zip(after_s, before_s, strict=True))
    return {
        "of_each_per_s": round(pairs / took_s, 1),
        "p50_ms": round(marks[49], 1),
        "p99_ms": round(marks[98], 1),
        "telemetry_cores_at_pace": round(telemetry * len(agents) / INTERVAL_S, 3),
        "database_cores_at_pace": round(database * len(agents) / INTERVAL_S, 3),
        "telemetry_mib": _mib(plant),
    }


async def _overload(agents: list[FakeAgent], posts: _Posts, plant: Plant) -> dict[str, float]:
    """Keep ``AT_ONCE`` heartbeats under way, for each of which another is sent as soon as it is answered."""
    answers: Counter[tuple[int, bool]] = Counter()
    began, before_mib, most_mib = time.perf_counter(), _mib(plant), 0.0

    async def work(agent: FakeAgent) -> None:
        nonlocal most_mib
        while time.perf_counter() < began + SECONDS:
            answers[await posts.offer(agent)] += 1
            if answers.total() % 1_000 == 0:
                most_mib = max(most_mib, _mib(plant))

    await asyncio.gather(*(work(agents[at % len(agents)]) for at in range(AT_ONCE)))
    assert set(answers) <= {(200, False), (503, True)}, answers
    took_s = time.perf_counter() - began
    return {
        "offered_per_s": round(answers.total() / took_s, 1),
        "answered_per_s": round(answers[200, False] / took_s, 1),
        "told_to_come_back_per_s": round(answers[503, True] / took_s, 1),
        "telemetry_mib_before": before_mib,
        "telemetry_mib_most": max(most_mib, _mib(plant)),
    }


def _mib(plant: Plant) -> float:
    """Return the resident memory of telemetry, MiB."""
    return round(psutil.Process(plant.processes[0].pid).memory_info().rss / 2**20, 1)


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
    for kind in ("heartbeats", "energy_intervals", "both_at_their_pace", "overload", "after_overload"):
        print(f"{kind:<20}" + "  ".join(f"{name} {value}" for name, value in figures[kind].items()))
    write_result("heartbeats", figures)


if __name__ == "__main__":
    main()
