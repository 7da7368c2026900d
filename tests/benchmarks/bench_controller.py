"""How long the controller of pools takes for one look at 500 instances.

    ./test --bench controller

PostgreSQL, admission, the controller and the one server that all instances stand for share the machine's cores.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from services.serving.controller.controller import Controller
from tests.benchmarks.results import write_result
from tests.support.controlled_pools import Controlled, controlled_pools
from tests.support.servers import fresh_database, postgres_server, valkey_server

INSTANCES, LOOKS, SILENT = 500, 5, 50
HERE = ("here", "one", "SS")


async def measure(database_url: str, redis_url: str, folder: Path) -> dict[str, Any]:
    """Return seconds a look."""
    async with controlled_pools(database_url, redis_url, folder) as house:
        pool = await house.pool({HERE: INSTANCES})
        figures: dict[str, Any] = {"instances": INSTANCES}
        figures["make_s"] = await _look(house.controller)
        figures["submit_s"] = await _look(house.controller)
        await _run(house, pool)
        figures["become_ready_s"] = await _look(house.controller)
        assert len(await house.rows(pool, "ready")) == INSTANCES
        figures["all_asked_s"] = await _looks(house.controller)
        rested = house.another(instance_probe_s=3_600)
        await rested.look()
        figures["none_asked_s"] = await _looks(rested)
        hung = await house.server()
        hung.hangs = asyncio.Event()
        await house.database.execute(
            "UPDATE allocations SET master_port = $1 WHERE id IN (SELECT id FROM allocations LIMIT $2)",
            *(int(hung.url.rpartition(":")[2]), SILENT),
        )
        await house.database.execute(
            "UPDATE pool_instances i SET url = 'http://127.0.0.1:' || a.master_port "
            "FROM allocations a WHERE a.job_id = i.job_id"
        )
        controller = house.another(instance_look_s=1)
        figures["all_asked_some_hang_s"] = await _looks(controller)
        hung.hangs.set()
        figures["drain_s"] = await _drain(house, pool)
        return figures


async def _run(house: Controlled, pool: str) -> None:
    server = await house.server()
    for row in await house.rows(pool, "starting"):
        await house.runs(row["job_id"], server)


async def _drain(house: Controlled, pool: str) -> float:
    await house.plan(pool, {HERE: 0})
    took_s = await _look(house.controller)
    assert await house.rows(pool, "ready") == []
    return took_s


async def _look(controller: Controller) -> float:
    began = time.perf_counter()
    await controller.look()
    return round(time.perf_counter() - began, 3)


async def _looks(controller: Controller) -> float:
    return statistics.median([await _look(controller) for _ in range(LOOKS)])


def main() -> None:
    """Measure, print and write the result."""
    with tempfile.TemporaryDirectory() as folder, postgres_server() as postgres_url, valkey_server() as redis_url:
        figures = asyncio.run(measure(fresh_database(postgres_url), redis_url, Path(folder)))
    print("  ".join(f"{name} {value}" for name, value in figures.items()))
    write_result("controller", figures)


if __name__ == "__main__":
    main()
