"""Tables of the scheduler: allocations, device claims, plans, its memory, and the outbox of commands."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata

allocations = Table(
    "allocations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("job_id", Text, ForeignKey("jobs.id"), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("shares", JSONB, nullable=False),
    Column("master_port", Integer, nullable=False),
    Column("batch_size", Integer),
    Column("started_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("running_at", Timestamp),
    Column("stop_requested_at", Timestamp),
    Column("stop_reason", Text),
    Column("ended_at", Timestamp),
    Column("end_reason", Text),
    Column("power_limit_w", Float),
    Column("clock_mhz", Integer),
    Column("settings_revision", Integer, nullable=False, server_default=text("0")),
    Column("settings_refused", JSONB, nullable=False, server_default=text("'{}'")),
    Index("allocations_one_live_per_job", "job_id", unique=True, postgresql_where=text("state <> 'ended'")),
    Index("allocations_by_job", "job_id", "generation", unique=True),
    Index("allocations_ended", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
    CheckConstraint("state IN ('starting', 'running', 'stopping', 'ended')", name="allocations_state"),
)
"""A gang's devices, ``shares`` = ``[{"node_id", "devices"}]``; their controls, null at the default, and the reasons for
refusals, by kind of control; its total batch, samples, where the job's user lets policies choose that. The partial
unique index enforces that a gang runs at most once."""

device_claims = Table(
    "device_claims",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("device", Integer, primary_key=True),
    Column("allocation_id", Text, ForeignKey("allocations.id"), nullable=False),
    Column("uuid", Text),
    Column("parent", Integer),
    Column("profile", Text),
    Column("slot", Integer, primary_key=True, server_default=text("0")),
    Column("packed", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint("slot IN (0, 1)", name="device_claims_slot"),
    Index("device_claims_by_allocation", "allocation_id"),
    Index("device_claims_of_slices", "node_id", "parent", postgresql_where=text("parent IS NOT NULL")),
)
"""The present holder of a device, or both where two jobs share a GPU.

The primary key enforces that no device has more than two holders (``slot`` 0 and 1), and a trigger that none has a
second one but a claim that is ``packed``, which needs a first one.

``uuid`` is the device's when it was claimed, null where that was not known: of a MIG slice it tells whether the device
of that number is still the same. A slice has the GPU that it is part of, ``parent``, and its ``profile``. A trigger
refuses a claim on a GPU of which a slice is held, and on a slice of a GPU that is held itself.
"""

rank_ends = Table(
    "rank_ends",
    metadata,
    Column("allocation_id", Text, ForeignKey("allocations.id"), primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("exit_code", Integer),
    Column("ended_by", Text),
    Column("detail", Text),
    Column("at", Timestamp, nullable=False, server_default=text("now()")),
)
"""The ends of a gang's node shares that the scheduler has processed."""

scheduler_state = Table(
    "scheduler_state",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("policy", Text, nullable=False),
    Column("parameters", JSONB, nullable=False),
    Column("policy_since", Timestamp, nullable=False, server_default=text("now()")),
    Column("policy_changed_by", Text, nullable=False),
    Column("memory", JSONB, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("last_active_at", Timestamp),
    CheckConstraint("id = 1", name="scheduler_state_one_row"),
)

plans = Table(
    "plans",
    metadata,
    Column("round", BigInteger, primary_key=True),
    Column("at", Timestamp, nullable=False, server_default=text("now()")),
    Column("trigger", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("jobs", Integer, nullable=False),
    Column("starts", Integer, nullable=False),
    Column("preemptions", Integer, nullable=False),
    Column("holds", Integer, nullable=False),
    Column("intensity_gco2_per_kwh", Float),
    Column("intensity_stale", Boolean, nullable=False),
    Column("decide_ms", Float, nullable=False),
    Column("actions", JSONB, nullable=False),
)

node_power = Table(
    "node_power",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("state", Text, nullable=False, server_default=text("'on'")),
    Column("since", Timestamp, nullable=False, server_default=text("now()")),
    Column("pinned", Boolean, nullable=False, server_default=text("false")),
    Column("reason", Text, nullable=False, server_default=text("''")),
    Column("detail", Text, nullable=False, server_default=text("''")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("acted_at", Timestamp),
    Column("done_at", Timestamp),
    Column("next_attempt_at", Timestamp),
    Column("off_at", Timestamp),
    Column("stays_on_until", Timestamp),
    CheckConstraint("state IN ('on', 'going_down', 'off', 'waking', 'failed')", name="node_power_state"),
)
"""Nodes that were ever powered down or pinned awake; all others are on. For the present change: how often its hook was
run, when first (``acted_at``), when it last succeeded (``done_at``), and the earliest time of its next run. ``off_at``
is null unless the node draws nothing but its standby."""

node_power_periods = Table(
    "node_power_periods",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    Column("node_id", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("start_at", Timestamp, nullable=False),
    Column("end_at", Timestamp, nullable=False),
    Column("power_w", Float, nullable=False),
    CheckConstraint("state IN ('off', 'waking')", name="node_power_periods_state"),
    Index("node_power_periods_by_node", "node_id", "id"),
)
"""How long nodes were off and how long they took to wake, with the configured power; telemetry enters it into the
ledger."""

outbox = Table(
    "outbox",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    Column("stream", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""Commands committed with the plan; the relay deletes a row once Redis has it."""

setting_measurements = Table(
    "setting_measurements",
    metadata,
    Column("allocation_id", Text, ForeignKey("allocations.id"), primary_key=True),
    Column("job_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("gpu_model", Text, nullable=False),
    Column("setting", Text, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("settings", JSONB, nullable=False),
    Column("window_s", Float, nullable=False),
    Column("position", Integer, nullable=False, server_default=text("0")),
    Column("slice_since", Timestamp),
    Column("slice_s", Float, nullable=False, server_default=text("0")),
    Column("state", Text, nullable=False, server_default=text("'running'")),
    Column("detail", Text, nullable=False, server_default=text("''")),
    Column("began_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("ended_at", Timestamp),
    CheckConstraint("state IN ('running', 'done', 'cut', 'failed')", name="setting_measurements_state"),
    Index("setting_measurements_running", "allocation_id", postgresql_where=text("state = 'running'")),
    Index("setting_measurements_by_kind", "kind", "began_at"),
)
"""Gangs that are, or were, run at each of ``settings`` in turn, the default first; ``position`` is the one in force
since ``slice_since``: for ``window_s`` at most, until the first report ``slice_s`` after its first. A failed
measurement is not repeated for its job; one that was cut short is."""

setting_points = Table(
    "setting_points",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("gpu_model", Text, primary_key=True),
    Column("setting", Text, primary_key=True),
    Column("gpus", Integer, primary_key=True),
    Column("nodes", Integer, primary_key=True),
    Column("local_batch", Float, primary_key=True),
    Column("value", Float, primary_key=True),
    Column("step_time_s", Float, nullable=False),
    Column("power_w", Float, nullable=False),
    Column("elapsed_s", Float, nullable=False),
    Column("job_id", Text, nullable=False),
    Column("measured_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""The measurements of a kind of job, the newest for each configuration: seconds per unit of the job's own work, and the
mean draw of one GPU. ``local_batch`` is 0 if the job does not report it. A kind that users named is "tenant/label"."""

setting_profiles = Table(
    "setting_profiles",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("gpu_model", Text, primary_key=True),
    Column("setting", Text, primary_key=True),
    Column("gpus", JSONB, nullable=False),
    Column("settings", JSONB, nullable=False),
    Column("speed", JSONB, nullable=False),
    Column("power_w", JSONB, nullable=False),
    Column("measured_gpus", JSONB, nullable=False),
    Column("points", Integer, nullable=False),
    Column("time_mape", Float),
    Column("energy_mape", Float),
    Column("detail", Text, nullable=False, server_default=text("''")),
    Column("fitted_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("by_batch", JSONB),
)
"""The model fitted to a kind's points, as (sizes x settings); without rows where it could not be fitted. ``by_batch`` =
``{"batch", "step_s"}``: total batches, and (sizes x batches) step times at the default; null where none is known."""
