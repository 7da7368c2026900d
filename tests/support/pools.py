"""Pools for tests, and their API in this process, on the real database; the carbon service is a stand-in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
from aiohttp import web
from fastapi import FastAPI

from services.contracts.identity import Identity, Role
from services.db.database import prepare
from services.db.engine import create_engine
from services.db.sealing import Sealer
from services.kit.carbon import Carbon
from services.kit.http import ServiceClient, new_session
from services.kit.problems import install_problem_handlers
from services.serving import endpoints
from services.serving.carbon import CarbonZones, Intensities
from services.serving.clusters import Clusters
from services.serving.planning.plans import Plans
from services.serving.repository import ServingRepository
from services.serving.repository.plans import plan_repository
from services.serving.routing import Endpoints, Routing
from services.serving.service import Pools
from services.serving.settings import ServingSettings
from services.serving.traffic import TrafficReports
from tests.gateway.peer import a_peer
from tests.support.services import TOKEN
from tests.support.tokens import ActingAs, as_caller

ZONES = {"DE": ["average_direct"], "US-CAL-CISO": ["average_direct", "average_lifecycle"]}


def a_partition(name: str = "halves", thresholds: tuple[int, int] | None = (100, 200), **more: Any) -> dict[str, Any]:
    """Return a partition into four classes, or one."""
    profile = {"mode": "one", "max_qps": 10.0, "power_w": 300.0}
    classes = ["any"] if thresholds is None else ["SS", "SL", "LS", "LL"]
    made: dict[str, Any] = {"name": name, "classes": [{"name": each, "profiles": [profile]} for each in classes]}
    if thresholds is not None:
        made["thresholds"] = {"input_tokens": thresholds[0], "output_tokens": thresholds[1]}
    return made | more


def a_pool(**more: Any) -> dict[str, Any]:
    """Return the spec of a pool in two places."""
    return {
        "places": [{"name": "here", "zone": "DE"}, {"name": "there", "zone": "US-CAL-CISO"}],
        "modes": [{"name": "one", "gpu_model": "A100-SXM4-40GB", "gpus": 1, "command": ["serve"]}],
        "partitions": [a_partition()],
        **more,
    }


def windows_ago(count: int, requests: list[list[int]], *, s: float = 60) -> list[dict[str, Any]]:
    """Return so many windows one after the other, each with these requests; the last begins ``s`` seconds ago."""
    last_s = (datetime.now(UTC).timestamp() - s) // 5 * 5
    starts = [datetime.fromtimestamp(last_s - 5 * back, UTC) for back in reversed(range(count))]
    return [{"start_at": start.isoformat(), "requests": requests} for start in starts]


SECRETS_KEY = "a-key-that-seals-secrets-in-tests-only"

OPERATOR = Identity(tenant_id="ops", role=Role.OPERATOR, key_id="key_test")


@dataclass
class PoolApi:
    """The API, the database behind it, and what stands behind both."""

    http: httpx.AsyncClient
    database: asyncpg.Pool
    traffic: TrafficReports
    plans: Plans
    routing: Routing
    carbon_is_up: bool = True

    async def call(
        self, method: str, path: str = "", *, tenant: str = "ops", role: Role = Role.OPERATOR, **options: Any
    ) -> httpx.Response:
        headers = as_caller(Identity(tenant_id=tenant, role=role, key_id="key_test"))
        headers |= options.pop("headers", {})
        path = path if path.startswith(("/v1", "/internal")) else f"/v1/pools{path}"
        return await self.http.request(method, path, headers=headers, **options)

    async def made(self, name: str, tenant: str = "ops", **more: Any) -> dict[str, Any]:
        answer = await self.call("PUT", f"/{name}", json=a_pool(**more), tenant=tenant)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def report(self, name: str, windows: list[dict[str, Any]], source: str = "r1", **options: Any) -> Any:
        body = {"source": source, "windows": windows}
        answer = await self.call("POST", f"/{name}/traffic", json=body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def counted(self, name: str, counted_as: str = "100,200") -> dict[str, int]:
        """Return how many requests of each class are in the database."""
        query = """SELECT each.key, sum(each.value::int) AS requests
                     FROM pool_traffic, jsonb_each_text(counts -> $2) AS each WHERE pool = $1 GROUP BY 1"""
        return {row["key"]: row["requests"] for row in await self.database.fetch(query, name, counted_as)}

    async def audited(self, name: str) -> list[str]:
        rows = await self.database.fetch("SELECT action FROM audit_log WHERE target = $1 ORDER BY sequence", name)
        return [row["action"] for row in rows]


@asynccontextmanager
async def pool_api(database_url: str) -> AsyncIterator[PoolApi]:
    """Run the API of pools on a migrated database, without the loops that plan pools and keep them."""

    async def carbon(request: web.Request) -> web.Response:
        if not api.carbon_is_up:
            return web.Response(status=503)
        source = {"provider": "recorded", "attribution": "", "has_provider_forecast": False}
        if request.path.endswith("/current"):
            zone = request.path.split("/")[-2]
            now = datetime.now(UTC)
            point = {
                "start_at": (now - timedelta(minutes=5)).isoformat(),
                "end_at": (now + timedelta(minutes=5)).isoformat(),
                "gco2_per_kwh": 400.0 if zone == "DE" else 200.0,
            }
            known = {"zone": zone, "signal": "average_direct", "provider": "recorded", "point": point}
            return web.json_response(known | {"fetched_at": now.isoformat(), "age_s": 300.0, "is_stale": False})
        zones = [{"zone": zone, "name": zone, "signals": signals, **source} for zone, signals in ZONES.items()]
        return web.json_response({"items": zones})

    engine = create_engine(database_url)
    given = {"service_token": TOKEN, "endpoint_networks": "127.0.0.0/8,10.8.0.0/16"}
    settings = ServingSettings.model_validate(given)
    plans = Plans(ServingRepository(engine), plan_repository(engine), settings)
    app = FastAPI()
    app.include_router(endpoints.router)
    app.include_router(endpoints.endpoints_router)
    install_problem_handlers(app)
    app.state.traffic = TrafficReports(ServingRepository(engine), settings)
    transport = httpx.ASGITransport(ActingAs(app, OPERATOR))
    async with (
        a_peer(carbon) as carbon_url,
        new_session() as session,
        httpx.AsyncClient(transport=transport, base_url="http://serving") as http,
        asyncpg.create_pool(database_url, min_size=1, max_size=2, init=prepare) as database,
    ):
        carbon_service = Carbon(ServiceClient(session, carbon_url, "The carbon service", timeout_s=2), attempts=2)
        zones = CarbonZones(carbon_service)
        app.state.repository, app.state.sealer = ServingRepository(engine), Sealer(SECRETS_KEY)
        app.state.endpoints = Endpoints(ServingRepository(engine), settings, zones)
        app.state.clusters = Clusters(ServingRepository(engine), settings)
        app.state.routing = Routing(ServingRepository(engine), Intensities(carbon_service), settings)
        app.state.pools = Pools(ServingRepository(engine), zones, plans, settings.plan_interval_s)
        api = PoolApi(http, database, app.state.traffic, plans, app.state.routing)
        yield api
    await engine.dispose()
