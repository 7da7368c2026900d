"""A row that cannot be read, such as one that a later release has stored, costs no list of the API its other rows.

Each list of the public table is asked while its table has a row of nothing but fillings: it is answered, and the row is
in the log, so it was met. A new list has to say in ``PLANTED`` what it reads.
"""

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest
from fastapi import FastAPI

from optimizer_service.app import create_app as optimizer
from optimizer_service.settings import OptimizerSettings
from services.admission.app import create_app as admission
from services.admission.settings import AdmissionSettings
from services.contracts.identity import Identity, Role
from services.kit import readable
from services.scheduler.app import create_app as scheduler
from services.scheduler.settings import SchedulerSettings
from services.serving.app import create_app as serving
from services.serving.settings import ServingSettings
from services.simulator.app import create_app as simulator
from services.simulator.settings import SimulatorSettings
from services.telemetry.app import create_app as telemetry
from services.telemetry.settings import TelemetrySettings
from tests.serving.fleets import a_fleet, an_app
from tests.support.control_plane import client_of
from tests.support.servers import ROOT, fresh_database
from tests.support.tokens import TOKEN, headers_for

ADMIN = Identity(tenant_id="t", role=Role.ADMIN, key_id="key-1")

NOT_STORED = {
    "list_policies": "of the code",
    "list_zones": "of the settings",
    "list_past_intensities": "columns of numbers",
    "list_emissions_by_location": "likewise",
    "list_emissions_by_locations": "likewise",
    "list_best_emissions": "likewise",
    "list_locations": "likewise",
    "report_hours": "sums of the ledger, of which no part may be left out",
    "get_shares": "counts",
}


class Planted(NamedTuple):
    """What a list reads: a table, and columns whose filling would hide the row or be readable, in SQL.

    ``needs`` is what else must be there for it.
    """

    table: str
    columns: Mapping[str, str] = MappingProxyType({})
    needs: tuple[tuple[str, dict[str, str]], ...] = ()


POOL = ("pools", {"name": "'p'", "spec": "'{}'", "created_at": "'2020-01-01'"})
FLEET = ("fleets", {"name": "'f'", "spec": f"'{a_fleet().model_dump_json()}'", "created_at": "'2020-01-01'"})
APP = ("apps", {"name": "'a'", "fleet": "'f'", "spec": f"'{an_app().model_dump_json()}'", "created_at": "'2020-01-01'"})
BAD = {"spec": "'[]'"}
NEVER = {"created_at": "'infinity'"}  #: Not a time that JSON could have

PLANTED = {
    "list_jobs": Planted("jobs"),
    "list_arrays": Planted("job_arrays"),
    "list_tenants": Planted("tenants", {"limits": "'[]'"}),
    "list_keys": Planted("api_keys"),
    "list_audit_entries": Planted("audit_log", {"data": "'[]'"}),
    "list_users": Planted("users", {"account": "'-'"}, (("tenants", {"id": "'t'"}),)),
    "list_budgets": Planted("budgets"),
    "list_webhooks": Planted("webhooks", {"events": "'{x}'"}),
    "list_secrets": Planted("secrets", NEVER),
    "list_cells": Planted("cells", {"added_at": "'infinity'"}),
    "list_solves": Planted("solves"),
    "list_pools": Planted("pools", BAD),
    "list_pool_plans": Planted("pool_plans", {"pool": "'p'"}, (POOL,)),
    "list_pool_instances": Planted("pool_instances", {"pool": "'p'", "state": "'ready'", **NEVER}, (POOL,)),
    "list_pool_clocks": Planted("server_clocks", {}, (POOL, ("pool_instances", {"pool": "'p'", "job_id": "'x'"}))),
    "list_endpoints": Planted("model_endpoints", BAD),
    "list_fleets": Planted("fleets", BAD),
    "list_fleet_plans": Planted("fleet_plans", {"fleet": "'f'"}, (FLEET,)),
    "list_apps": Planted("apps", BAD),
    "list_app_instances": Planted("pool_instances", {"pool": "'app:a'", "state": "'ready'"}, (APP,)),
    "list_plans": Planted("plans", {"round": "1000000", "actions": "'{}'"}),
    "list_length_models": Planted("length_models", {"evaluation": "'[]'"}),
    "list_engines": Planted("engines"),
    "list_days_of_engine": Planted(
        "engine_savings",
        {"engine": "'e'", "day": "current_date", "carbon_gco2": "'NaN'"},
        (("engines", {"name": "'e'"}),),
    ),
    "list_jobs_of_engine": Planted(
        "engine_jobs",
        {"engine": "'e'", "job_id": "'x'"},
        (("engines", {"name": "'e'"}), ("jobs", {"id": "'x'", "state": "'queued'"})),
    ),
    "list_grid_orders": Planted("grid_orders", {"steps": "'[1]'"}),
    "list_reservations": Planted("reservations", {"tenant_id": "NULL", "gpus": "'[]'"}),
    "list_simulations": Planted("simulations"),
    "list_nodes": Planted("nodes"),
    "export_past_jobs": Planted("jobs", {"state": "'x'"}),
    "list_batches": Planted("batches", {"errors": "'[1]'"}),
    "list_files": Planted("batch_files", {"is_complete": "true", "expires_at": "'2100-01-01'", "filename": "NULL"}),
}
NAMES = {"pool": "p", "fleet": "f", "app": "a", "tenant_id": "t", "name": "e"}

REFERENCE = re.compile(r'"(#/components/schemas/[^"]+)"')
FILLINGS = {
    "ARRAY": "'{}'",
    "boolean": "false",
    "bytea": "''",
    "date": "now()",
    "jsonb": "'{}'",
    "json": "'{}'",
    "text": "'x'",
    "timestamp with time zone": "now()",
}
FREE = """
DO $$ DECLARE c record; BEGIN
    FOR c IN SELECT conrelid::regclass AS of, conname FROM pg_constraint WHERE contype = 'c' AND conrelid <> 0 LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', c.of, c.conname);
    END LOOP;
END $$
"""


def lists() -> dict[str, tuple[str, str]]:
    """Return the service and the path of every public list, and of those that routers show."""
    described = json.loads((ROOT / "gateway/openapi.json").read_text())
    schemas = described["components"]["schemas"].items()
    pages = {f"#/components/schemas/{name}" for name, schema in schemas if "items" in schema.get("properties", {})}
    is_list = {
        operation["operationId"]: not pages.isdisjoint(REFERENCE.findall(json.dumps(operation["responses"])))
        for path in described["paths"].values()
        for operation in path.values()
    }
    found = {f"list_{name}": ("SERVING", f"/internal/openai/v1/{name}") for name in ("batches", "files")}
    for route in json.loads((ROOT / "gateway/routes.json").read_text()):
        name = route["operation"]
        if route["method"] == "GET" and (name.startswith("list_") or is_list.get(name)):
            found[name] = route["to"], route["path"]
    return found


class Site(NamedTuple):
    """All services in this process, and a hand in their database, which keeps no value out."""

    services: dict[str, httpx.AsyncClient]
    database: asyncpg.Connection

    async def plant(self, table: str, columns: Mapping[str, str]) -> None:
        """Add a row; columns that must have a value and are not given one are filled."""
        known = await self.database.fetch(
            "SELECT column_name AS name, data_type AS type FROM information_schema.columns"
            " WHERE table_name = $1 AND is_nullable = 'NO' AND column_default IS NULL AND is_identity = 'NO'"
            " AND is_generated = 'NEVER'",
            table,
        )
        filled = {row["name"]: FILLINGS.get(row["type"], "1") for row in known}
        if "tenant_id" in filled:
            filled["tenant_id"] = "'t'"
        filled |= columns
        for name in [each for each, value in filled.items() if value == "NULL"]:
            await self.database.execute(f"ALTER TABLE {table} ALTER COLUMN {name} DROP NOT NULL")
        await self.database.execute(f"INSERT INTO {table} ({', '.join(filled)}) VALUES ({', '.join(filled.values())})")


@pytest.fixture(scope="module")
async def site(postgres_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    url = fresh_database(postgres_url)
    shared: dict[str, Any] = {"database_url": url, "redis_url": redis_url, "service_token": TOKEN}
    folder: Path = tmp_path_factory.mktemp("site")
    made: dict[str, Callable[[], FastAPI]] = {
        "ADMISSION": lambda: admission(AdmissionSettings(**shared, data_dir=folder)),
        "OPTIMIZER": lambda: optimizer(OptimizerSettings(**shared)),
        "SCHEDULER": lambda: scheduler(SchedulerSettings(**shared)),
        "SERVING": lambda: serving(ServingSettings(**shared)),
        "SIMULATOR": lambda: simulator(SimulatorSettings(**shared)),
        "TELEMETRY": lambda: telemetry(TelemetrySettings(**shared, join_token=TOKEN)),
    }
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())  # the other tests of this process have no lab
        for module in ("scheduler", "simulator"):
            patch.setattr(f"services.{module}.app.load_policies", lambda: None)
        database = await asyncpg.connect(url)
        stack.push_async_callback(database.close)
        await database.execute(FREE)
        await database.execute("SET session_replication_role = replica")  # no row needs those that it names
        services = {name: await stack.enter_async_context(client_of(make())) for name, make in made.items()}
        yield Site(services, database)


def test_every_list_is_known() -> None:
    assert {*lists()} == {*PLANTED, *NOT_STORED}


@pytest.mark.parametrize("name", PLANTED)
async def test_a_list_survives_rows_that_cannot_be_read(
    site: Site, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    service, path = lists()[name]
    planted = PLANTED[name]
    for table, columns in planted.needs:
        await site.plant(table, columns)
    await site.plant(planted.table, planted.columns)
    readable._say_once.cache_clear()  # pyright: ignore[reportPrivateUsage]

    headers = headers_for(service.lower(), ADMIN)
    if path.startswith("/internal"):
        headers = headers_for(service.lower(), ADMIN.model_copy(update={"role": Role.USER}), issuer="router")
    try:
        answer = await site.services[service].get(path.format(**NAMES), headers=headers)
    finally:
        for table in (planted.table, *(each for each, _ in planted.needs)):
            await site.database.execute(f"DELETE FROM {table}")
    assert answer.status_code == 200, answer.text
    assert "row.unreadable" in [each.message for each in caplog.records], f"it was read: {answer.text}"
