"""``/metrics`` has the figures of every process of a service, whether its name or a setting leads to several."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from yarl import URL

from gateway.metrics import Instance, instances_at
from gateway.settings import GatewaySettings
from services.contracts.identity import Role
from tests.gateway.peer import a_peer
from tests.gateway.public import a_gateway, authorization


def shows(value: int) -> Any:
    """Return a process with one figure."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=f"# HELP wattshift_x x\n# TYPE wattshift_x gauge\nwattshift_x {value}\n")

    return answer


def by_instance(text: str, name: str, service: str) -> dict[str, float]:
    """Return the values of a figure of a service, by instance."""
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {
        each.labels["instance"]: each.value
        for each in samples
        if each.name == name and each.labels["service"] == service
    }


async def test_all_processes_that_are_named_are_asked() -> None:
    async with a_peer(shows(1)) as one, a_peer(shows(2)) as two:
        named = {"router": (one, two, "http://127.0.0.1:1"), "scheduler": (two,)}
        async with a_gateway(shows(0), metrics_instances=named) as client:
            text = (await client.get("/metrics", headers=authorization(Role.OPERATOR))).text

    places = [url.removeprefix("http://") for url in (one, two)]
    assert by_instance(text, "wattshift_x", "router") == {places[0]: 1, places[1]: 2}
    assert by_instance(text, "wattshift_service_up", "router") == {places[0]: 1, places[1]: 1, "127.0.0.1:1": 0}
    assert by_instance(text, "wattshift_x", "scheduler") == {places[1]: 2}
    assert list(by_instance(text, "wattshift_x", "telemetry").values()) == [0]


async def test_gateways_that_are_named_show_their_own_figures_once() -> None:
    async with a_gateway(shows(0)) as other:
        place = str(other.base_url).removeprefix("http://").rstrip("/")
        async with a_gateway(shows(0), metrics_instances={"gateway": (f"http://{place}",)}) as client:
            text = (await client.get("/metrics", headers=authorization(Role.OPERATOR))).text

    assert by_instance(text, "wattshift_service_up", "gateway") == {place: 1}
    assert list(by_instance(text, "wattshift_service_up", "telemetry").values()) == [1]


async def test_a_name_with_several_addresses_stands_for_as_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is the one thing that is not real: no name of a test machine has several addresses."""
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *rest: Any, **options: Any) -> Any:
        found = {"routers.test": ["10.0.0.2", "10.0.0.1", "10.0.0.2"], "one.test": ["10.0.0.1"]}.get(host)
        if found is None:
            return real(host, port, *rest, **options)
        also = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", port, 0, 0))]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found] + also

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    assert await instances_at("router", "https://routers.test:8050") == [
        Instance("router", URL(f"https://10.0.0.{n}:8050"), "routers.test") for n in (1, 2)
    ]
    for alone in ("unix://router", "http://one.test:8050", "http://nowhere.invalid:8050", "http://127.0.0.1:8050"):
        assert await instances_at("router", alone) == [Instance("router", URL(alone))]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"routers": ["http://h:1"]}, "routers is no service"),
        ({"router": ["h:1"]}, "pattern"),
        ({"router": 1}, "tuple"),
    ],
)
def test_a_setting_that_is_wrong_is_said_to_be(given: Any, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GatewaySettings(metrics_instances=given)
