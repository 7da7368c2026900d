"""Explaining a job among 10,000 on 5,000 GPUs, and simulating that queue under every policy.

    ./test --bench explain

The queue is that of ``bench_round_live``. Reports the time of an explanation of the last waiting job and of a running
one, of reading the live state for the what-if service, and of each policy's simulation, in seconds; ``cpu``: of this
process, without PostgreSQL.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from services.contracts.identity import Identity, Role
from services.core.cycle.snapshot import Trigger
from services.core.policies.registry import POLICIES
from services.kit.http import ServiceClient, new_session
from services.scheduler.explaining.explanations import Explanations
from services.scheduler.planning.dry_run import LiveView
from services.scheduler.power.hooks import NoHook
from services.simulator.live import live_document, parameters_of, read_live
from tests.benchmarks.bench_round_live import FILL, GPUS_PER_NODE, NODES_SQL, RUNNING_SQL, SIZES
from tests.benchmarks.results import write_result
from tests.scheduler.world import a_world
from tests.support.servers import fresh_database, postgres_server, valkey_server

TIMES = 5
JOBS, NODES = SIZES[0]


async def measure(database_url: str, redis_url: str) -> tuple[dict[str, Any], str]:
    """Return the times of explanations, and the live state as JSON."""
    async with a_world(database_url, redis_url, policy="green") as world, new_session() as session:
        await world.fetch(NODES_SQL, NODES, GPUS_PER_NODE)
        await world.fetch(FILL, JOBS, 2 * NODES, 1)
        await world.fetch(RUNNING_SQL)
        await world.fetch("ANALYZE")
        await world.scheduler.prepare()
        await world.scheduler.hold(Trigger.PASSIVE)  # keeps what it predicts of the jobs, as the live one has long done
        carbon = world.scheduler._carbon
        view = LiveView(world.database, world.settings, carbon, NoHook())
        away = ServiceClient(session, "http://127.0.0.1:1", "The simulator")
        explanations = Explanations(world.database, view, carbon, away)
        caller = Identity(tenant_id="default", role=Role.USER, key_id="key-1")
        figures: dict[str, Any] = {"jobs": JOBS, "gpus": NODES * GPUS_PER_NODE}
        for name, number in (("waiting_s", JOBS), ("running_s", 1)):
            taken: list[float] = []
            began_cpu_s = time.process_time()
            for _ in range(TIMES):
                began_s = time.perf_counter()
                await explanations.explain(caller, f"job_{number:026d}")
                taken.append(time.perf_counter() - began_s)
            cpu_s = (time.process_time() - began_cpu_s) / TIMES
            figures[name] = {"median": round(statistics.median(taken), 3), "cpu": round(cpu_s, 3)}
        began_s = time.perf_counter()
        state = (await explanations.live_state()).model_dump_json()
        figures["live_state_s"] = round(time.perf_counter() - began_s, 3)
        return figures, state


def simulate_all(state: str) -> dict[str, float | str]:
    """Return the seconds that each policy takes, or why it gave no answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "live"
        path.write_text(state)
        run = read_live(path)
    taken: dict[str, float | str] = {}
    for name in POLICIES:
        began_s = time.perf_counter()
        document = live_document(run, parameters_of(run, {name: {}}), lambda *_: None)
        failure = document["policies"][0].get("failure")
        taken[name] = failure or round(time.perf_counter() - began_s, 2)
    return taken


def main() -> None:
    """Measure, print and write the result."""
    with postgres_server() as postgres_url, valkey_server() as redis_url:
        figures, state = asyncio.run(measure(fresh_database(postgres_url), redis_url))
    print(figures, flush=True)
    figures["policies_s"] = simulate_all(state)
    for name, seconds in figures["policies_s"].items():
        print(f"{name:<16}{seconds}")
    write_result("explain", figures)


if __name__ == "__main__":
    main()
