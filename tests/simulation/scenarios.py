"""The scenarios, by name."""

from __future__ import annotations

from tests.simulation import (
    apps,
    batches,
    cells,
    edge,
    node,
    picking,
    registrar,
    reports,
    rounds,
    router,
    serving,
    submissions,
    system,
    webhooks,
    work,
)
from tests.simulation.search import Play

SCENARIOS: dict[str, Play] = {
    "router": router.play,
    "crowd": router.crowd,
    "limits": router.limits,
    "budgets": router.budgets,
    "picking": picking.play,
    "registrar": registrar.play,
    "apps": apps.play,
    "submissions": submissions.play,
    "reports": reports.play,
    "keys": reports.keys,
    "tasks": reports.tasks,
    "edge": edge.play,
    "node": node.play,
    "measuring": node.measuring,
    "rounds": rounds.play,
    "serving": serving.play,
    "pods": serving.pods,
    "webhooks": webhooks.play,
    "work": work.play,
}

ALL: dict[str, Play] = SCENARIOS | {"batches": batches.play, "cells": cells.play, "system": system.play}
"""Also those that need a PostgreSQL; ``test_system.py`` runs them."""
