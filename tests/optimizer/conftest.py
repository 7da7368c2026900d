"""One installation for the modules that kill nothing in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.optimizer.installation import installed
from tests.support.background import Installation
from tests.support.servers import as_service, fresh_database


@pytest.fixture(scope="module")
async def optimizer(postgres_url: str, redis_url: str) -> AsyncIterator[Installation]:
    """An installation that nothing in the module kills."""
    async with installed(
        DATABASE_URL=fresh_database(postgres_url), REDIS_URL=as_service(redis_url, "optimizer")
    ) as installation:
        yield installation
