"""Run Alembic without an ini file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from services.db.database import plain_url


def _config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("file_template", "%%(year)d_%%(month).2d_%%(day).2d_%%(slug)s")
    config.attributes["database_url"] = database_url
    return config


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


def is_known(revision: str) -> bool:
    """Return whether this release can upgrade a database of that revision."""
    try:
        return ScriptDirectory.from_config(_config("")).get_revision(revision) is not None
    except CommandError:
        return False
