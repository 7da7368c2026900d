"""A snapshot and a plan as JSON values, so that a live round can be recorded; ``lab.replay`` reads it again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from services.core.cycle.plan import Action, Plan, ProfileControls, SetControl, Start, name_of
from services.core.cycle.snapshot import Curves, Gangs, ServiceInstance, SliceJob, Snapshot
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.controls import ControlKind
from services.core.domain.placement import Placement
from services.scheduler.loop import Note
from services.scheduler.planning.snapshot import Loaded

UNRECORDED = ("guests", "shares", "reasons")  #: What ``run_cycle``, a policy's layer or the caller puts in


def recorder() -> Note | None:
    """Return what records the active rounds of a scheduler, if ``SCHEDULER_RECORD_DIR`` names a folder for them."""
    folder = os.environ.get("SCHEDULER_RECORD_DIR")
    return recording_to(Path(folder)) if folder else None


def recording_to(folder: Path) -> Note:
    """Return a function that writes each round to a file of its own."""

    def record(loaded: Loaded, plan: Plan) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        round_record = {
            "policy": loaded.policy,
            "parameters": loaded.parameters,
            "memory": loaded.memory,
            "snapshot": snapshot_to_json(loaded.snapshot),
            "plan": plan_to_json(plan),
        }
        path = folder / f"round-{loaded.snapshot.version:012d}.json"
        path.write_bytes(orjson.dumps(round_record))

    return record


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot as JSON values; NaN and infinity become the strings ``nan`` and ``inf``."""
    known = {name: value for name, value in vars(snapshot).items() if name not in UNRECORDED}
    known["setting_curves"] = [*map(_curves_to_json, known.pop("control_curves"))]
    known["gangs"] = [*map(_gangs_to_json, snapshot.gangs)]
    return {name: _plain(value) for name, value in known.items()}


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case float():
            return value if np.isfinite(value) else str(value)
        case np.ndarray():
            return _plain(value.tolist())  # pyright: ignore[reportUnknownMemberType]
        case Mapping():
            return {key: _plain(each) for key, each in sorted(value.items())}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case frozenset():
            return [*map(_plain, sorted(value))]  # pyright: ignore[reportUnknownArgumentType]
        case tuple() | list():
            return [*map(_plain, value)]  # pyright: ignore[reportUnknownArgumentType]
        case Placement():
            return [[share.node_id, [*share.devices]] for share in value.shares]
        case ServiceInstance() | SliceJob():
            return [*_fields(value).values()]
        case CarbonOutlook():
            return {name: each for name, each in _fields(value).items() if name != "curve"} | _fields(value.curve)
        case _:
            return _fields(value) if is_dataclass(value) else value


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}


def plan_to_json(plan: Plan) -> list[dict[str, Any]]:
    jobs = [
        {"action": name_of(each), "job_id": each.job_id, "reason": each.reason.value} | _details(each)
        for each in plan.actions
    ]
    nodes = [
        {"action": "wake" if each.on else "power_down", "node_id": each.node_id, "reason": each.reason.value}
        for each in plan.nodes
    ]
    return [*jobs, *nodes]


def _details(action: Action) -> dict[str, Any]:
    match action:
        case Start():
            batch = {} if action.batch_size is None else {"batch_size": action.batch_size}
            shares = {"shares": True} if action.shares else {}
            return {"placement": _plain(action.placement), **batch, **shares}
        case SetControl():
            return {"power_limit_w" if action.kind is ControlKind.POWER_LIMIT else "clock_mhz": action.value}
        case ProfileControls():
            return {"kind": action.kind.value, "window_s": action.window_s}
        case _:
            return {}


def _curves_to_json(curves: Curves) -> list[list[Any]]:
    return [[model, kind, each.values, each.speed, each.power_w] for (model, kind), each in sorted(curves.items())]


def _gangs_to_json(gangs: Gangs) -> list[list[Any]]:
    return [
        [model, each.kind, each.values, each.gpus, each.speed, each.power_w, each.power_error]
        for model, each in sorted(gangs.items())
    ]
