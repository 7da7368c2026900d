"""A simulator as it is installed: its service and worker, telemetry, the carbon service, on real servers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from tests.support import background
from tests.support.background import Installation

QUICK = {
    "SIMULATOR_LEASE_S": "2",
    "SIMULATOR_SWEEP_S": "0.3",
    "SIMULATOR_RESEND_S": "0.5",
    "SIMULATOR_MAX_PENDING_PER_TENANT": "5",
    "SIMULATOR_MAX_JOBS": "20000",
    "SIMULATOR_MAX_GPUS": "5000",
    "SIMULATOR_MAX_FILE_BYTES": "100000",
}


def installed(**env: str) -> AbstractAsyncContextManager[Installation]:
    """Run an installation with these settings."""
    return background.installed(
        *("carbon", "simulator", "telemetry"),
        workers=("simulator-worker",),
        env={**QUICK, **env},
        service="simulator",
        submit_path="/v1/simulations",
        path="/v1/simulations",
        state="status",
        table="simulations",
    )


def a_run(**options: Any) -> dict[str, Any]:
    """Return a run of some dozen jobs."""
    day = {"policy": "fifo", "jobs": "green-day", "carbon": "GB", "start": "2023-08-01", "days": 0.2}
    return {**day, **options}


def a_long_run(seed: int) -> dict[str, Any]:
    """Return a run of some seconds."""
    return a_run(policy="green,las,fifo", jobs="green-year", days=4, seed=seed)
