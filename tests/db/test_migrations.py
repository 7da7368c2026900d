"""The migrations make exactly the tables that the code describes, forwards and backwards."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from asyncpg.exceptions import UniqueViolationError
from sqlalchemy import Connection, MetaData, TableClause, text
from sqlalchemy.dialects import postgresql

from services.db import tables
from services.db.database import connect, plain_url
from services.db.engine import create_engine, is_connection_error
from tests.support.schema import DESCRIBED, VIEWED
from tests.support.servers import ROOT, fresh_database


def migrate(url: str, *words: str) -> None:
    environment = {**os.environ, "DATABASE_URL": url}
    subprocess.run([sys.executable, "-m", "migrations", *words], cwd=ROOT, env=environment, check=True)


async def ask(url: str, question):
    engine = create_engine(url, pool_size=1)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(question)
    finally:
        await engine.dispose()


def described(connection: Connection) -> tuple[MetaData, dict[str, str]]:
    """Return all tables and views as ``services/db/tables`` describes them."""
    for statement in ("DROP SCHEMA public CASCADE", "CREATE SCHEMA public"):
        connection.exec_driver_sql(statement)
    for statement in (DESCRIBED + VIEWED).split(";\n"):
        connection.exec_driver_sql(statement)
    every = MetaData()
    every.reflect(connection)
    views = views_of(connection)
    connection.rollback()
    return every, views


def views_of(connection: Connection) -> dict[str, str]:
    found = connection.execute(text("SELECT viewname, definition FROM pg_views WHERE schemaname = 'public'"))
    return {row.viewname: row.definition for row in found}


def differences(every: MetaData) -> Callable[[Connection], list[object]]:
    context = {"compare_server_default": False}
    return lambda connection: compare_metadata(MigrationContext.configure(connection, opts=context), every)


def table_names(connection: Connection) -> set[str]:
    found = connection.execute(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"))
    return set(found.scalars()) - {"alembic_version"}


async def test_the_migrated_schema_is_the_described_one(database_url: str) -> None:
    every, views = await ask(database_url, described)

    assert await ask(database_url, differences(every)) == []
    assert await ask(database_url, table_names) == set(every.tables)
    assert await ask(database_url, views_of) == views


COLUMNS = text("""
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = CAST(:name AS regclass) AND attnum > 0 AND NOT attisdropped
""")


async def test_expressions_name_columns_of_their_types(database_url: str) -> None:
    named = [each for each in vars(tables).values() if isinstance(each, TableClause)]
    views = re.findall(r"^CREATE VIEW (\w+)", VIEWED, re.MULTILINE)

    def there(connection: Connection) -> dict[str, dict[str, str]]:
        return {
            each.name: dict(tuple(row) for row in connection.execute(COLUMNS, {"name": each.name})) for each in named
        }

    found = await ask(database_url, there)
    assert len(named) > 30
    for each in named:
        stated = {column.name: column.type.compile(dialect=postgresql.dialect()).lower() for column in each.c}
        known = found[each.name]
        assert stated == ({name: known[name] for name in stated} if each.name in views else known), each.name


async def test_every_migration_goes_back_and_forth(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    await asyncio.to_thread(migrate, url, "downgrade", "base")
    assert await ask(url, table_names) == set()
    assert await ask(url, views_of) == {}
    await asyncio.to_thread(migrate, url)
    every, views = await ask(url, described)
    assert await ask(url, differences(every)) == []
    assert await ask(url, views_of) == views


POINT = (
    "INSERT INTO setting_points (job_id, kind, gpu_model, setting, gpus, nodes, local_batch, value, step_time_s, "
    "power_w, elapsed_s) VALUES ($1, $2, 'A100', 'power_limit', 1, 1, 0, 200, 1, 1, 1)"
)
JOB = (
    "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state) "
    "VALUES ($1, $2, 'a', 'p', '{}', '{}', 'failed')"
)


async def test_what_jobs_taught_goes_to_their_tenant_and_back(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    await asyncio.to_thread(migrate, url, "downgrade", "0015")
    connection = await connect(url, application_name="test")

    async def kinds() -> dict[str, str]:
        return {row["job_id"]: row["kind"] for row in await connection.fetch("SELECT job_id, kind FROM setting_points")}

    try:
        for job, tenant, kind in (("j1", "a", "resnet"), ("j2", "b", "bert"), ("j3", "b", "j3")):
            await connection.execute(JOB, job, tenant)
            await connection.execute(POINT, job, kind)
        await asyncio.to_thread(migrate, url)
        assert await kinds() == {"j1": "a/resnet", "j2": "b/bert", "j3": "j3"}
        await connection.execute(POINT, "j4", "b/resnet")
        await asyncio.to_thread(migrate, url, "downgrade", "0015")
        assert await kinds() == {"j4": "resnet", "j2": "bert", "j3": "j3"}, "of two tenants' the newer one stays"
    finally:
        await connection.close()


ARRAY = (
    "INSERT INTO job_arrays (id, tenant_id, name, project, labels, spec, tasks, first_index, last_index) "
    "VALUES ($1, 'a', 'a', 'p', '{}', '{}', 2, 0, 1)"
)


async def test_what_has_not_ended_is_numbered_and_the_counter_goes_on_from_there(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    await asyncio.to_thread(migrate, url, "downgrade", "0058")
    connection = await connect(url, application_name="test")
    try:
        await connection.execute("INSERT INTO tenants (id, limits) VALUES ('a', '{}'), ('b', '{}')")
        for job, tenant in (("j1", "a"), ("j2", "a"), ("j3", "b"), ("j4", "a"), ("t1", "a"), ("t2", "a"), ("t3", "a")):
            await connection.execute(JOB, job, tenant)
        for array, at in (("over", 1), ("live", 4)):
            await connection.execute(ARRAY, array)
            await connection.execute("UPDATE job_arrays SET submitted_at = to_timestamp($2) WHERE id = $1", array, at)
        await connection.execute("UPDATE jobs SET state = 'queued' WHERE id IN ('j2', 'j3', 'j4', 't2')")
        await connection.execute("UPDATE jobs SET submitted_at = to_timestamp(9 - substr(id, 2)::int)")
        await connection.execute(
            "UPDATE jobs SET array_id = CASE id WHEN 't3' THEN 'over' ELSE 'live' END WHERE id LIKE 't%'"
        )
        await asyncio.to_thread(migrate, url)
        numbers = "SELECT id, number FROM jobs UNION SELECT id, number FROM job_arrays"
        found = {row["id"]: row["number"] for row in await connection.fetch(numbers)}
        nothing = dict.fromkeys(("j1", "t3", "over"))
        assert found == {"live": 1, "t1": 1, "t2": 1, "j4": 2, "j2": 3, "j3": 1, **nothing}
        last = await connection.fetch("SELECT id, last_number FROM tenants WHERE id IN ('a', 'b')")
        assert {row["id"]: row["last_number"] for row in last} == {"a": 3, "b": 1}
    finally:
        await connection.close()


NODE = (
    "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices) "
    "VALUES ('n', '', 'n', 'http://n', 'DE', 'nvml', false, 'modelled', $1)"
)
ALLOCATION = (
    "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
    "VALUES ($1, $1, 1, 'running', 1, '[]', 1)"
)
OLD_CLAIM = "INSERT INTO device_claims (node_id, device, allocation_id) VALUES ('n', $1, $2)"
CLAIM = (
    "INSERT INTO device_claims (node_id, device, allocation_id, uuid, parent, profile) VALUES ($1, $2, $3, $4, $5, $6)"
)


async def test_a_release_without_slices_keeps_its_claims_and_gets_the_uuids_that_are_known(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    await asyncio.to_thread(migrate, url, "downgrade", "0029")
    connection = await connect(url, application_name="test")

    async def claims(columns: str) -> list[tuple[object, ...]]:
        return [tuple(row) for row in await connection.fetch(f"SELECT {columns} FROM device_claims ORDER BY device")]

    try:
        await connection.execute(NODE, [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}])
        for device, job in enumerate(("j0", "j1", "j2")):  # the node came back without its third GPU
            await connection.execute(JOB, job, "a")
            await connection.execute(ALLOCATION, job)
            await connection.execute(OLD_CLAIM, device, job)
        before = await claims("node_id, device, allocation_id")
        await asyncio.to_thread(migrate, url)
        assert await claims("device, uuid, parent, profile") == [
            (0, "GPU-a", None, None),
            (1, "GPU-b", None, None),
            (2, None, None, None),
        ]
        await connection.execute(CLAIM, "n", 1_048, "j0", "MIG-c", 3, "2g.20gb")
        await connection.execute(OLD_CLAIM, 4, "j1")
        await asyncio.to_thread(migrate, url, "downgrade", "0029")
        left = [("n", 4, "j1"), ("n", 1_048, "j0")]
        assert await claims("node_id, device, allocation_id") == [*before, *left]
    finally:
        await connection.close()


async def test_a_release_without_packing_gets_no_shared_device_and_is_not_returned_to_while_there_is_one(
    postgres_url: str,
) -> None:
    url = fresh_database(postgres_url)
    connection = await connect(url, application_name="test")
    packed = "INSERT INTO device_claims (node_id, device, allocation_id, slot, packed) VALUES ('n', 0, $1, 1, true)"
    try:
        await connection.execute(NODE, [{"index": 0, "uuid": "GPU-a"}])
        for job in ("j0", "j1", "j2"):
            await connection.execute(JOB, job, "a")
            await connection.execute(ALLOCATION, job)
        await connection.execute(OLD_CLAIM, 0, "j0")
        await connection.execute(packed, "j1")
        with pytest.raises(subprocess.CalledProcessError):
            await asyncio.to_thread(migrate, url, "downgrade", "0035")
        await connection.execute("DELETE FROM device_claims WHERE allocation_id = 'j0'")
        with pytest.raises(UniqueViolationError):  # its guest is still there
            await connection.execute(OLD_CLAIM, 0, "j2")
        await asyncio.to_thread(migrate, url, "downgrade", "0035")
        with pytest.raises(UniqueViolationError):
            await connection.execute(OLD_CLAIM, 0, "j2")
    finally:
        await connection.close()


async def test_a_gpu_and_its_slices_are_never_held_at_once(postgres_url: str) -> None:
    connection = await connect(fresh_database(postgres_url), application_name="test")
    try:
        for job in ("j0", "j1"):
            await connection.execute(JOB, job, "a")
            await connection.execute(ALLOCATION, job)
        await connection.execute(CLAIM, "n", 1_024, "j0", "MIG-a", 0, "3g.40gb")
        await connection.execute(CLAIM, "n", 1_028, "j1", "MIG-b", 0, "3g.40gb")
        with pytest.raises(UniqueViolationError, match="GPU 0 of node n"):
            await connection.execute(OLD_CLAIM, 0, "j1")
        await connection.execute(OLD_CLAIM, 1, "j1")
        with pytest.raises(UniqueViolationError, match="GPU 1 of node n"):
            await connection.execute(CLAIM, "n", 1_032, "j0", "MIG-c", 1, "3g.40gb")
        await connection.execute(CLAIM, "m", 1_032, "j0", "MIG-c", 1, "3g.40gb")
    finally:
        await connection.close()


async def test_two_processes_may_migrate_at_once(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    await asyncio.to_thread(migrate, url, "downgrade", "base")
    await asyncio.gather(*(asyncio.to_thread(migrate, url) for _ in range(2)))
    every, views = await ask(url, described)
    assert await ask(url, differences(every)) == []
    assert await ask(url, views_of) == views


def test_the_history_is_one_line() -> None:
    revisions = list(ScriptDirectory(str(ROOT / "migrations")).walk_revisions())
    assert len({revision.down_revision for revision in revisions}) == len(revisions)


@pytest.mark.parametrize("url", ["sqlite:///x.db", "mysql://h/db", "nonsense", ""])
def test_another_database_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="postgresql"):
        plain_url(url)


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with pytest.raises(OSError, match=r".") as caught:
        await ask("postgresql://nobody@127.0.0.1:1/none", table_names)
    assert is_connection_error(caught.value)
