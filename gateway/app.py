"""Composition root of the gateway: ``python -m gateway.app``."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import aiohttp
import orjson
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from gateway.dashboard.oidc import Provider
from gateway.dashboard.pages import Dashboard
from gateway.dashboard.sessions import PURPOSE, TELL_S, EndedSessions, Seals, SessionMiddleware
from gateway.dispatch import Dispatcher
from gateway.forward import Forwarder
from gateway.gather import Gatherer
from gateway.metrics import MetricsGatherer, Places
from gateway.reference import render, render_problem
from gateway.routes import Route, Upstream, read_routes
from gateway.settings import GatewaySettings, read_keys
from services.contracts.codes import MEANINGS, PROBLEMS
from services.contracts.streams import GATEWAY_LIMITS_HASH
from services.kit.app import DegradedError, add_basics, serve
from services.kit.edge.bodies import BodyReader
from services.kit.edge.edge import Edge, EdgeMiddleware, OpenedEdge, OpenRoutes
from services.kit.edge.keys import KeyCache, keys_of
from services.kit.edge.limits import AddressLimiter, ConcurrencyLimiter, RateLimiter
from services.kit.edge.shared_limits import LIMITS_S, SharedLimits
from services.kit.http import client_of, connector
from services.kit.metrics import Metrics
from services.kit.overload import OverloadMiddleware
from services.kit.redis import connect
from services.kit.repeating import repeat
from services.kit.settings import settings_or_exit
from services.kit.tasks import end_tasks
from services.kit.tokens import outgoing


def create_app(settings: GatewaySettings) -> FastAPI:
    """Return the gateway: the edge, and a small app for everything outside the table of routes."""
    services = [upstream for upstream in Upstream if upstream is not Upstream.GATEWAY]
    urls: dict[Upstream, str] = {each: getattr(settings, f"{each.name.lower()}_url") for each in services}
    opened = OpenedEdge[Route]()
    readiness = Readiness(urls)
    seals = Seals(settings.credential.own_keys(PURPOSE))
    ended = EndedSessions(settings.session_s)
    provider = None
    if settings.oidc_issuer and settings.oidc_keys:
        provider = Provider(settings, read_keys(settings.oidc_keys))
    dashboard = Dashboard(
        seals,
        ended,
        valid_s=settings.session_s,
        zone=settings.zone,
        limiter=AddressLimiter(settings.open_requests_per_s, settings.open_burst),
        provider=provider,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=connector(0, settings.tls), auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            dashboard.keys = keys_of(client_of(session, settings, "admission", timeout_s=3), settings)
            requests, streams = RateLimiter(), ConcurrencyLimiter(settings.max_streams_per_tenant, "streams")
            opened.edge = create_edge(settings, session, urls, dashboard.keys, requests, streams)
            if dashboard.provider is not None:
                dashboard.provider.session = session
            readiness.session = session
            async with shared(requests, streams, ended, settings):
                yield

    app = FastAPI(title="Wattshift", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    add_basics(app, readiness.check)
    add_reference(app)
    dashboard.add_to(app)
    app.add_middleware(EdgeMiddleware, opened=opened)
    app.add_middleware(SessionMiddleware, seals=seals, ended=ended, valid_s=settings.session_s)
    app.add_middleware(OverloadMiddleware, max_requests=settings.max_requests)
    return app


@asynccontextmanager
async def shared(
    requests: RateLimiter, streams: ConcurrencyLimiter, ended: EndedSessions, settings: GatewaySettings
) -> AsyncIterator[None]:
    """Within the block, exchange with other gateways what each lets through and who has signed out."""
    redis = ended.redis = connect(settings.redis_url, settings)
    name = f"gateway-{secrets.token_hex(4)}"
    ours = SharedLimits(redis, GATEWAY_LIMITS_HASH, requests, streams, name, time.time())
    tasks = [
        asyncio.create_task(repeat(ours.look, LIMITS_S, failed="limits.not_shared")),
        asyncio.create_task(repeat(ended.tell, TELL_S, failed="sessions.not_shared")),
    ]
    try:
        yield
    finally:
        await end_tasks(tasks)
        await ours.leave()
        await redis.aclose()


def create_edge(
    settings: GatewaySettings,
    session: aiohttp.ClientSession,
    urls: dict[Upstream, str],
    keys: KeyCache,
    requests: RateLimiter,
    streams: ConcurrencyLimiter,
) -> Edge[Route]:
    tokens = {upstream: outgoing(settings.credential, upstream.name.lower()) for upstream in urls}
    places = Places(f"{settings.host}:{settings.port}", settings.router_url, urls, settings.metrics_instances)
    dispatcher = Dispatcher(
        BodyReader(settings.max_buffered_bytes),
        Gatherer(
            session,
            settings.admission_url,
            tokens=tokens[Upstream.ADMISSION],
            group_entries=settings.group_entries,
            group_bytes=settings.group_bytes,
            groups_in_flight=settings.groups_in_flight,
            timeout_s=settings.submit_timeout_s,
        ),
        Forwarder(
            session,
            urls,
            tokens=tokens,
            connect_timeout_s=settings.connect_timeout_s,
            timeout_s=settings.upstream_timeout_s,
            stream_silence_s=settings.stream_silence_s,
            streams=streams,
            keys=keys,
        ),
        MetricsGatherer(session, places, tokens, Metrics()),
        max_body_bytes=settings.max_body_bytes,
        max_batch_bytes=settings.max_batch_bytes,
    )
    limiter = AddressLimiter(settings.open_requests_per_s, settings.open_burst)
    is_open = OpenRoutes[Route](lambda route: route.tag == "carbon-aware", limiter)
    open_routes = is_open if settings.open_emissions else None
    return Edge(read_routes(), keys, requests, dispatcher.answer, open_routes)


class Readiness:
    """Whether all services behind the gateway are ready."""

    session: aiohttp.ClientSession

    def __init__(self, urls: dict[Upstream, str]) -> None:
        self._urls = urls

    async def check(self) -> None:
        """Check that all services are ready; ``DegradedError`` names some that are not; ``RuntimeError``: none is."""
        found = await asyncio.gather(*(self._is_ready(url) for url in self._urls.values()))
        missing = [name.value for name, ready in zip(self._urls, found, strict=True) if not ready]
        if missing:
            error = DegradedError if any(found) else RuntimeError
            raise error(f"not ready: {', '.join(missing)}")

    async def _is_ready(self, url: str) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=2)
            async with self.session.get(url.rstrip("/") + "/readyz", timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


def add_reference(app: FastAPI) -> None:
    """Add the two forms of the API's description, and a page for each problem code."""
    described = Path(__file__).with_name("openapi.json").read_bytes()

    @cache
    def page() -> str:
        return render(orjson.loads(described))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(described, media_type="application/json")

    @app.get(f"{PROBLEMS}/{{code}}", include_in_schema=False)
    async def problem(code: str) -> HTMLResponse:
        return HTMLResponse(render_problem(code), 200 if code in MEANINGS else 404)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page())


def main() -> None:
    settings = settings_or_exit(GatewaySettings)
    serve(create_app(settings), "gateway", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
