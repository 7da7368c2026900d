"""``GET /metrics``: the metrics of all processes, gathered for an operator's Prometheus.

Services show theirs only to the gateway, so that one address and one key suffice. Every line names its process, by
``service`` and ``instance``; ``wattshift_service_up`` is 0 for those that do not answer. A service that runs several
times has several addresses, from DNS or from a setting, and all of them are asked.
"""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from urllib.parse import parse_qs

import aiohttp
from pydantic import ValidationError
from yarl import URL

from gateway.routes import Upstream
from services.contracts.identity import ResolvedKey
from services.contracts.queries import MetricsQuery
from services.kit.edge.exchange import Exchange
from services.kit.metrics import MEDIA_TYPE, Metrics
from services.kit.problems import validation_problem
from services.kit.scraping import SERVICE_UP, merged, place_of, scraped
from services.kit.sockets import SCHEME
from services.kit.tokens import Outgoing

PATH = "metrics"
GATEWAY = "gateway"
ROUTER = "router"
SERVICES = frozenset({ROUTER, *(upstream.name.lower() for upstream in Upstream)})
RESOLVED_WITHIN_S = 2.0


@dataclass(frozen=True)
class Places:
    """Where the processes are: this gateway, the router, the services, and the instances that an operator listed."""

    gateway: str
    router_url: str
    urls: Mapping[Upstream, str]
    instances: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Instance:
    """One process: its address, and the name in its certificate if that differs."""

    service: str
    url: URL
    host: str | None = None


async def instances_at(service: str, url: str) -> list[Instance]:
    """Return one process per address that the host name resolves to, in one family; one if there are fewer than two."""
    place = URL(url)
    if place.scheme == SCHEME:
        return [Instance(service, place)]
    try:
        async with asyncio.timeout(RESOLVED_WITHIN_S):
            found = await asyncio.get_running_loop().getaddrinfo(place.host or "", place.port, type=socket.SOCK_STREAM)
    except (TimeoutError, OSError):
        found = []
    hosts = list(dict.fromkeys(str(address[0]) for family, _, _, _, address in found if family == found[0][0]))
    if len(hosts) < 2:
        return [Instance(service, place)]
    return [Instance(service, place.with_host(host), place.host) for host in sorted(hosts)]


@dataclass
class MetricsGatherer:
    """Asks every service for its metrics, and adds the gateway's own."""

    session: aiohttp.ClientSession
    places: Places
    tokens: Mapping[Upstream, Outgoing]
    own: Metrics

    async def answer(self, exchange: Exchange, key: ResolvedKey) -> None:
        """Answer with the metrics of the services and the router, or of the agents if the query asks for them.

        Raises:
            ProblemError: 422 for an invalid query.
        """
        query = _query(exchange.scope["query_string"])
        if query.own:
            text = (await self.own.text()).decode()
        else:
            text = await (self._of_agents(key) if query.agents else self._of_services(exchange, key))
        await exchange.answer(200, [(b"content-type", MEDIA_TYPE.encode())], text.encode())

    async def _of_agents(self, key: ResolvedKey) -> str:
        url, tokens = self.places.urls[Upstream.ADMISSION], self.tokens[Upstream.ADMISSION]
        found = await scraped(self.session, url.rstrip("/") + "/internal/agents/metrics", tokens.headers(key.identity))
        return found or ""

    async def _of_services(self, exchange: Exchange, key: ResolvedKey) -> str:
        # The router and other gateways know keys themselves.
        by_key = {"authorization": exchange.headers.get(b"authorization", b"").decode("latin-1")}
        headers = {up.name.lower(): tokens.headers(key.identity) for up, tokens in self.tokens.items()}
        asked = await self._instances()
        found = await asyncio.gather(*(self._scraped(each, headers.get(each.service, by_key)) for each in asked))
        parts: list[tuple[Mapping[str, str], str]] = []
        if GATEWAY not in self.places.instances:
            own = (await self.own.text()).decode()
            parts.append(({"service": GATEWAY, "instance": self.places.gateway}, SERVICE_UP.format(1) + own))
        for each, text in zip(asked, found, strict=True):
            up = SERVICE_UP.format(int(text is not None))
            parts.append(({"service": each.service, "instance": place_of(each.url)}, up + (text or "")))
        return await asyncio.to_thread(merged, parts)

    async def _instances(self) -> list[Instance]:
        """Return all processes to ask: the listed ones, and for other services all that their names resolve to."""
        named = self.places.instances
        urls = {up.name.lower(): url for up, url in self.places.urls.items()} | {ROUTER: self.places.router_url}
        found = [Instance(service, URL(url)) for service, given in named.items() for url in given]
        resolved = (instances_at(service, url) for service, url in urls.items() if service not in named)
        return [*found, *chain.from_iterable(await asyncio.gather(*resolved))]

    async def _scraped(self, instance: Instance, headers: Mapping[str, str]) -> str | None:
        url = instance.url / PATH if instance.service != GATEWAY else (instance.url / PATH) % {"own": "true"}
        return await scraped(self.session, url, headers, instance.host)


def _query(query_string: bytes) -> MetricsQuery:
    given = {name: values[-1] for name, values in parse_qs(query_string.decode("latin-1")).items()}
    try:
        return MetricsQuery.model_validate_strings(given)
    except ValidationError as error:
        raise validation_problem([{**each, "loc": ("query", *each["loc"])} for each in error.errors()]) from error
