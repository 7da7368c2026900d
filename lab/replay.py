"""Rounds that a live scheduler recorded (``SCHEDULER_RECORD_DIR``), replayed to the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

import numpy as np

from services.core.cycle.plan import Plan
from services.core.cycle.snapshot import (
    Curves,
    Gangs,
    JobTable,
    NodeTable,
    Saves,
    ServiceInstance,
    SliceJob,
    SliceUnit,
    Snapshot,
    Trigger,
)
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Signal
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.domain.ids import JobId, NodeId
from services.core.domain.orders import PowerOrder
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.prices import PriceCurve
from services.core.domain.transfers import Transfer
from services.core.domain.windows import Ending, Window
from services.core.parallel.graph import AllReduce, JobGraph, Stage
from services.core.parallel.iteration import Network
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import build_policy

_DTYPES: dict[Any, type[Any]] = {Floats: np.float64, Ints: np.int64, Bools: np.bool_}


def replay(record: Mapping[str, Any], *, reasons: bool = True) -> Plan:
    """Return the plan of a recorded round; with ``reasons=False``, as the engine asks for it, without the waiting jobs.

    Args:
        record: What the scheduler records about a round: ``policy``, ``parameters``, ``memory`` and ``snapshot``.
        reasons: Whether holds are part of the plan.
    """
    policy = build_policy(record["policy"], record["parameters"])
    memory = policy.load(record["memory"]) if record["memory"] else policy.initial()
    snapshot = replace(snapshot_from_json(record["snapshot"]), reasons=reasons)
    return run_under_orders(policy, snapshot, memory).plan


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
        tenant_gpus_in_cells=stored.get("tenant_gpus_in_cells", {}),
        tenant_guarantees=stored.get("tenant_guarantees", {}),
        undivided=frozenset(stored.get("undivided", ())),
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
        network=_network_from_json(stored.get("network", {})),
        transfer=Transfer(**stored.get("transfer", {})),
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
        orders=tuple(map(_order_from_json, stored.get("orders", []))),
        windows=tuple(Window(**each) for each in stored.get("windows", [])),
        endings={JobId(job_id): Ending(*map(float, each)) for job_id, each in stored.get("endings", {}).items()},
        limit_range_w=np.array(stored.get("limit_range_w", []), dtype=np.float64).reshape(-1, 2),
        min_run_s=stored.get("min_run_s", 0.0),
        saves={JobId(job_id): Saves(*map(float, each)) for job_id, each in stored.get("saves", {}).items()},
        save_wait_s=stored.get("save_wait_s", 0.0),
        levels=tuple(stored.get("levels", ())),
        within={JobId(job_id): level for job_id, level in stored.get("within", {}).items()},
        near={JobId(job_id): level for job_id, level in stored.get("near", {}).items()},
        bound={JobId(job_id): tuple(map(NodeId, on)) for job_id, on in stored.get("bound", {}).items()},
    )


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
    prices = stored.get("prices")
    if prices is not None:
        prices = PriceCurve(prices["start_s"], np.array(prices["per_kwh"], dtype=np.float64))
    return CarbonOutlook(stored["zone"], Signal(stored["signal"]), curve, stored["stale"], low, high, prices)


def _network_from_json(stored: dict[str, Any]) -> Network:
    values: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in stored.items()}
    return Network(**values)


def _order_from_json(stored: dict[str, Any]) -> PowerOrder:
    values: dict[str, Any] = {name: float(each) if each in ("nan", "inf") else each for name, each in stored.items()}
    return PowerOrder(**values)


def _shape(stored: dict[str, Any]) -> tuple[int, int]:
    curves = stored.get("speed_curves", [])
    return len(curves), len(curves[0]) if curves else 0


def _graph_from_json(stored: dict[str, Any]) -> JobGraph:
    return JobGraph(tuple(Stage(**stage) for stage in stored["stages"]), AllReduce(stored["all_reduce"]))


def _curves_from_json(stored: list[list[Any]]) -> Curves:
    return {
        (model, ControlKind(kind)): ControlCurve(*(np.array(column, dtype=np.float64) for column in columns))
        for model, kind, *columns in stored
    }


def _gangs_from_json(stored: list[list[Any]]) -> Gangs:
    return {
        model: GangTable(
            np.array(gpus), np.array(speed), np.array(power_w), kind and ControlKind(kind), np.array(values), *error
        )
        for model, kind, values, gpus, speed, power_w, *error in stored
    }


def _columns(table: type[JobTable] | type[NodeTable], stored: dict[str, list[Any]], n_models: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    declared = get_type_hints(table)
    for field in fields(table):
        if field.name not in stored:
            continue  # recorded before the column was there; it has a default
        values = stored[field.name]
        dtype = _DTYPES.get(declared[field.name])
        if dtype is not None:
            column = np.array(values, dtype=dtype)
            by_row = {"eligible": n_models, "domains": column.size // max(len(values), 1)}
            columns[field.name] = column.reshape(len(values), by_row[field.name]) if field.name in by_row else column
        elif field.name == "placements":
            columns[field.name] = tuple(_placement_from_json(placement) for placement in values)
        else:
            columns[field.name] = tuple(tuple(row) if isinstance(row, list) else row for row in values)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return columns


def _placement_from_json(stored: list[list[Any]] | None) -> Placement | None:
    if stored is None:
        return None
    return Placement(tuple(NodeShare(NodeId(node), tuple(devices)) for node, devices in stored))
