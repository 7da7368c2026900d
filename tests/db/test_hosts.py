"""An address that names several servers: whichever takes writes is found, by every way to the database."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from sqlalchemy import text

from services.db.database import Database
from services.db.engine import create_engine
from services.db.leadership import Leadership
from services.db.locks import LEADERSHIP
from tests.support.servers import ROOT

leading = partial(Leadership, lock=LEADERSHIP, name="scheduler-leader")


def several(database_url: str) -> str:
    """A server that is not there comes first."""
    return database_url.replace("@", "@127.0.0.1:1,") + "?target_session_attrs=read-write"


async def test_the_server_that_takes_writes_is_found(database_url: str) -> None:
    url = several(database_url)
    engine, database, leadership = (
        create_engine(url),
        await Database.open(url),
        leading(url),
    )
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT pg_is_in_recovery()"))).scalar() is False
    await database.ping()
    assert await leadership.hold()
    leadership.release()
    await database.close()
    await engine.dispose()


def test_migrations_find_it_too(database_url: str) -> None:
    environment = {**os.environ, "DATABASE_URL": several(database_url)}
    subprocess.run([sys.executable, "-m", "migrations"], cwd=ROOT, env=environment, check=True)
