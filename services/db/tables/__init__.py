"""Every table, one module per process that writes it. Other processes read."""

from services.db.tables import admission, carbon, scheduler, telemetry

__all__ = ["admission", "carbon", "scheduler", "telemetry"]
