"""Run Alembic without an ini file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import Script, ScriptDirectory
from alembic.util import CommandError

from migrations.releases import NOT_READ, RELEASES, ROLES_NOT_KNOWN, VALUES_NOT_KNOWN, holds, without
from services.db.database import Connection, plain_url


def _config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("file_template", "%%(year)d_%%(month).2d_%%(day).2d_%%(slug)s")
    config.attributes["database_url"] = database_url
    return config


_EXISTS = "SELECT to_regclass('public.' || $1) IS NOT NULL"
_USERS = """
SELECT DISTINCT coalesce(nullif(application_name, ''), usename) AS name FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY 1
"""


class TooNewError(Exception):
    """The schema is of a newer release, and has lost what this one needs; the message is one line."""


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the schema up to ``revision``; two processes doing so at once take turns.

    A schema of a newer release is left as it is where that only added to what this one knows.

    Raises:
        TooNewError: It did not.
    """
    if revision == "head":
        present, least = asyncio.run(_present_and_least(database_url))
        if present is not None and not is_known(present):
            own = ScriptDirectory.from_config(_config("")).get_current_head() or ""
            if least is None or own < least:
                back = f"python -m migrations downgrade {own}"
                raise TooNewError(
                    f"the schema is of revision {present}, which serves releases from {least or 'a newer one'} on, and "
                    f"this release is {own}: start the newer one, or take the schema back with it by `{back}`"
                )
            print(
                f"the schema is of a newer release ({present}) that only added to this one's ({own}): it stays",
                file=sys.stderr,
            )
            return
    command.upgrade(_config(database_url), revision)


async def _present_and_least(database_url: str) -> tuple[str | None, str | None]:
    """Return the revision of the schema, and that of the oldest release it serves; None where it does not say."""
    connection = await asyncpg.connect(plain_url(database_url), timeout=30)
    try:
        present, least = [
            await connection.fetchval(f"SELECT {column} FROM {table}")
            if await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", f"public.{table}")
            else None
            for table, column in (("alembic_version", "version_num"), ("schema_compatibility", "least_revision"))
        ]
        return present, least
    finally:
        await connection.close()


def downgrade(database_url: str, revision: str) -> None:
    """Take the schema back to ``revision``."""
    command.downgrade(_config(database_url), revision)


class NoWayBackError(Exception):
    """The database cannot be taken back to a release now; nothing was changed, and the message is one line."""


def undone_by_going_back(database_url: str, release: str) -> list[str]:
    """Return what a release needs undone to start on the database, a line each; nothing where it starts on all of it.

    Raises:
        NoWayBackError: The release or the schema is not known, the schema is older, or processes are using it.
    """
    return asyncio.run(_undone(database_url, release))


async def _undone(database_url: str, release: str) -> list[str]:
    if release not in RELEASES:
        raise NoWayBackError(f"no release {release} is known; it is one of {', '.join(RELEASES)}")
    present, _ = await _present_and_least(database_url)
    if present is None or not is_known(present):
        raise NoWayBackError(f"this release does not know the schema, of revision {present}: only the newest one can")
    if present < RELEASES[release]:
        raise NoWayBackError(f"the schema is of revision {present}, before {release}'s ({RELEASES[release]})")
    connection = await asyncpg.connect(plain_url(database_url), timeout=30)
    try:
        if users := await connection.fetch(_USERS):
            names = ", ".join(row["name"] for row in users)
            raise NoWayBackError(f"processes are using the database: stop them first ({names})")
        found: list[str] = []
        for table, column, path in NOT_READ.get(release, ()):
            query = f"SELECT count(*) FROM {table} WHERE {holds(column, path, is_set=True)}"
            if count := await _count(connection, table, query):
                found.append(f"{path} in {column} of {table} ({count})")
        for table, column, value, instead in VALUES_NOT_KNOWN.get(release, ()):
            if count := await _count(connection, table, f"SELECT count(*) FROM {table} WHERE {column} = $1", value):
                found.append(f"{value} in {column} of {table}, which becomes {instead} ({count})")
        query = "SELECT count(*) FROM api_keys WHERE role = ANY($1)"
        if count := await _count(connection, "api_keys", query, ROLES_NOT_KNOWN.get(release, ())):
            found.append(f"keys with the role {' or '.join(ROLES_NOT_KNOWN[release])}, which are revoked ({count})")
    finally:
        await connection.close()
    return found + [f"migration {each.revision}: {each.doc}" for each in await _migrations_back(database_url, release)]


def go_back(database_url: str, release: str) -> None:
    """Make the database one that a release starts on; what was cut off is done by another call."""
    asyncio.run(_leave_out(database_url, release))
    if asyncio.run(_migrations_back(database_url, release)):
        downgrade(database_url, RELEASES[release])


async def _leave_out(database_url: str, release: str) -> None:
    """Take out of rows what a release refuses to read."""
    connection = await asyncpg.connect(plain_url(database_url), timeout=30)
    try:
        async with connection.transaction():
            for table, column, path in NOT_READ.get(release, ()):
                if await connection.fetchval(_EXISTS, table):
                    change = f"{column} = {without(column, path)}"
                    await connection.execute(f"UPDATE {table} SET {change} WHERE {holds(column, path)}")
            for table, column, value, instead in VALUES_NOT_KNOWN.get(release, ()):
                if await connection.fetchval(_EXISTS, table):
                    await connection.execute(f"UPDATE {table} SET {column} = $2 WHERE {column} = $1", value, instead)
            await connection.execute(
                "UPDATE api_keys SET role = 'user', revoked_at = coalesce(revoked_at, now()) WHERE role = ANY($1)",
                ROLES_NOT_KNOWN.get(release, ()),
            )
    finally:
        await connection.close()


async def _migrations_back(database_url: str, release: str) -> list[Script]:
    """Return the migrations to undo, the newest first: none where the schema serves the release as it is."""
    present, least = await _present_and_least(database_url)
    if present is None or (least is not None and least <= RELEASES[release]):
        return []
    return list(ScriptDirectory.from_config(_config("")).iterate_revisions(present, RELEASES[release]))


async def _count(connection: Connection, table: str, query: str, *arguments: object) -> int:
    return await connection.fetchval(query, *arguments) if await connection.fetchval(_EXISTS, table) else 0


def is_known(revision: str) -> bool:
    """Return whether this release can upgrade a database of that revision."""
    try:
        return ScriptDirectory.from_config(_config("")).get_revision(revision) is not None
    except CommandError:
        return False
