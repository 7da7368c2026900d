"""Ray's head over HTTP: its Job Submission API and its state API, as its dashboard serves them. Nothing imports Ray."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from services.engines.ray import reading
from services.engines.ray.settings import RaySettings

_ALL = {"limit": "10000", "detail": "true"}  #: As many as Ray answers with at most; it says when there are more


class RaySilentError(Exception):
    """Ray does not answer, or not as expected."""


class Head:
    """One Ray cluster; every call may raise ``RaySilentError``."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def connected(cls, settings: RaySettings) -> AsyncGenerator[Self]:
        headers = {"Authorization": f"Bearer {settings.auth_token}"} if settings.auth_token else {}
        timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
        async with aiohttp.ClientSession(settings.address, headers=headers, timeout=timeout) as client:
            yield cls(client)

    async def version(self) -> str:
        return str((await self._get("/api/version")).get("ray_version", ""))[:100]

    async def jobs(self) -> list[reading.RayJob]:
        return self._read(reading.read_jobs, await self._get("/api/jobs/"))

    async def nodes(self) -> list[reading.RayNode]:
        """Return the nodes that are alive and have GPUs."""
        return self._read(reading.read_nodes, await self._get("/api/v0/nodes", _ALL))

    async def holdings(self) -> reading.Holdings:
        """Return which drivers hold GPUs by other means than ``wattshift.ray``."""
        groups = await self._get("/api/v0/placement_groups", _ALL)
        actors = await self._get(
            "/api/v0/actors", _ALL | {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
        )
        return self._read(reading.read_holdings, groups, actors)

    async def stop(self, submission: str) -> None:
        """Have a job stopped for good."""
        await self._call("POST", f"/api/jobs/{quote(submission, safe='')}/stop", {})

    def _read(self, read: Any, *documents: Any) -> Any:
        try:
            return read(*documents)
        except reading.UnreadableError as error:
            raise RaySilentError(str(error)) from error

    async def _get(self, path: str, query: dict[str, str] | None = None) -> Any:
        return await self._call("GET", path, query or {})

    async def _call(self, method: str, path: str, query: dict[str, str]) -> Any:
        try:
            async with self._client.request(method, path, params=query) as answer:
                answer.raise_for_status()
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RaySilentError(f"Ray does not answer {path}: {error or type(error).__name__}") from error
