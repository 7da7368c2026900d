"""The public API as one table: which path goes to which service, who may ask, and what goes in and comes out.

An endpoint is registered in two places: its row here, and its function in the service that answers it. Both state
method, path, role and types, the function by its signature (the role is ``Caller``, ``Operator`` or ``Admin`` of
``services.kit.identity``). ``tests/architecture/test_routes.py`` fails where one is missing or they differ.
"""

from __future__ import annotations

from gateway.routes.access import ACCESS, WEBHOOKS
from gateway.routes.apps import APPS
from gateway.routes.arrays import ARRAYS
from gateway.routes.carbon import CARBON, CARBON_AWARE
from gateway.routes.cluster import NODES, POLICIES, REPORTS
from gateway.routes.endpoints import ENDPOINTS
from gateway.routes.inputs import INPUTS
from gateway.routes.jobs import JOBS, SUBMIT, SUBMIT_BATCH
from gateway.routes.metrics import METRICS
from gateway.routes.pools import POOLS
from gateway.routes.route import EVENTS, JSON, LINES, TEXT, Route, Status, Upstream
from gateway.routes.work import OPTIMIZER, SIMULATIONS

__all__ = [
    "CARBON_AWARE",
    "EVENTS",
    "JSON",
    "LINES",
    "METRICS",
    "ROUTES",
    "SUBMIT",
    "SUBMIT_BATCH",
    "TEXT",
    "Route",
    "Status",
    "Upstream",
]

ROUTES: tuple[Route, ...] = (
    *JOBS,
    *INPUTS,
    *ARRAYS,
    *ACCESS,
    *WEBHOOKS,
    *NODES,
    *REPORTS,
    *POLICIES,
    *CARBON,
    *CARBON_AWARE,
    *OPTIMIZER,
    *POOLS,
    *APPS,
    *ENDPOINTS,
    *SIMULATIONS,
    METRICS,
)
