"""A telemetry in this process with a carbon service to be, on a database of the test module's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count

import httpx
import pytest

from services.db.database import Database
from tests.support.carbon import FakeCarbon
from tests.support.control_plane import FakeAgent, running_telemetry, telemetry_settings
from tests.support.ledger import delete_rows

SECRETS_KEY = "k" * 32
_zones = count(1)


@dataclass
class Plane:
    """What a test has at hand."""

    http: httpx.AsyncClient
    database: Database
    carbon: FakeCarbon
    zone: str = "none"

    async def agent(self, node_id: str = "n0", **options) -> FakeAgent:
        """Return a registered agent that has been heard of once, in a zone that nobody has asked about before."""
        agent = FakeAgent(self.http, node_id, **{"zone": self.zone, **options})
        await agent.register()
        await agent.beat()
        return agent


@pytest.fixture(scope="module")
async def module_plane(database_url: str, redis_url: str) -> AsyncIterator[Plane]:
    async with FakeCarbon().serve() as carbon:
        settings = telemetry_settings(
            database_url, redis_url, carbon_url=carbon.url, lease_ttl_s=0.3, secrets_key=SECRETS_KEY
        )
        database = await Database.open(database_url, size=4)
        async with running_telemetry(settings) as http:
            yield Plane(http, database, carbon)
        await database.close()


TABLES = (
    "node_power, node_power_periods, node_zones, "
    "energy_intervals, metered_days, folded_intervals, job_footprints, job_profiles, "
    "job_progress, server_clocks, rank_statuses, rank_ends, nodes, node_credentials, node_enrolments, "
    "gpu_partitions, engines, engine_jobs, device_claims, allocations, jobs, audit_log"
)


@pytest.fixture
async def plane(module_plane: Plane) -> Plane:
    await delete_rows(module_plane.database, TABLES)
    module_plane.carbon.flat(360.0)
    module_plane.carbon.is_down = False
    module_plane.carbon.has_zone = True
    module_plane.carbon.outlook_from_s = 0.0
    return replace(module_plane, zone=f"Z{next(_zones)}")
