"""A snapshot as JSON values and back, so that a live round can be recorded and replayed to the same plan."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.core.cycle.plan import ACTION_NAMES, Action, Plan, ProfileControls, SetClock, SetPowerLimit, Start
from services.core.cycle.snapshot import (
    Curves,
    Gangs,
    JobTable,
    NodeTable,
    ServiceInstance,
    SliceJob,
    SliceUnit,
    Snapshot,
    Trigger,
)
from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Signal
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.parallel.graph import AllReduce, JobGraph, Stage
from services.core.parallel.iteration import Network

_DTYPES = {"Floats": np.float64, "Ints": np.int64, "Bools": np.bool_}


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
        "bound": {job_id: list(on) for job_id, on in sorted(snapshot.bound.items())},
    }


def snapshot_from_json(stored: dict[str, Any]) -> Snapshot:
    """Return the snapshot that ``snapshot_to_json`` wrote, equal in every value."""
    outlooks = stored.get("outlooks") or [stored["carbon"]]  # recorded when a cluster had one zone
    return Snapshot(
        version=stored["version"],
        now_s=stored["now_s"],
        trigger=Trigger(stored["trigger"]),
        gpu_models=tuple(stored["gpu_models"]),
        jobs=JobTable(**_columns(JobTable, stored["jobs"], len(stored["gpu_models"]))),
        nodes=NodeTable(**_columns(NodeTable, stored["nodes"], len(stored["gpu_models"]))),
        outlooks=tuple(map(_outlook_from_json, outlooks)),
        tenant_gpu_quota=stored["tenant_gpu_quota"],
        tenant_weights=stored.get("tenant_weights", {}),
        speed_curves=np.array(stored.get("speed_curves", []), dtype=np.float64).reshape(_shape(stored)),
        goodput_curves=np.array(stored.get("goodput_curves") or np.empty((0, 2, 0)), dtype=np.float64),
        goodput_gains=np.array(stored.get("goodput_gains") or np.empty((0, 2, 0)), dtype=np.float64),
        goodput_batches=np.array(stored.get("goodput_batches") or np.empty((0, 2, 0)), dtype=np.int64),
        control_curves=tuple(_curves_from_json(curves) for curves in stored.get("setting_curves", [])),
        settable=tuple(frozenset(map(ControlKind, kinds)) for kinds in stored.get("settable", [])),
        gangs=tuple(_gangs_from_json(gangs) for gangs in stored.get("gangs", [])),
        idle_w=np.array(stored.get("idle_w", []), dtype=np.float64),
        host_w=np.array(stored.get("host_w", []), dtype=np.float64),
        next_active_s=float(stored.get("next_active_s", "nan")),
        placement=stored.get("placement", "consolidated"),
        graphs={JobId(job_id): _graph_from_json(graph) for job_id, graph in stored.get("graphs", {}).items()},
        network=Network(**stored.get("network", {})),
        length_spreads={JobId(job_id): spread for job_id, spread in stored.get("length_spreads", {}).items()},
        measured_w=float(stored.get("measured_w", "nan")),
        measures=stored.get("measures", False),
        measuring=None if stored.get("measuring") is None else frozenset(map(JobId, stored["measuring"])),
        services=tuple(
            ServiceInstance(JobId(job_id), gpus, np.array(nodes, dtype=np.bool_))
            for job_id, gpus, nodes in stored.get("services", [])
        ),
        services_gpus=stored.get("services_gpus", 0),
        services_w=stored.get("services_w", 0.0),
        slice_units=tuple(SliceUnit(**unit) for unit in stored.get("slice_units", [])),
        slice_jobs=tuple(
            SliceJob(JobId(job_id), sevenths, np.array(units, dtype=np.bool_))
            for job_id, sevenths, units in stored.get("slice_jobs", [])
        ),
        shared=tuple((JobId(one), JobId(other)) for one, other in stored.get("shared", [])),
        gpu_memory_gib=np.array(stored.get("gpu_memory_gib", []), dtype=np.float64),
        bound={JobId(job_id): tuple(map(NodeId, on)) for job_id, on in stored.get("bound", {}).items()},
    )


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


def _outlook_from_json(stored: dict[str, Any]) -> CarbonOutlook:
    times_s = np.array(stored["times_s"], dtype=np.float64)
    curve = CarbonCurve(
        times_s,
        np.array(stored["intensity_gco2_per_kwh"], dtype=np.float64),
        stored["end_s"],
        np.array(stored.get("estimated", [False] * times_s.size), dtype=np.bool_),
    )
    low, high = (
        None if (values := stored.get(name)) is None else np.array(values, dtype=np.float64) for name in ("low", "high")
    )
    return CarbonOutlook(stored["zone"], Signal(stored["signal"]), curve, stored["stale"], low, high)


def _shape(stored: dict[str, Any]) -> tuple[int, int]:
    curves = stored.get("speed_curves", [])
    return len(curves), len(curves[0]) if curves else 0


def _graph_from_json(stored: dict[str, Any]) -> JobGraph:
    return JobGraph(tuple(Stage(**stage) for stage in stored["stages"]), AllReduce(stored["all_reduce"]))


def plan_to_json(plan: Plan) -> list[dict[str, Any]]:
    """Return a plan's actions as JSON values."""
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


def _curves_from_json(stored: list[list[Any]]) -> Curves:
    return {
        (model, ControlKind(kind)): ControlCurve(*(np.array(column, dtype=np.float64) for column in columns))
        for model, kind, *columns in stored
    }


def _gangs_to_json(gangs: Gangs) -> list[list[Any]]:
    return [
        [model, table.kind and table.kind.value, *(each.tolist() for each in _columns_of(table)), table.power_error]
        for model, table in sorted(gangs.items())
    ]


def _columns_of(table: GangTable) -> tuple[NDArray[Any], ...]:
    return table.values, table.gpus, table.speed, table.power_w


def _gangs_from_json(stored: list[list[Any]]) -> Gangs:
    return {
        model: GangTable(
            np.array(gpus), np.array(speed), np.array(power_w), kind and ControlKind(kind), np.array(values), *error
        )
        for model, kind, values, gpus, speed, power_w, *error in stored
    }


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


def _columns(table: type[JobTable] | type[NodeTable], stored: dict[str, list[Any]], n_models: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for field in fields(table):
        if field.name not in stored:
            continue  # recorded before the column was there; it has a default
        values = stored[field.name]
        dtype = _DTYPES.get(str(field.type))
        if dtype is not None:
            column = np.array(values, dtype=dtype)
            columns[field.name] = column.reshape(len(values), n_models) if field.name == "eligible" else column
        elif field.name == "placements":
            columns[field.name] = tuple(_placement_from_json(placement) for placement in values)
        else:
            columns[field.name] = tuple(tuple(row) if isinstance(row, list) else row for row in values)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return columns


def _placement_to_json(placement: Placement | None) -> list[list[Any]] | None:
    return placement and [[share.node_id, list(share.devices)] for share in placement.shares]


def _placement_from_json(stored: list[list[Any]] | None) -> Placement | None:
    if stored is None:
        return None
    return Placement(tuple(NodeShare(NodeId(node), tuple(devices)) for node, devices in stored))
