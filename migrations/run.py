"""Run Alembic without an ini file."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError


def _config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("file_template", "%%(year)d_%%(month).2d_%%(day).2d_%%(slug)s")
    config.attributes["database_url"] = database_url
    return config


def upgrade(database_url: str, revision: str = "head") -> None:
    """Bring the schema up to ``revision``; two processes doing so at once take turns."""
    command.upgrade(_config(database_url), revision)


def downgrade(database_url: str, revision: str) -> None:
    """Take the schema back to ``revision``."""
    command.downgrade(_config(database_url), revision)


def is_known(revision: str) -> bool:
    """Return whether this release can upgrade a database of that revision."""
    try:
        return ScriptDirectory.from_config(_config("")).get_revision(revision) is not None
    except CommandError:
        return False
