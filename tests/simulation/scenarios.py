"""The scenarios, by name."""

from __future__ import annotations

from tests.simulation import apps, edge, node, reports, router, serving, submissions, system, webhooks, work
from tests.simulation.search import Play

SCENARIOS: dict[str, Play] = {
    "router": router.play,
    "apps": apps.play,
    "submissions": submissions.play,
    "reports": reports.play,
    "keys": reports.keys,
    "edge": edge.play,
    "node": node.play,
    "serving": serving.play,
    "webhooks": webhooks.play,
    "work": work.play,
}

ALL: dict[str, Play] = SCENARIOS | {"system": system.play}
"""Also the one that needs a PostgreSQL; ``test_system.py`` runs it."""
