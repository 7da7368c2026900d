"""An address that names several servers: whichever takes writes is found, by every way to the database."""

from __future__ import annotations

import os
import subprocess
import sys

from sqlalchemy import text

from services.db.database import Database
from services.db.engine import create_engine
from services.scheduler.leadership import Leadership
from tests.support.servers import ROOT


def several(database_url: str) -> str:
    """A server that is not there comes first."""
    return database_url.replace("@", "@127.0.0.1:1,") + "?target_session_attrs=read-write"


async def test_the_server_that_takes_writes_is_found(database_url: str) -> None:
    url = several(database_url)
    engine, database, leadership = create_engine(url), await Database.open(url), Leadership(url)
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT pg_is_in_recovery()"))).scalar() is False
    await database.ping()
    assert await leadership.hold()
    await leadership.release()
    await database.close()
    await engine.dispose()


def test_migrations_find_it_too(database_url: str) -> None:
    environment = {**os.environ, "DATABASE_URL": several(database_url)}
    subprocess.run([sys.executable, "-m", "migrations"], cwd=ROOT, env=environment, check=True)
