"""How the database grows: with 10,000 jobs, with the ledger of a gang, and what retention leaves of both.

    ./test --bench growth

The jobs are made by statements and not by running them: each has a specification of ordinary size, an idempotency key,
six events, one gang on one GPU that ran for an hour, progress, a measured size, a prediction of its length and its sum.
Sizes are those of tables with their indexes, after VACUUM FULL; what updates leave behind comes on top until PostgreSQL
uses it again.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg

from services.admission.repository.retention import DAY_S, Kept, forget
from services.db.database import Database
from services.db.engine import create_engine
from tests.benchmarks.results import write_result
from tests.support.ledger import empty_ledger, fold_now
from tests.support.servers import fresh_database, postgres_server

JOBS, GANG_HOURS, AGE_DAYS = 10_000, 100, 100
LINES_PER_GANG_HOUR = 1_800
"""One for each interval of two seconds."""

SPEC = json.dumps(
    {
        "name": "train",
        "project": "vision",
        "command": ["python3", "train.py", "--lr", "0.001"],
        "gpus": {"min": 1, "max": 1},
        "working_dir": "/home/ada/vision",
        "environment": {"OMP_NUM_THREADS": "8", "HF_HOME": "/data/hf"},
        "work": {"total": 90_000, "unit": "steps"},
        "labels": {"kind": "resnet50"},
        "grace_s": 30,
    }
)

JOBS_MADE = [
    """
    INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, reason, detail, generation, exit_code,
                      submitted_at, queued_at, started_at, ended_at, user_id)
    SELECT 'job_' || lpad(i::text, 26, '0'), 'default', 'train', 'vision', '{"kind": "resnet50"}', $2::jsonb,
           'succeeded', 'finished', 'All its processes exited with status 0.', 1, 0, t, t, t, t + interval '1 hour',
           'user_00000000000000000000000001'
      FROM generate_series(1, $1) i, LATERAL (SELECT now() - make_interval(days => $3, secs => i) AS t) made
    """,
    """
    INSERT INTO job_events (job_id, tenant_id, type, data)
    SELECT id, 'default', 'job.' || e, jsonb_build_object('reason', e, 'allocation_id', id || '.1', 'gpus', 1)
      FROM jobs, unnest(ARRAY['queued', 'starting', 'running', 'profiled', 'set', 'succeeded']) e
    """,
    """
    INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, ended_at, end_reason)
    SELECT id || '.1', id, 1, 'ended', 1, jsonb_build_array(jsonb_build_object('node_id', 'node-1', 'devices',
           jsonb_build_array(0))), 29500, ended_at, 'finished' FROM jobs
    """,
    """
    INSERT INTO rank_statuses (allocation_id, node_id, state, exit_code, ended_by, started_at, ended_at)
    SELECT id || '.1', 'node-1', 'exited', 0, 'itself', started_at, ended_at FROM jobs
    """,
    "INSERT INTO job_progress (job_id, done, total) SELECT id, 90000, 90000 FROM jobs",
    "INSERT INTO job_footprints SELECT id, 1.1e6, 1e6, 1e5, 120, 3600 FROM jobs",
    "INSERT INTO job_predictions (job_id, group_version, group_id, user_id) SELECT id, 1, 1, 1 FROM jobs",
    """
    INSERT INTO submissions (tenant_id, idempotency_key, body_sha256, job_ids, batch, created_at)
    SELECT 'default', gen_random_uuid()::text, sha256(id::bytea), ARRAY[id], false, submitted_at FROM jobs
    """,
    """
    INSERT INTO audit_log (tenant_id, key_id, action, target, at)
    SELECT 'default', 'key_00000000000000000000000001', 'job.cancel', id, submitted_at FROM jobs
     WHERE right(id, 1) = '0'
    """,
]

LINES_MADE = [
    """
    INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j,
        cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue,
        carbon_gco2)
    SELECT 'node-1', repeat('b', 32), i * $2 + s, j.id || '.1', j.id, t, t + interval '2 s', 1, 600, 40, 25, 'counter',
           'DE', 'average_direct', 300 + s % 60, false, 1, 0.05
      FROM generate_series(1, $1) i JOIN jobs j ON j.id = 'job_' || lpad(i::text, 26, '0'),
           generate_series(0, $2 - 1) s,
           LATERAL (SELECT j.started_at + make_interval(secs => 2 * s) AS t) made
    """,
    """
    INSERT INTO energy_intervals (node_id, boot_id, sequence, start_at, end_at, metered_gpu_energy_j)
    SELECT node_id, boot_id, sequence, start_at, end_at, gpu_energy_j FROM energy_usages
    """,
]

DAYS_MADE = """
INSERT INTO energy_days (day, node_id, owner, zone, signal, pue, job_id, start_at, end_at, energy_j, gpu_energy_j,
    estimated_energy_j, carbon_gco2, gpu_s, estimated)
SELECT date_trunc('day', started_at, 'UTC'), 'node-1', id || '.1', 'DE', 'average_direct', 1, id, started_at, ended_at,
    1.1e6, 1e6, 1e5, 120, 3600, false FROM jobs
"""


async def size_bytes(connection: Any) -> int:
    """Return what all tables and their indexes take."""
    tables = [
        record[0] for record in await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    ]
    for table in tables:
        await connection.execute(f"VACUUM FULL {table}")
    return sum([await connection.fetchval("SELECT pg_total_relation_size($1::regclass)", table) for table in tables])


async def measure(postgres_url: str) -> dict[str, float]:
    """Return the sizes, MB."""
    url = fresh_database(postgres_url)
    connection: Any = await asyncpg.connect(url)
    await connection.set_type_codec("jsonb", encoder=str, decoder=str, schema="pg_catalog")
    database, engine = await Database.open(url), create_engine(url, application_name="growth")
    empty = await size_bytes(connection)
    await connection.execute("INSERT INTO tenants (id, limits) VALUES ('default', '{}') ON CONFLICT DO NOTHING")
    await connection.execute(JOBS_MADE[0], JOBS, SPEC, AGE_DAYS)
    for statement in JOBS_MADE[1:]:
        await connection.execute(statement)
    jobs = await size_bytes(connection)
    await connection.execute("SET session_replication_role = replica")  # so many lines are no one batch
    await connection.execute(LINES_MADE[0], GANG_HOURS, LINES_PER_GANG_HOUR)
    await connection.execute("SET session_replication_role = origin")
    await connection.execute(LINES_MADE[1])
    lines = await size_bytes(connection)
    await fold_now(database, 62 * DAY_S)
    await empty_ledger(database, "metered_days")
    await connection.execute(DAYS_MADE)
    folded = await size_bytes(connection)
    forgotten = await forget(engine, Kept(90, 30, 730))
    assert forgotten == JOBS
    left = await size_bytes(connection)
    await engine.dispose()
    await database.close()
    await connection.close()
    mb = 1e6
    return {
        "jobs_mb": (jobs - empty) / mb,
        "ledger_line_bytes": (lines - jobs) / (GANG_HOURS * LINES_PER_GANG_HOUR),
        "ledger_gang_hour_mb": (lines - jobs) / GANG_HOURS / mb,
        "folded_mb": (folded - jobs) / mb,
        "after_retention_mb": (left - empty) / mb,
    }


def main() -> int:
    """Measure, print and write the result."""
    with postgres_server() as url:
        found = asyncio.run(measure(url))
    print(f"{JOBS:,} jobs, until they are forgotten: {found['jobs_mb']:.1f} MB")
    print(f"their ledger, once combined by day, a day each: {found['folded_mb']:.1f} MB")
    print(f"what is left of both for ever: {found['after_retention_mb']:.1f} MB")
    print(
        f"the ledger before that: {found['ledger_line_bytes']:.0f} bytes per line, {found['ledger_gang_hour_mb']:.2f} "
        "MB per hour of a gang on one node"
    )
    write_result("growth", {name: round(value, 3) for name, value in found.items()})
    return 0
