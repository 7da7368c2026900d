"""A world whose jobs an engine runs."""

from collections.abc import AsyncIterator

import pytest

from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database


@pytest.fixture
async def world(postgres_url: str, redis_url: str) -> AsyncIterator[World]:
    async with a_world(fresh_database(postgres_url), redis_url) as made:
        yield made
