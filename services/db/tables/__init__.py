"""Every table, one module per process that writes it. Other processes read."""

from services.db.tables import admission, scheduler, telemetry

__all__ = ["admission", "scheduler", "telemetry"]
