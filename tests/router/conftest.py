"""A router in this process in front of two model servers, each test with its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.routers import (
    ModelServer,
    Plane,
    Running,
    a_plane,
    a_routed_pool,
    a_routed_server,
    a_router,
    model_servers,
)


@dataclass
class Stage:
    plane: Plane
    plane_url: str
    redis_url: str
    folder: Path
    one: ModelServer
    two: ModelServer

    def router(self, **settings: Any) -> contextlib.AbstractAsyncContextManager[Running]:
        return a_router(self.plane, self.plane_url, self.redis_url, self.folder, **settings)


@pytest.fixture
async def stage(redis_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with a_plane() as (plane, url), model_servers("one", "two") as (one, two):
        plane.pools = [a_routed_pool()]
        plane.servers = [a_routed_server(one)]
        yield Stage(plane, url, redis_url, tmp_path, one, two)


@pytest.fixture
async def router(stage: Stage) -> AsyncIterator[Running]:
    async with stage.router() as running:
        await running.adopted()
        yield running


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Return status and code of an error, which must have OpenAI's shape."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status_code, error["code"]
