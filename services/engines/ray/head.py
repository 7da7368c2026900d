"""Ray's head over HTTP: its Job Submission API and its state API, as its dashboard serves them. Nothing imports Ray."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from services.engines.ray import reading
from services.engines.ray.settings import RaySettings
from services.kit.bridges.silent import EngineSilentError

_ALL = {"limit": "10000", "detail": "true"}  #: As many as Ray answers with at most; it says when there are more


class Head:
    """One Ray cluster; every call may raise ``EngineSilentError``."""

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
        return reading.read_jobs(await self._get("/api/jobs/"))

    async def nodes(self) -> list[reading.RayNode]:
        """Return the nodes that are alive and have GPUs."""
        return reading.read_nodes(await self._get("/api/v0/nodes", _ALL))

    async def holdings(self) -> Mapping[str, Mapping[str, float]]:
        """Return the GPUs that drivers hold by other means than ``wattshift.ray``, by driver and node."""
        groups = await self._get("/api/v0/placement_groups", _ALL)
        actors = await self._get(
            "/api/v0/actors", _ALL | {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
        )
        return reading.read_holdings(groups, actors)

    async def stop(self, submission: str) -> None:
        """Have a job stopped for good."""
        await self._call("POST", f"/api/jobs/{quote(submission, safe='')}/stop", {})

    async def _get(self, path: str, query: dict[str, str] | None = None) -> Any:
        return await self._call("GET", path, query or {})

    async def _call(self, method: str, path: str, query: dict[str, str]) -> Any:
        try:
            async with self._client.request(method, path, params=query) as answer:
                answer.raise_for_status()
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineSilentError(f"Ray does not answer {path}: {error or type(error).__name__}") from error
