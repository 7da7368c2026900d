"""Alembic's entry: one transaction per migration, under an advisory lock, with a lock time-out."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection, text

from services.db import locks
from services.db.engine import create_engine


def _migrate(connection: Connection) -> None:
    connection.execute(text(f"SELECT pg_advisory_lock({locks.MIGRATION})"))
    connection.execute(text("SET lock_timeout = '5s'"))
    connection.commit()
    context.configure(connection=connection, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


async def _run() -> None:
    engine = create_engine(context.config.attributes["database_url"], pool_size=1, application_name="migrations")
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_migrate)
            await connection.commit()
    finally:
        await engine.dispose()


asyncio.run(_run())
