"""Replay a round that was recorded live, the way the engine runs its own rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.core.cycle.plan import Plan
from services.core.cycle.recording import snapshot_from_json
from services.core.cycle.run_cycle import run_cycle
from services.core.policies.registry import build_policy


def replay(record: Mapping[str, Any], *, reasons: bool = True) -> Plan:
    """Return the plan of a recorded round; with ``reasons=False``, as the engine asks for it, without the waiting jobs.

    Args:
        record: What the scheduler records about a round: ``policy``, ``parameters``, ``memory`` and ``snapshot``.
        reasons: Whether holds are part of the plan.
    """
    policy = build_policy(record["policy"], record["parameters"])
    memory = policy.load(record["memory"]) if record["memory"] else policy.initial()
    snapshot = replace(snapshot_from_json(record["snapshot"]), reasons=reasons)
    return run_cycle(policy, snapshot, memory).plan
