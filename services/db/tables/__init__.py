"""Every table, one module per process that writes it. Other processes read."""

from services.db.tables import (
    admission,
    apps,
    carbon,
    engines,
    optimizer,
    pools,
    predictions,
    scheduler,
    schema,
    simulator,
    telemetry,
)

__all__ = [
    "admission",
    "apps",
    "carbon",
    "engines",
    "optimizer",
    "pools",
    "predictions",
    "scheduler",
    "schema",
    "simulator",
    "telemetry",
]
