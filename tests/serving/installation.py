"""An installation that plans pools: serving, the carbon service, the optimizer and the worker that solves plans."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from services.db.database import connect
from tests.support import background
from tests.support.background import Installation

QUICK = {
    "OPTIMIZER_LEASE_S": "2",
    "OPTIMIZER_SWEEP_S": "0.3",
    "OPTIMIZER_RESEND_S": "0.5",
    "SERVING_LEASE_S": "2",
    "SERVING_SWEEP_S": "0.3",
    "SERVING_PLAN_INTERVAL_S": "604800",  # so that no slot begins while a test runs
    "SERVING_PLAN_LEAD_S": "0",
    "SERVING_PLAN_LOOK_S": "0.1",
    "SERVING_PLAN_RETRY_S": "0.2",
    "SERVING_CARBON_TIMEOUT_S": "1",
    "SERVING_INSTANCE_LOOK_S": "604800",  # plans alone: nothing is started
}


def installed(**env: str) -> AbstractAsyncContextManager[Installation]:
    """Run an installation with these settings."""
    return background.installed(
        *("carbon", "optimizer", "serving"),
        workers=("plan-solver",),
        env={**QUICK, **env},
        service="serving",
        submit_path="",
        path="",
        state="state",
        table="pool_plans",
    )


@asynccontextmanager
async def database_of(installation: Installation) -> AsyncIterator[Any]:
    """Yield a connection that speaks the project's JSON."""
    connection = await connect(installation.stack.environment["DATABASE_URL"], application_name="test")
    try:
        yield connection
    finally:
        await connection.close()
