"""How fast the ledger's lines are exported, and such an export is verified.

    ./test --bench ledger

20 nodes with two jobs each, in batches of ten intervals of each. Exports are
timed with PostgreSQL and this process on one core together (CPU seconds of both, against the same rows as PostgreSQL's
own ``COPY`` of the bare table); verification by processor time of one process, and by the clock with two.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from services.db.database import Database
from services.db.sealing import Sealer
from services.telemetry.repository.line_export import write_lines
from services.telemetry.repository.reports import Subject
from services.telemetry.seals import Signer, close_days
from tests.benchmarks.results import write_result
from tests.support.servers import fresh_database, postgres_server
from wattshift import verify

NODES, JOBS, AT_ONCE = 20, 2, 10
LINES = int(os.environ.get("LINES", "300000"))
ALL = Subject(None, None, None, None)
FORMS = ("csv", "jsonl")

MAKE_JOBS = """
INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, generation)
SELECT 'job_' || lpad(n::text, 26, '0'), 'default', 'j', 'p' || n % 7, '{}', '{}', 'running', 1
FROM generate_series(0, $1 - 1) n
"""

MAKE_INTERVALS = """
INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j,
    cpu_energy_j, static_energy_j, source, cpu_source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue,
    carbon_gco2, devices, provider, intensity_kind, fetched_at, release)
SELECT 'node-' || n, repeat('b', 32), s, CASE WHEN job IS NULL THEN '' ELSE job || '.1' END, job, at,
    at + interval '10.001 s', 4, gpu, cpu, 0.1 * cpu, 'counter', 'modelled', 'DE', 'average_direct', i, false, 1.2,
    (gpu + cpu + 0.1 * cpu) / 3.6e6 * i * 1.2, '{0,1,2,3}', 'replay', 'measured', at, '1.0.0'
FROM (
    SELECT n, o, s, CASE WHEN o < jobs THEN 'job_' || lpad((n * jobs + o)::text, 26, '0') END AS job,
        timestamptz '2026-11-25' + make_interval(secs => 10.001 * s) AS at, 600 * random() AS gpu,
        40 * random() AS cpu, 300 + s % 60 * 1.37 AS i
    FROM generate_series(0, $1::int - 1) n, generate_series($3::int, $3::int + $4::int - 1) s,
        generate_series(0, $2::int) o, (SELECT $2::int AS jobs) AS given
) AS made
"""


async def make(database: Database) -> Signer:
    """Fill a ledger, and state a day of it."""
    signer = Signer(database, Sealer("k" * 32))
    await signer.use(close_days)
    async with database.connection() as connection:
        await connection.execute("INSERT INTO tenants (id, limits) VALUES ('default', '{}') ON CONFLICT DO NOTHING")
        await connection.execute(MAKE_JOBS, NODES * JOBS)
        for first in range(0, LINES // NODES // (JOBS + 1), AT_ONCE):
            await connection.execute(MAKE_INTERVALS, NODES, JOBS, first, AT_ONCE)
        await connection.execute("ANALYZE")
    return signer


def processor_s(who: list[psutil.Process]) -> float:
    """Return what processes that still run have used."""
    used_s = 0.0
    for each in who:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker of autovacuum
            used_s += sum(each.cpu_times()[:2])
    return used_s


async def exported(
    database: Database, folder: Path, signer: Signer, backends: list[psutil.Process]
) -> dict[str, float]:
    """Write both kinds of exports, and return lines per CPU second of all who take part."""
    figures: dict[str, float] = {}
    sign = await signer.ready()
    for form in FORMS:
        with (folder / f"lines.{form}").open("wb") as file:

            async def output(piece: bytes, file: io.BufferedWriter = file) -> None:
                file.write(piece)

            before, began = processor_s(backends), time.perf_counter()
            await write_lines(database, ALL, form, output, None)
            used = processor_s(backends) - before
            figures[f"{form}_lines_per_s"] = round(LINES / (time.perf_counter() - began))
            figures[f"{form}_lines_per_cpu_s"] = round(LINES / used)
    async with database.connection() as connection:

        async def nothing(piece: bytes) -> None:
            pass

        before = processor_s(backends)
        await connection.copy_from_query("SELECT * FROM energy_usages", output=nothing, format="csv")
        figures["bare_table_lines_per_cpu_s"] = round(LINES / (processor_s(backends) - before))
    with (folder / "sealed.csv").open("wb") as file:

        async def sealed(piece: bytes) -> None:
            file.write(piece)

        await write_lines(database, ALL, "csv", sealed, sign)
    return figures


def verified(file: Path, program: Callable[..., int] = verify.verify) -> dict[str, float]:
    """Verify an export with one process and with two, and return microseconds per line."""
    figures: dict[str, float] = {}
    for processes in (1, 2):
        began, used = time.perf_counter(), _used_s()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert program(str(file), processes) == 0, printed.getvalue()
        figures[f"verify_{processes}_us_per_line"] = round((time.perf_counter() - began) / LINES * 1e6, 2)
        figures[f"verify_{processes}_cpu_us_per_line"] = round((_used_s() - used) / LINES * 1e6, 2)
    return figures


def _used_s() -> float:
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in own)


async def measure(postgres_url: str, folder: Path) -> dict[str, float]:
    """Return all figures."""
    database = await Database.open(fresh_database(postgres_url), size=2)
    signer = await make(database)
    backends = [each for each in psutil.process_iter() if each.name().startswith("postgres")] + [psutil.Process()]
    figures = await exported(database, folder, signer, backends)
    await database.close()
    return figures | verified(folder / "sealed.csv")


def main() -> int:
    """Print and keep the figures."""
    keep = os.environ.get("KEEP")
    with postgres_server() as url, tempfile.TemporaryDirectory() as scratch:
        figures = asyncio.run(measure(url, Path(keep or scratch)))
    print(figures)
    write_result("ledger", {"lines": LINES, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
