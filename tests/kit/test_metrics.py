"""What every process shows at ``/metrics``, and how several of them become one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.contracts.identity import Identity, Role
from services.kit.app import create_service
from services.kit.credentials import Credential, roots_of
from services.kit.metrics import KEPT_S, Bounded, Metrics, gauge, single
from services.kit.scraping import SERVICE_UP, merged
from services.kit.settings import SharedSettings
from services.kit.tokens import Incoming
from tests.support.tokens import headers_for

TOKEN = "a-token-of-sixteen-and-more"


def values(text: bytes | str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples of a text by name and labels, as Prometheus' own parser reads them."""
    shown = text if isinstance(text, str) else text.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
    }


def at(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_a_figure_is_read_when_asked_for_and_kept_for_a_moment() -> None:
    now_s, reads = 100.0, 0

    async def read() -> Iterable[Metric]:
        nonlocal reads
        reads += 1
        return [single("wattshift_x", "x", reads), single("wattshift_unknown", "not known", None)]

    metrics = Metrics(CollectorRegistry(), lambda: now_s)
    metrics.add("x", read)

    first, again = values(await metrics.text()), values(await metrics.text())
    now_s += KEPT_S
    later = values(await metrics.text())

    assert (first[at("wattshift_x")], again[at("wattshift_x")], later[at("wattshift_x")]) == (1, 1, 2)
    assert at("wattshift_unknown") not in first


async def test_what_cannot_be_read_is_left_out_and_said() -> None:
    async def fails() -> Iterable[Metric]:
        raise OSError("the database is away")

    async def reads() -> Iterable[Metric]:
        return [gauge("wattshift_y", "y", ["of"], [(("a",), 2.0)])]

    metrics = Metrics(CollectorRegistry())
    metrics.add("broken", fails)
    metrics.add("whole", reads)

    found = values(await metrics.text())

    assert found[at("wattshift_y", of="a")] == 2
    assert found[at("wattshift_metrics_source_up", source="broken")] == 0
    assert found[at("wattshift_metrics_source_up", source="whole")] == 1


def test_labels_stay_few() -> None:
    bounded = Bounded(2)

    assert [bounded("a", "p"), bounded("b", "p")] == [("a", "p"), ("b", "p")]
    assert bounded("c", "p") == ("other", "other")
    assert bounded("a", "p") == ("a", "p")


def test_texts_of_several_become_one_with_each_familys_head_once() -> None:
    one = '# HELP w_a It is {a}.\n# TYPE w_a gauge\nw_a{x="}{ \\"1\\""} 1\n# HELP w_b b\n# TYPE w_b gauge\nw_b 2\n'
    other = "# HELP w_b b\n# TYPE w_b gauge\nw_b 3\n# HELP w_a It is {a}.\n# TYPE w_a gauge\nw_a{} 4\n"

    text = merged([({"instance": "one"}, one), ({"instance": 'the "other"'}, other)])

    assert text.count("# TYPE w_a") == text.count("# HELP w_b") == 1
    assert values(text) == {
        at("w_a", x='}{ "1"', instance="one"): 1,
        at("w_b", instance="one"): 2,
        at("w_b", instance='the "other"'): 3,
        at("w_a", instance='the "other"'): 4,
    }


def test_one_that_does_not_answer_is_there_as_such() -> None:
    parts = [({"service": "a"}, SERVICE_UP.format(1)), ({"service": "b"}, SERVICE_UP.format(0))]

    assert values(merged(parts)) == {at("wattshift_service_up", service=name): up for name, up in (("a", 1), ("b", 0))}


@asynccontextmanager
async def nothing(_: FastAPI):
    yield


async def test_a_service_shows_its_figures_to_operators_through_the_gateway_alone() -> None:
    async def readiness() -> None: ...

    incoming = Incoming("carbon", Credential.derived("carbon", roots_of(TOKEN)).secrets)
    settings = SharedSettings(WATTSHIFT_SERVICE_TOKEN=TOKEN)
    app = create_service("a service", settings, lifespan=nothing, readiness=readiness, incoming=incoming)

    @app.get("/v1/carbon/{zone}/current")
    async def current(zone: str) -> str:
        return zone

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://a") as http:

        async def ask(path: str, role: Role | None, issuer: str = "gateway") -> httpx.Response:
            who = role and Identity(tenant_id="ops", role=role, key_id="key")
            return await http.get(path, headers=headers_for("carbon", who, issuer=issuer, root=TOKEN) if who else {})

        statuses = [
            (await ask("/metrics", None)).status_code,
            (await ask("/metrics", Role.USER)).status_code,
            (await ask("/metrics", Role.OPERATOR, "scheduler")).status_code,
        ]
        await ask("/v1/carbon/DE/current", Role.USER)
        shown = await ask("/metrics", Role.OPERATOR)

    assert statuses == [401, 403, 403]
    assert shown.headers["content-type"].startswith("text/plain; version=0.0.4")
    name = "wattshift_http_request_duration_seconds_count"
    assert values(shown.text)[at(name, method="GET", route="/v1/carbon/{zone}/current", status="200")] >= 1
    assert "/v1/carbon/DE" not in shown.text
    assert all(line.startswith(("#", "wattshift_")) for line in shown.text.splitlines())
