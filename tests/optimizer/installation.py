"""An optimizer as it is installed: its service and a worker, on a real PostgreSQL and Valkey."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tests.support import background
from tests.support.background import Installation

QUICK = {
    "OPTIMIZER_LEASE_S": "2",
    "OPTIMIZER_SWEEP_S": "0.3",
    "OPTIMIZER_RESEND_S": "0.5",
    "OPTIMIZER_MAX_PENDING_PER_TENANT": "5",
}


def installed(**env: str) -> AbstractAsyncContextManager[Installation]:
    """Run an installation with these settings."""
    return background.installed(
        "optimizer",
        workers=("worker",),
        env={**QUICK, **env},
        service="optimizer",
        submit_path="/v1/optimize/pools",
        path="/v1/optimize",
        state="state",
        table="solves",
    )
