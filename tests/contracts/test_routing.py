"""The routing table, as routers of this release and of the one before read it."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import FastAPI
from fastapi.testclient import TestClient

from services.contracts.routing import RoutedApp, RoutedAppServer, RoutingTable


def a_table(**more: object) -> RoutingTable:
    return RoutingTable.model_validate({"made_at": datetime.now(UTC), "pools": [], "servers": [], **more})


def test_a_table_without_applications_has_the_fields_of_the_release_before() -> None:
    service = FastAPI()
    service.add_api_route("/table", lambda: a_table(), response_model=RoutingTable)
    with TestClient(service) as http:
        assert set(http.get("/table").json()) == {"made_at", "pools", "servers"}


def test_a_table_with_applications_comes_back_as_it_was() -> None:
    app = RoutedApp(name="images", tenant_id="acme", sla_p95_ms=30, most_accurate="b7")
    server = RoutedAppServer(
        **{"id": "instance_1", "app": "images", "variant": "b1", "accuracy_pct": 79.1, "slice": "2g"},
        **{"url": "http://127.0.0.1:9000", "state": "ready", "location": "here"},
    )
    table = a_table(apps=[app], app_servers=[server])
    assert RoutingTable.model_validate_json(table.model_dump_json()) == table
