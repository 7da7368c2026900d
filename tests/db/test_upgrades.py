"""Migrations only add, so that the processes of the release before go on working while, and after, they run."""

import asyncio
import os
import subprocess
import sys
from typing import NamedTuple

import asyncpg
from alembic.script import ScriptDirectory

from migrations.run import downgrade, upgrade
from tests.support.servers import ROOT, fresh_database

COLUMNS = """
SELECT table_name, column_name, data_type, is_nullable = 'YES' AS nullable,
       column_default IS NOT NULL OR is_identity = 'YES' OR is_generated = 'ALWAYS' AS filled
  FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version'
"""
RULES = """
SELECT c.conrelid::regclass::text AS "table", c.conname AS name, pg_get_constraintdef(c.oid) AS definition
  FROM pg_constraint c WHERE c.connamespace = 'public'::regnamespace AND c.contype IN ('c', 'f', 'p', 'u', 'x')
UNION ALL
SELECT indrelid::regclass::text, indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index i
 WHERE indisunique AND NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conindid = i.indexrelid)
   AND indrelid::regclass::text NOT LIKE 'pg_%'
UNION ALL
SELECT tgrelid::regclass::text, tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
"""
MORE = "restricts more, or otherwise, than before"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "0027": {f"api_keys: api_keys_user_id_fkey {MORE}": "of a new column, which may be null"},
    "0030": {
        f"device_claims: device_claims_slice_or_gpu {MORE}": "refuses a whole GPU that is cut, where it cannot run"
    },
    "0034": {
        f"fleet_plans: fleet_plans_one_at_a_time {MORE}": "the release before ends what it began before it begins more",
        f"fleet_plans: fleet_plans_state {MORE}": "permits one state more",
    },
    "0036": {
        f"device_claims: device_claims_pkey {MORE}": "claims are inserted without ON CONFLICT, and alone in slot 0",
        f"device_claims: device_claims_slot {MORE}": "of a new column, whose default it permits",
        f"device_claims: device_claims_alone_or_packed {MORE}": "refuses what the key before refused",
    },
    "0042": {f"jobs: jobs_of_an_engine {MORE}": "of a new column, which the release before leaves null"},
    "0053": {
        f"energy_days: energy_days_pkey {MORE}": "the release before cannot combine lines, and tries again each hour",
        f"energy_days: ledger_keep {MORE}": "refuses what only that would do",
        f"energy_days: ledger_keep_all {MORE}": "no release truncates tables",
        f"energy_usages: ledger_keep {MORE}": "refuses what only that would do",
        f"energy_usages: ledger_open {MORE}": "refuses nothing",
        f"energy_usages: ledger_close {MORE}": "refuses nothing",
    },
    "0055": {
        f"{table}: {table}_hours_{change} {MORE}": "refuses nothing"
        for table in ("energy_days", "energy_usages")
        for change in ("insert", "update", "delete")
    },
    "0059": {
        f"job_arrays: job_arrays_numbered {MORE}": "of a new column, which the release before leaves null",
        f"jobs: jobs_numbered {MORE}": "of a new column, which the release before leaves null",
    },
}
"""What a migration changes although the release before may rely on it, by revision, and why that does no harm."""


class Column(NamedTuple):
    """What the release before knows of a column: whether it may leave it out is `nullable` or `filled`."""

    kind: str
    nullable: bool
    filled: bool


class Schema(NamedTuple):
    """Columns and what restricts them, by table and name."""

    columns: dict[tuple[str, str], Column]
    rules: dict[tuple[str, str], str]


async def schema_of(url: str) -> Schema:
    connection = await asyncpg.connect(url)
    try:
        columns = await connection.fetch(COLUMNS)
        rules = await connection.fetch(RULES)
    finally:
        await connection.close()
    return Schema(
        {(row["table_name"], row["column_name"]): Column(row[2], row[3], row[4]) for row in columns},
        {(row["table"], row["name"]): row["definition"] for row in rules},
    )


def changes(old: Schema, new: Schema) -> set[str]:
    """Return what processes that know the old schema may stumble over in the new one."""
    tables = {table for table, _ in old.columns}
    found: set[str] = set()
    for (table, name), before in old.columns.items():
        after = new.columns.get((table, name))
        if after is None:
            found.add(f"{table}.{name} is gone")
        elif after.kind != before.kind:
            found.add(f"{table}.{name} is {after.kind}, was {before.kind}")
        elif (before.nullable and not after.nullable) or (before.filled and not (after.filled or after.nullable)):
            found.add(f"{table}.{name} has to be given")
    for (table, name), after in new.columns.items():
        if table in tables and (table, name) not in old.columns and not (after.nullable or after.filled):
            found.add(f"{table}.{name} is new and has to be given")
    for (table, name), definition in new.rules.items():
        if table in tables and old.rules.get((table, name)) != definition:
            found.add(f"{table}: {name} {MORE}")
    return found


def test_every_migration_only_adds(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    script = ScriptDirectory(str(ROOT / "migrations"))
    revisions = [each.revision for each in reversed(list(script.walk_revisions()))]
    downgrade(url, revisions[0])
    schema = asyncio.run(schema_of(url))
    found: dict[str, set[str]] = {}
    for revision in revisions[1:]:
        upgrade(url, revision)
        before, schema = schema, asyncio.run(schema_of(url))
        if stumbles := changes(before, schema):
            found[revision] = stumbles
    unexpected = [
        f"{revision}: {what}"
        for revision in sorted({*found, *EXCEPTIONS})
        for what in sorted(found.get(revision, set()) ^ set(EXCEPTIONS.get(revision, {})))
    ]
    assert not unexpected, "\n".join(unexpected)


def migrate(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "migrations"],
        cwd=ROOT,
        env={**os.environ, "DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_release_starts_on_a_newer_schema_that_only_added(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    asyncio.run(
        execute(url, "ALTER TABLE jobs ADD COLUMN of_next_year TEXT; UPDATE alembic_version SET version_num = '9999'")
    )

    done = migrate(url)

    assert done.returncode == 0, done.stderr
    assert "only added" in done.stderr
    assert asyncio.run(execute(url, "SELECT version_num FROM alembic_version")) == "9999"


def test_a_release_refuses_a_newer_schema_that_took_something_away(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    head = asyncio.run(execute(url, "SELECT version_num FROM alembic_version"))
    asyncio.run(
        execute(
            url,
            "UPDATE alembic_version SET version_num = '9999'; UPDATE schema_compatibility SET least_revision = '9998'",
        )
    )

    done = migrate(url)

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "9999" in done.stderr
    assert "9998" in done.stderr
    assert f"downgrade {head}" in done.stderr


def test_what_a_schema_serves_is_known_of_this_release(postgres_url: str) -> None:
    url = fresh_database(postgres_url)
    head = asyncio.run(execute(url, "SELECT version_num FROM alembic_version"))

    assert asyncio.run(execute(url, "SELECT least_revision FROM schema_compatibility")) <= head


async def execute(url: str, statements: str) -> str:
    connection = await asyncpg.connect(url)
    try:
        if statements.startswith("SELECT"):
            return str(await connection.fetchval(statements))
        return await connection.execute(statements)
    finally:
        await connection.close()
