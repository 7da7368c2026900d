"""What telemetry shows at ``/metrics``: nodes and devices by their last heartbeats, and the ledger as it is written."""

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client.metrics_core import Metric

from services.contracts.nodes import PowerState
from services.core.domain.mig import is_gpu
from services.db.database import Database, Record
from services.db.figures import pool_of
from services.kit.metrics import Bounded, Labels, Metrics, counter, gauge
from services.telemetry.repository.nodes import nodes

MOST_PROJECTS = 500  #: Of all tenants together, in labels; the energy of further ones is that of ``other``
ASLEEP = frozenset({PowerState.GOING_DOWN, PowerState.OFF, PowerState.WAKING})
GIB = 2.0**30

ENERGY = counter(
    "wattshift_energy_joules_total",
    "Energy of devices and hosts that was entered into the ledger, without PUE; idle energy is that of no tenant.",
    ["tenant", "project", "zone"],
)
CARBON = counter(
    "wattshift_carbon_grams_total",
    "Location-based emissions that were entered into the ledger, grams of CO2 equivalent, with PUE.",
    ["tenant", "project", "zone"],
)
INTERVALS = counter("wattshift_ledger_intervals_total", "Intervals of nodes that were entered into the ledger.")
MARKED = counter(
    "wattshift_ledger_marked_lines_total",
    "Lines of the ledger that are not booked as they were reported, by why not.",
    ["basis"],
)
_project = Bounded(MOST_PROJECTS)


def note_line(tenant: str, project: str, zone: str, energy_j: float, carbon_gco2: float) -> None:
    """Count a line of the ledger; tenant and project are empty for idle energy."""
    labels = (*_project(tenant, project), zone)
    ENERGY.labels(*labels).inc(max(energy_j, 0.0))
    CARBON.labels(*labels).inc(max(carbon_gco2, 0.0))


def show_figures(metrics: Metrics, database: Database) -> None:
    """Register all metrics that telemetry owns."""

    async def read_nodes() -> Iterable[Metric]:
        found = await nodes(database)
        asleep = {row["id"] for row, power in found if power is not None and power["state"] in ASLEEP}
        return node_figures([row for row, _ in found], asleep, datetime.now(UTC))

    metrics.add("nodes", read_nodes)
    metrics.add("database", pool_of(database))


def node_figures(rows: Sequence[Record], asleep: Collection[str], now: datetime) -> list[Metric]:
    """Return what nodes and their GPUs last reported of themselves; readings are only of nodes that are up."""
    devices = [(row, device) for row in rows for device in row["devices"] if is_gpu(device["index"])]
    unusable = {(row["id"], each["gpu"]): each for row in rows for each in row["gpu_health"]}

    def of_nodes(name: str, help_text: str, value: Callable[[Record], float | None]) -> Metric:
        return gauge(name, help_text, ["node", "zone"], [((row["id"], row["zone"]), value(row)) for row in rows])

    return [
        of_nodes(
            "wattshift_node_up",
            "1 for a node with a lease, 0 for one that is lost or powered down.",
            lambda row: float(row["state"] == "up" and row["leased"]),
        ),
        of_nodes(
            "wattshift_node_asleep",
            "1 for a node that is powered down, or on its way there or back.",
            lambda row: float(row["id"] in asleep),
        ),
        of_nodes(
            "wattshift_node_accepts_work",
            "1 for a node that takes new work, 0 for one that is drained, or that refuses it, as with a full disk.",
            lambda row: float(not row["draining"] and row["closed"] is None),
        ),
        of_nodes(
            "wattshift_node_heartbeat_age_seconds",
            "Time since a node was last heard of.",
            lambda row: row["heartbeat_at"] and (now - row["heartbeat_at"]).total_seconds(),
        ),
        of_nodes(
            "wattshift_node_lease_seconds",
            "How long a node may still run its gangs without contact; negative once its lease is over.",
            lambda row: row["lease_until"] and (row["lease_until"] - now).total_seconds(),
        ),
        of_nodes("wattshift_node_gpus_in_use", "GPUs of a node that gangs hold.", lambda row: row["gpus_in_use"]),
        gauge(
            "wattshift_device_info",
            "The GPUs of nodes.",
            ["node", "gpu", "model", "uuid"],
            [((row["id"], str(d["index"]), str(d.get("model")), d["uuid"]), 1.0) for row, d in devices],
        ),
        gauge(
            "wattshift_device_healthy",
            "0 for a GPU that gets no work because it is sick, or because an operator took it out of service.",
            ["node", "gpu", "cause"],
            [
                ((row["id"], str(d["index"]), _cause(sick)), float(sick is None))
                for row, d in devices
                for sick in (unusable.get((row["id"], d["index"])),)
            ],
        ),
        *_readings([row for row in rows if row["state"] == "up" and row["leased"]]),
    ]


def _cause(sick: dict[str, Any] | None) -> str:
    return "" if sick is None else sick.get("cause") or "drained"


def _readings(rows: Sequence[Record]) -> list[Metric]:
    found: list[tuple[Labels, dict[str, Any]]] = [
        ((row["id"], str(reading["index"])), reading)
        for row in rows
        for reading in row["readings"]
        if is_gpu(reading["index"])
    ]

    def shown(name: str, help_text: str, field: str, factor: float = 1.0) -> Metric:
        read = [(labels, reading.get(field)) for labels, reading in found]
        return gauge(name, help_text, ["node", "gpu"], [(n, None if v is None else v * factor) for n, v in read])

    return [
        shown("wattshift_device_power_watts", "Power that a GPU draws.", "power_w"),
        shown("wattshift_device_utilization_ratio", "How busy a GPU is, from 0 to 1.", "utilization"),
        shown("wattshift_device_clock_hertz", "Clock of a GPU's multiprocessors.", "clock_mhz", 1e6),
        shown("wattshift_device_memory_used_bytes", "Memory of a GPU that is in use.", "memory_used_gib", GIB),
        shown("wattshift_device_power_limit_watts", "Power limit that a GPU reports.", "enforced_limit_w"),
        shown("wattshift_device_locked_clock_hertz", "Clock that a GPU is locked to.", "locked_clock_mhz", 1e6),
    ]
