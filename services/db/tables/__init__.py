"""Tables that SQLAlchemy expressions name, one module per process that writes them. Other processes read them.

Those that only plain SQL names are described in ``described.sql``.
"""

from services.db.tables import admission, apps, carbon, optimizer, pools, predictions, simulator, telemetry

__all__ = ["admission", "apps", "carbon", "optimizer", "pools", "predictions", "simulator", "telemetry"]
