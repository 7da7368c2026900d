"""Tables of serving: pools, their traffic, plans and instances, and external model servers."""

from typing import Any

from sqlalchemy import Boolean, CheckConstraint, Column, Index, Integer, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata
from services.db.tables.work import KEPT, work_columns


def spec_columns() -> tuple[Column[Any], ...]:
    """Return the columns of what people name and specify."""
    return (
        Column("name", Text, primary_key=True),
        Column("tenant_id", Text, nullable=False),
        Column("key_id", Text, nullable=False),
        Column("spec", JSONB, nullable=False),
        Column("revision", Integer, nullable=False, server_default=text("1")),
        Column("deleted_at", Timestamp),
        Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
        Column("updated_at", Timestamp, nullable=False, server_default=text("now()")),
    )


pools = Table("pools", metadata, *spec_columns(), Column("plan_id", Text), Column("planned_at", Timestamp))
"""``plan_id`` is the plan in force. A process that applies a plan, or creates or drains instances, holds the pool's row
lock. A deleted pool stays until its last instance has ended."""

pool_traffic = Table(
    "pool_traffic",
    metadata,
    Column("pool", Text, primary_key=True),
    Column("start_at", Timestamp, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("counts", JSONB, nullable=False),
)
"""Requests in 5 seconds as one source saw them: ``{PoolPartition.counted_as: {class: count}}``, classes without any
left out. The name of a partition makes no difference; other thresholds have counts of their own."""

pool_plans = Table(
    "pool_plans",
    metadata,
    *work_columns("pool_plans", "plan_s"),
    Column("pool", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("trigger", Text, nullable=False),
    Column("slot_at", Timestamp, nullable=False),
    Column("from_at", Timestamp, nullable=False),
    Column("deadline_at", Timestamp, nullable=False),
    Column("outcome", Text),
    Column("decided_at", Timestamp),
    Index("pool_plans_by_pool", "pool", "id"),
    Index("pool_plans_undecided", "pool", postgresql_where=text("outcome IS NULL")),
    Index("pool_plans_one_per_problem", "pool", "problem_sha256", unique=True, postgresql_where=KEPT),
)
"""``slot_at`` is the half hour of the clock that the plan is for, ``from_at`` when its first step begins; ``outcome``
is what was done with the answer."""

pool_instances = Table(
    "pool_instances",
    metadata,
    Column("id", Text, primary_key=True),
    Column("pool", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("plan_id", Text),
    Column("place", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("partition", Text),
    Column("request_class", Text),
    Column("terms", JSONB, nullable=False),
    Column("state", Text, nullable=False),
    Column("job_id", Text),
    Column("url", Text),
    Column("reason", Text),
    Column("detail", Text),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("ready_at", Timestamp),
    Column("silent_since", Timestamp),
    Column("draining_at", Timestamp),
    Column("stopping_at", Timestamp),
    Column("ended_at", Timestamp),
    Column("listener", Text),
    Column("sealed_key", LargeBinary),
    Column("checks_key", Boolean),
    Index("pool_instances_live", "pool", postgresql_where=text("state <> 'ended'")),
    Index("pool_instances_by_pool", "pool", "id"),
    CheckConstraint(
        "state IN ('wanted', 'starting', 'ready', 'draining', 'stopping', 'ended')", name="pool_instances_state"
    ),
)
"""``terms`` are the specs that the instance was made from: ``{"mode": ServerMode, "place": PoolPlace, "probes":
ServerProbes}``. ``id`` is also the idempotency key of its job's submission, so that no instance ever has two jobs.
``sealed_key`` is opened for its node and the routers alone."""

model_endpoints = Table(
    "model_endpoints",
    metadata,
    Column("name", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("updated_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""``spec`` is an ``EndpointSpec``. It contains no key, only the name of the file that does."""
