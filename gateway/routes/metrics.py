"""What the processes measure."""

from __future__ import annotations

from gateway.routes.route import TEXT, Route, Upstream
from services.contracts import queries
from services.contracts.identity import Role

METRICS = Route(
    "GET",
    "/metrics",
    Role.OPERATOR,
    Upstream.TELEMETRY,
    "metrics",
    "Get the figures of all processes, for Prometheus",
    "In Prometheus' text format; `service` and `instance` say whose a figure is.",
    operation="get_metrics",
    query=queries.MetricsQuery,
    media=TEXT,
)
"""The gateway itself answers it: it asks all of its services."""
