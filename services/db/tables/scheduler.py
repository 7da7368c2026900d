"""Tables of the scheduler: allocations, device claims, plans, its memory, and the outbox of commands."""

from __future__ import annotations

from sqlalchemy import (
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
