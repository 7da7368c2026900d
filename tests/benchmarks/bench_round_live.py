"""A live round over 10,000 jobs and 5,000 GPUs, and 100,000 and 10,000 or 80,000: load from PostgreSQL, decide, apply.

    ./test --bench round_live

Half of the GPUs are taken by running jobs, the rest of the jobs wait. Reports each part's time in ms, and the CPU time
of the process, which tells more where other work shares the cores; the first round, which starts what fits, is reported
apart from the following ones. Before each of these, every running job uses energy, and a hundred jobs are submitted.
The resident memory of the process is that after these rounds, and after twenty more.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import psutil

from services.core.cycle.snapshot import Trigger
from tests.benchmarks.results import write_result
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database, postgres_server, valkey_server

NODES, GPUS_PER_NODE, ROUNDS, NEW = 625, 8, 5, 100
MORE_ROUNDS = 20
"""So many more are held, for the memory of the process to grow in, if it does."""
SIZES = ((10_000, NODES), (100_000, 1_250), (100_000, 10_000))
"""Jobs and nodes."""

FILL = """
INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at, generation)
SELECT 'job_' || lpad(n::text, 26, '0'), 'default', 'j', 'default', '{}',
       jsonb_build_object('name', 'j', 'command', '["true"]'::jsonb,
                          'gpus', jsonb_build_object('min', 1 + n % 4, 'max', 8 + n % 4 , 'step', 1)),
       CASE WHEN n <= $2 THEN 'running' ELSE 'queued' END, now(), (n <= $2)::int
  FROM generate_series($3::int, $1) AS n
"""

USE = """
INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s)
SELECT id, 1, 1, 0, 1, 1 FROM jobs WHERE state = 'running'
ON CONFLICT (job_id) DO UPDATE SET energy_j = job_footprints.energy_j + 1
"""

NODES_SQL = """
INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices, lease_until)
SELECT 'node-' || lpad(n::text, 5, '0'), '', '10.0.0.1', '', 'Z', 'simulated', false, 'modelled',
       (SELECT jsonb_agg(jsonb_build_object('index', d, 'model', 'A100', 'memory_gib', 40.0))
          FROM generate_series(0, $2 - 1) AS d), now() + interval '1 hour'
  FROM generate_series(1, $1) AS n
"""

RUNNING_SQL = """
WITH made AS (
    INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port)
    SELECT j.id || '.1', j.id, 1, 'running', (j.spec #>> '{gpus,min}')::int,
           jsonb_build_array(jsonb_build_object(
               'node_id', 'node-' || lpad((1 + n / 2)::text, 5, '0'),
               'devices', (SELECT jsonb_agg(4 * (n % 2) + d)
                             FROM generate_series(0, (j.spec #>> '{gpus,min}')::int - 1) AS d))),
           29500
      FROM (SELECT *, row_number() OVER (ORDER BY id) - 1 AS n FROM jobs WHERE state = 'running') AS j
    RETURNING id, shares
)
INSERT INTO device_claims (node_id, device, allocation_id)
SELECT shares -> 0 ->> 'node_id', d::int, id FROM made, jsonb_array_elements_text(shares -> 0 -> 'devices') AS d
"""


async def measure(database_url: str, redis_url: str, jobs: int, nodes: int) -> dict[str, Any]:
    """Return the times of rounds on a database filled as the module says."""
    running = 2 * nodes
    async with a_world(database_url, redis_url, policy="green") as world:
        await world.fetch(NODES_SQL, nodes, GPUS_PER_NODE)
        await world.fetch(FILL, jobs, running, 1)
        await world.fetch(RUNNING_SQL)
        await world.fetch("ANALYZE")
        await world.scheduler.prepare()
        first = await _round(world, Trigger.ACTIVE)
        await _round(world, Trigger.ACTIVE)  # reads again what the first has written to every job
        later, passive = list[dict[str, float]](), list[dict[str, float]]()
        for at in range(2 * ROUNDS):
            await world.fetch(USE)
            await world.fetch(FILL, jobs + (at + 1) * NEW, running, jobs + at * NEW + 1)
            if at < ROUNDS:
                later.append(await _round(world, Trigger.ACTIVE))
            else:
                passive.append(await _round(world, Trigger.PASSIVE))
        before_mib = _mib()
        for at in range(MORE_ROUNDS):
            await world.fetch(USE)
            await _round(world, Trigger.PASSIVE if at % 2 else Trigger.ACTIVE)
    return {
        "jobs": jobs,
        "gpus": nodes * GPUS_PER_NODE,
        "first": first,
        "active_median": _median(later),
        "passive_median": _median(passive),
        "mib_after_12_rounds": before_mib,
        f"mib_after_{MORE_ROUNDS}_more": _mib(),
    }


async def _round(world: World, trigger: Trigger) -> dict[str, float]:
    cpu_s = time.process_time()
    held = await world.scheduler.hold(trigger)
    cpu_s = time.process_time() - cpu_s
    assert held is not None, "the plan was never accepted"
    parts = {"load_ms": held.load_ms, "decide_ms": held.decide_ms, "apply_ms": held.apply_ms}
    return {**parts, "total_ms": sum(parts.values()), "cpu_ms": cpu_s * 1e3, "starts": held.applied.starts}


def _mib() -> float:
    """Return the resident memory of this process, MiB."""
    return round(psutil.Process().memory_info().rss / 2**20, 1)


def _median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {part: round(statistics.median(one[part] for one in rounds), 1) for part in rounds[0]}


def main() -> None:
    """Measure, print and write the result."""
    with postgres_server() as postgres_url, valkey_server() as redis_url:
        figures = [asyncio.run(measure(fresh_database(postgres_url), redis_url, *size)) for size in SIZES]
    for each in figures:
        print(f"{each['jobs']:,} jobs, {each['gpus']:,} GPUs, in ms:")
        for kind in ("first", "active_median", "passive_median"):
            print(f"{kind:<16}" + "  ".join(f"{part} {value:8.1f}" for part, value in each[kind].items()))
        print("  ".join(f"{name} {value}" for name, value in each.items() if name.startswith("mib")))
    write_result("round_live", {"sizes": figures})


if __name__ == "__main__":
    main()
