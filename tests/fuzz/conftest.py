"""One installation for all fuzz files of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
async def world() -> AsyncIterator[Any]:
    """A `World`; what it needs is imported here, as every worker of a run reads this file and one needs it."""
    from tests.fuzz.world import installed

    async with installed() as found:
        yield found
