"""How long a model of job lengths takes to train on 600,000 jobs, and to predict one job.

The history is read from PostgreSQL and trained on as the worker does, groups of jobs that are not known yet included.
Training may take a minute by the clock, on two cores that nobody else uses. A prediction may take two milliseconds:
hashing the spec, looking it up and writing it down, for one job alone and for each of many that come together. Jobs
recur with group sizes of a heavy tail: most groups are small, few hold most jobs.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from datetime import UTC, datetime
from typing import Any

import numpy as np

from optimizer_service.repository.lengths import read_history
from services.db.database import Database
from services.db.rows import fetch_rows
from services.learning.length_table import LengthTable, learn
from services.scheduler.learning.predicting import Predicting
from services.scheduler.repository.snapshots import SpecRow
from tests.benchmarks.results import write_result
from tests.support.servers import fresh_database, postgres_server

JOBS = 600_000
TRAIN_S, SERVE_MS = 60.0, 2.0

PAST = """
INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, generation, submitted_at, queued_at, ended_at)
SELECT 'job_' || lpad(n::text, 26, '0'), 'tenant-' || g % 200, 'run-' || n, 'p' || u, '{}',
       jsonb_build_object('name', 'run-' || n, 'project', 'p' || u,
                          'command', jsonb_build_array('python', 'train.py', '--config', g)),
       'succeeded', 1, now(), now(), now() - make_interval(secs => $3 - n)
  FROM unnest($1::int[], $2::int[]) WITH ORDINALITY AS past (g, u, n)
"""

GANGS = """
INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, started_at, ended_at, end_reason)
SELECT job_id || '.1', job_id, 1, 'ended', 2, '[]', 0, now() - make_interval(secs => seconds), now(), 'finished'
  FROM (SELECT 'job_' || lpad(n::text, 26, '0') AS job_id, seconds
          FROM unnest($1::float8[]) WITH ORDINALITY AS past (seconds, n)) jobs
"""


async def past(database: Database, rng: np.random.Generator) -> None:
    """Write the history."""
    group = np.minimum(rng.zipf(1.2, JOBS), 5_000_000)
    user = group * 7 % 5 + (rng.random(JOBS) < 0.1)
    length_s = np.exp(np.random.default_rng(4).normal(6, 2, 5_000_001))[group] * np.exp(
        0.05 * rng.standard_normal(JOBS)
    )
    async with database.connection() as connection:
        await connection.execute(PAST, group.tolist(), user.tolist(), float(JOBS), timeout=600)
        await connection.execute(GANGS, length_s.tolist(), timeout=600)
        await connection.execute("ANALYZE", timeout=600)


async def served_ms(database: Database, table: LengthTable) -> dict[str, float]:
    """Return how long one new job takes, and one of a thousand that come together, milliseconds."""
    predicting: Any = Predicting(database)
    predicting._table, predicting._model_id = table, "length_1"
    async with database.connection() as connection:
        query = "SELECT id, tenant_id, spec FROM jobs ORDER BY id DESC LIMIT 1500"
        rows = await fetch_rows(connection, SpecRow, query)
        await connection.execute("DELETE FROM job_predictions")
    await predicting.keep(predicting.predict(rows[-100:]))  # what the first one pays for all
    looked: list[float] = []
    kept: list[float] = []
    for row in rows[:400]:
        begun = time.perf_counter()
        new = predicting.predict([row])
        looked.append(1e3 * (time.perf_counter() - begun))
        await predicting.keep(new)
        kept.append(1e3 * (time.perf_counter() - begun))
    begun = time.perf_counter()
    await predicting.keep(predicting.predict(rows[400:1400]))
    together = time.perf_counter() - begun
    return {
        "predicted_p50_ms": float(np.median(looked)),
        "predicted_p99_ms": float(np.quantile(looked, 0.99)),
        "predicted_and_kept_p50_ms": float(np.median(kept)),
        "predicted_and_kept_p99_ms": float(np.quantile(kept, 0.99)),
        "each_of_1000_ms": together,
    }


async def measured() -> dict[str, float]:
    """Return all figures."""
    with postgres_server() as server:
        url = fresh_database(server)
        database = await Database.open(url, size=2)
        await past(database, np.random.default_rng(5))
        found: dict[str, float] = {}
        for name in ("first_read", "read"):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            history, ended_s = await read_history(url, datetime.now(UTC), JOBS)
            found[f"{name}_s"] = time.perf_counter() - begun
            found[f"{name}_cpu_s"] = time.process_time() - begun_cpu
        begun, begun_cpu = time.perf_counter(), time.process_time()
        learned = learn(history, ended_s, None, 0.0)
        found["learn_s"] = time.perf_counter() - begun
        found["learn_cpu_s"] = time.process_time() - begun_cpu
        content = learned.table.to_bytes()
        found |= {
            "jobs": float(len(history)),
            "groups": float(len(learned.table.groups)),
            "table_mib": len(content) / 2**20,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
            "within_tenth": learned.new.within_tenth,
        }
        found |= await served_ms(database, LengthTable.from_bytes(content))
        await database.close()
        return found


def main() -> int:
    """Measure, print, write the results; 1 if training or a prediction takes too long."""
    found = asyncio.run(measured())
    for name, value in found.items():
        print(f"{name:<24}{value:>14,.3f}")
    write_result("predictions", {name: round(value, 4) for name, value in found.items()})
    train_s = found["first_read_s"] + found["learn_s"]
    return int(train_s > TRAIN_S or max(found["predicted_and_kept_p50_ms"], found["each_of_1000_ms"]) > SERVE_MS)


if __name__ == "__main__":
    sys.exit(main())
