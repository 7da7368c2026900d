"""A snapshot and a plan as JSON values, so that a live round can be recorded; ``lab.replay`` reads it again."""

from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.core.cycle.plan import ACTION_NAMES, Action, Plan, ProfileControls, SetClock, SetPowerLimit, Start
from services.core.cycle.snapshot import Curves, Gangs, JobTable, NodeTable, Snapshot
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.gangs import GangTable
from services.core.domain.placement import Placement


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot as JSON values; NaN and infinity become the strings ``nan`` and ``inf``."""
    return {
        "version": snapshot.version,
        "now_s": snapshot.now_s,
        "trigger": snapshot.trigger.value,
        "gpu_models": list(snapshot.gpu_models),
        "jobs": _table_to_json(snapshot.jobs),
        "nodes": _table_to_json(snapshot.nodes),
        "outlooks": [_outlook_to_json(outlook) for outlook in snapshot.outlooks],
        "tenant_gpu_quota": snapshot.tenant_gpu_quota,
        "tenant_weights": dict(snapshot.tenant_weights),
        "tenant_guarantees": dict(snapshot.tenant_guarantees),
        "undivided": sorted(snapshot.undivided),
        "speed_curves": snapshot.speed_curves.tolist(),
        "setting_curves": [_curves_to_json(curves) for curves in snapshot.control_curves],
        "settable": [sorted(kinds) for kinds in snapshot.settable],
        "gangs": [_gangs_to_json(gangs) for gangs in snapshot.gangs],
        "idle_w": snapshot.idle_w.tolist(),
        "host_w": snapshot.host_w.tolist(),
        "next_active_s": _plain(snapshot.next_active_s),
        "placement": snapshot.placement,
        "graphs": {job_id: asdict(graph) for job_id, graph in sorted(snapshot.graphs.items())},
        "network": asdict(snapshot.network),
        "transfer": asdict(snapshot.transfer),
        "length_spreads": dict(sorted(snapshot.length_spreads.items())),
        "measured_w": _plain(snapshot.measured_w),
        "measures": snapshot.measures,
        "measuring": None if snapshot.measuring is None else sorted(snapshot.measuring),
        "goodput_curves": snapshot.goodput_curves.tolist(),
        "goodput_batches": snapshot.goodput_batches.tolist(),
        "goodput_gains": snapshot.goodput_gains.tolist(),
        "services": [[each.job_id, each.gpus, each.nodes.tolist()] for each in snapshot.services],
        "services_gpus": snapshot.services_gpus,
        "services_w": snapshot.services_w,
        "slice_units": [asdict(unit) for unit in snapshot.slice_units],
        "slice_jobs": [[each.job_id, each.sevenths, each.units.tolist()] for each in snapshot.slice_jobs],
        "shared": [list(pair) for pair in snapshot.shared],
        "gpu_memory_gib": snapshot.gpu_memory_gib.tolist(),
        "orders": [{name: _plain(value) for name, value in asdict(order).items()} for order in snapshot.orders],
        "windows": [asdict(window) for window in snapshot.windows],
        "endings": {job_id: [*map(_plain, ending)] for job_id, ending in sorted(snapshot.endings.items())},
        "limit_range_w": [[_plain(value) for value in row] for row in snapshot.limit_range_w.tolist()],
        "min_run_s": snapshot.min_run_s,
        "saves": {job_id: [*map(_plain, saves)] for job_id, saves in sorted(snapshot.saves.items())},
        "save_wait_s": snapshot.save_wait_s,
        "levels": list(snapshot.levels),
        "within": dict(sorted(snapshot.within.items())),
        "near": dict(sorted(snapshot.near.items())),
        "bound": {job_id: list(on) for job_id, on in sorted(snapshot.bound.items())},
    }


def _outlook_to_json(outlook: CarbonOutlook) -> dict[str, Any]:
    curve = outlook.curve
    return {
        "zone": outlook.zone,
        "signal": outlook.signal.value,
        "stale": outlook.stale,
        "times_s": curve.times_s.tolist(),
        "intensity_gco2_per_kwh": curve.intensity_gco2_per_kwh.tolist(),
        "end_s": curve.end_s,
        "estimated": curve.estimated.tolist(),
        "low": None if outlook.low is None else outlook.low.tolist(),
        "high": None if outlook.high is None else outlook.high.tolist(),
    }


def plan_to_json(plan: Plan) -> list[dict[str, Any]]:
    jobs = [
        {"action": ACTION_NAMES[type(each)], "job_id": each.job_id, "reason": each.reason.value} | _details(each)
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
            return {"placement": _placement_to_json(action.placement), **batch, **shares}
        case SetPowerLimit():
            return {"power_limit_w": action.power_limit_w}
        case SetClock():
            return {"clock_mhz": action.clock_mhz}
        case ProfileControls():
            return {"kind": action.kind.value, "window_s": action.window_s}
        case _:
            return {}


def _curves_to_json(curves: Curves) -> list[list[Any]]:
    return [
        [model, kind.value, curve.values.tolist(), curve.speed.tolist(), curve.power_w.tolist()]
        for (model, kind), curve in sorted(curves.items())
    ]


def _gangs_to_json(gangs: Gangs) -> list[list[Any]]:
    return [
        [model, table.kind and table.kind.value, *(each.tolist() for each in _columns_of(table)), table.power_error]
        for model, table in sorted(gangs.items())
    ]


def _columns_of(table: GangTable) -> tuple[NDArray[Any], ...]:
    return table.values, table.gpus, table.speed, table.power_w


def _table_to_json(table: JobTable | NodeTable) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for field in fields(table):
        column: Any = getattr(table, field.name)
        if isinstance(column, np.ndarray):
            columns[field.name] = [_plain(value) for value in column.tolist()]
        elif field.name == "placements":
            columns[field.name] = [_placement_to_json(placement) for placement in column]
        else:
            columns[field.name] = [list(row) if isinstance(row, tuple) else row for row in column]  # pyright: ignore[reportUnknownArgumentType]
    return columns


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _placement_to_json(placement: Placement | None) -> list[list[Any]] | None:
    return placement and [[share.node_id, list(share.devices)] for share in placement.shares]
