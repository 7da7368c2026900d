"""``GET /metrics``: what all processes measure, gathered for an operator's Prometheus.

Services show themselves to the gateway alone, so that one address and one key suffice. Every line says whose it is, by
``service`` and ``instance``; ``wattshift_service_up`` is 0 for those that do not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

import aiohttp
from pydantic import ValidationError

from gateway.routes import Upstream
from services.contracts.identity import ResolvedKey
from services.contracts.queries import MetricsQuery
from services.kit.edge.exchange import Exchange
from services.kit.metrics import MEDIA_TYPE, Metrics
from services.kit.problems import validation_problem
from services.kit.scraping import SERVICE_UP, merged, place_of, scraped
from services.kit.tokens import Outgoing

ROUTER = "router"


@dataclass(frozen=True)
class Places:
    """Where the processes are: this gateway, the router, and the services."""

    gateway: str
    router_url: str
    urls: Mapping[Upstream, str]


class MetricsGatherer:
    """Asks every service, and adds the gateway's own figures."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        places: Places,
        tokens: Mapping[Upstream, Outgoing],
        own: Metrics,
    ) -> None:
        self._session = session
        self._places = places
        self._tokens = tokens
        self._own = own

    async def answer(self, exchange: Exchange, key: ResolvedKey) -> None:
        """Answer with the figures of the services and the router, or of the agents if the query asks for these.

        Raises:
            ProblemError: 422 for a query that is not valid.
        """
        query = _query(exchange.scope["query_string"])
        text = await (self._of_agents(key) if query.agents else self._of_services(exchange, key))
        await exchange.answer(200, [(b"content-type", MEDIA_TYPE.encode())], text.encode())

    async def _of_agents(self, key: ResolvedKey) -> str:
        url, tokens = self._places.urls[Upstream.ADMISSION], self._tokens[Upstream.ADMISSION]
        found = await scraped(self._session, url.rstrip("/") + "/internal/agents/metrics", tokens.headers(key.identity))
        return found or ""

    async def _of_services(self, exchange: Exchange, key: ResolvedKey) -> str:
        asked = {
            upstream.name.lower(): (url, self._tokens[upstream].headers(key.identity))
            for upstream, url in self._places.urls.items()
        }
        # The router knows keys itself.
        authorization = exchange.headers.get(b"authorization", b"").decode("latin-1")
        asked[ROUTER] = self._places.router_url, {"authorization": authorization}
        found = await asyncio.gather(
            *(scraped(self._session, url.rstrip("/") + "/metrics", headers) for url, headers in asked.values())
        )
        own = (await self._own.text()).decode()
        parts = [({"service": "gateway", "instance": self._places.gateway}, SERVICE_UP.format(1) + own)]
        for (service, (url, _)), text in zip(asked.items(), found, strict=True):
            up = SERVICE_UP.format(int(text is not None))
            parts.append(({"service": service, "instance": place_of(url)}, up + (text or "")))
        return await asyncio.to_thread(merged, parts)


def _query(query_string: bytes) -> MetricsQuery:
    given = {name: values[-1] for name, values in parse_qs(query_string.decode("latin-1")).items()}
    try:
        return MetricsQuery.model_validate_strings(given)
    except ValidationError as error:
        raise validation_problem([{**each, "loc": ("query", *each["loc"])} for each in error.errors()]) from error
