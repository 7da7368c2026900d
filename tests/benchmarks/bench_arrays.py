"""An array of 10,000 tasks: submitted, read and cancelled over HTTP, and waiting in live rounds.

    ./test --bench arrays

The first part uses the whole stack: gateway, admission, PostgreSQL with fsync, Valkey; single submissions go on while
arrays are submitted, by one client. The second holds live rounds over 10,000 queued tasks and 5,000 free GPUs, once
with a limit of eight, so that all but eight are left out, and once without. All times are medians in ms.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from contextlib import ExitStack
from typing import Any

from services.core.cycle.snapshot import Trigger
from tests.benchmarks.bench_round_live import GPUS_PER_NODE, NODES, NODES_SQL
from tests.benchmarks.bench_submissions import JOB, lift_limits, started
from tests.benchmarks.results import write_result
from tests.scheduler.world import a_world
from tests.support.servers import fresh_database, postgres_server, valkey_server
from wattshift import Client

TASKS, REPEATS, ROUNDS = 10_000, 5, 5

FILL = """
INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at, array_id, array_index, gated)
SELECT 'job_' || lpad(n::text, 26, '0'), 'default', 'j.' || n, 'default', '{}',
       '{"name": "j", "command": ["true"], "gpus": {"min": 8, "max": 8}}', 'queued', now(), 'array_' || repeat('0', 26),
       n, $2::int IS NOT NULL
  FROM generate_series(0, $1 - 1) AS n
"""
ARRAY = """
INSERT INTO job_arrays (id, tenant_id, name, project, labels, spec, tasks, first_index, last_index, max_running)
VALUES ('array_' || repeat('0', 26), 'default', 'j', 'default', '{}', '{}', $1, 0, $1 - 1, $2)
"""


def main() -> None:
    """Measure, print and write the result."""
    with ExitStack() as stack:
        found = started(stack)
        lift_limits(found)
        figures: dict[str, Any] = {"tasks": TASKS, "http": _over_http(found.urls["GATEWAY"], found.admin_key())}
    with postgres_server() as postgres_url, valkey_server() as redis_url:
        for name, limit in (("limit_8", 8), ("no_limit", None)):
            figures[name] = asyncio.run(_rounds(fresh_database(postgres_url), redis_url, limit))
    for part in ("http", "limit_8", "no_limit"):
        print(f"{part:<10}" + "  ".join(f"{name} {value:8.1f}" for name, value in figures[part].items()))
    write_result("arrays", figures)


def _over_http(url: str, key: str) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ("submit_ms", "get_ms", "cancel_ms")}
    alone, beside = _singles(url, key, 2.0), list[float]()
    done = threading.Event()
    singles = threading.Thread(target=lambda: beside.extend(_singles(url, key, None, done)))
    with Client(url, key, timeout_s=120) as client:
        singles.start()
        for _ in range(REPEATS):
            began = time.perf_counter()
            made = client.submit(["python", "train.py"], name="sweep", array=f"0-{TASKS - 1}%8", project="vision")
            submitted = time.perf_counter()
            client.array(made)
            read = time.perf_counter()
            client.cancel_array(made)
            cancelled = time.perf_counter()
            for name, seconds in zip(times, (submitted - began, read - submitted, cancelled - read), strict=True):
                times[name].append(seconds * 1e3)
        done.set()
        singles.join()
    figures = {name: statistics.median(values) for name, values in times.items()}
    return figures | {
        "single_alone_p50_ms": statistics.median(alone),
        "single_alone_max_ms": max(alone),
        "single_beside_p50_ms": statistics.median(beside),
        "single_beside_max_ms": max(beside),
    }


def _singles(url: str, key: str, seconds: float | None, done: threading.Event | None = None) -> list[float]:
    """Submit single jobs one after another; return how long each took, ms."""
    times: list[float] = []
    terms = {name: value for name, value in JOB.items() if name not in ("name", "command", "gpus")}
    until_s = None if seconds is None else time.perf_counter() + seconds
    with Client(url, key, timeout_s=120) as client:
        while not (done is not None and done.is_set()) and (until_s is None or time.perf_counter() < until_s):
            began = time.perf_counter()
            client.submit(["python", "train.py"], name="single", gpus=(1, 4), **terms)
            times.append((time.perf_counter() - began) * 1e3)
    return times


async def _rounds(database_url: str, redis_url: str, limit: int | None) -> dict[str, float]:
    async with a_world(database_url, redis_url, policy="green") as world:
        await world.fetch(NODES_SQL, NODES, GPUS_PER_NODE)
        await world.fetch(ARRAY, TASKS, limit)
        await world.fetch(FILL, TASKS, limit)
        await world.fetch("ANALYZE")
        await world.scheduler.prepare()
        rounds = [await world.scheduler.hold(Trigger.ACTIVE) for _ in range(ROUNDS + 1)]
        turns: list[float] = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            await world.scheduler.turn()
            turns.append((time.perf_counter() - began) * 1e3)
    first, *later = [each for each in rounds if each is not None]
    sums = [each.load_ms + each.decide_ms + each.apply_ms for each in later]
    return {
        "first_round_ms": first.load_ms + first.decide_ms + first.apply_ms,
        "load_ms": statistics.median(each.load_ms for each in later),
        "round_ms": statistics.median(sums),
        "turn_ms": statistics.median(turns),
        "starts": float(first.applied.starts),
    }


if __name__ == "__main__":
    main()
