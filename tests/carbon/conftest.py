"""Fixtures of the carbon service's tests."""

from collections.abc import AsyncIterator

import httpx
import pytest
from sqlalchemy import text

from carbon_service.repository import Repository
from services.db.engine import create_engine
from tests.carbon.upstream import Upstream, Watch, serving


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with serving() as server:
        yield server


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
async def empty_database(database_url: str) -> str:
    """The address of the module's database with nothing in it; one per test would cost more."""
    engine = create_engine(database_url, pool_size=1)
    async with engine.begin() as connection:
        await connection.execute(
            text("TRUNCATE carbon_points, carbon_forecasts, carbon_learned_forecasts, carbon_replays")
        )
    await engine.dispose()
    return database_url


@pytest.fixture
async def repository(empty_database: str) -> AsyncIterator[Repository]:
    engine = create_engine(empty_database, pool_size=2)
    yield Repository(engine)
    await engine.dispose()
