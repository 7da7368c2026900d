"""Tables of admission: tenants, keys, jobs and what happened to them.

``jobs`` is written by two processes by agreement: admission accepts a job and records what its user wants (cancel,
hold, release), the scheduler moves it through its run. Each update names the state it expects, so that neither
overwrites the other.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from services.db.metadata import Timestamp, metadata

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("limits", JSONB, nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("accepted_jobs", BigInteger, nullable=False, server_default=text("0")),
)
"""``accepted_jobs`` counts every job ever accepted. It is raised in the transaction that accepts them, whose lock on
the row makes quotas exact; its increase since the active jobs were last counted is the most by which they can have
grown."""

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("role", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("key_sha256", LargeBinary, nullable=False, unique=True),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("revoked_at", Timestamp),
    Column("expires_at", Timestamp),
    Column("last_used_at", Timestamp),
)
"""``last_used_at`` is to within a minute: it is written at most that often."""

jobs = Table(
    "jobs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("project", Text, nullable=False),
    Column("labels", JSONB, nullable=False),
    Column("spec", JSONB, nullable=False),
    Column("state", Text, nullable=False),
    Column("cancel_requested", Boolean, nullable=False, server_default=text("false")),
    Column("hold_requested", Boolean, nullable=False, server_default=text("false")),
    Column("reason", Text),
    Column("detail", Text),
    Column("expected_start_at", Timestamp),
    Column("generation", Integer, nullable=False, server_default=text("0")),
    Column("preemptions", Integer, nullable=False, server_default=text("0")),
    Column("restarts", Integer, nullable=False, server_default=text("0")),
    Column("exit_code", Integer),
    Column("attained_gpu_s", Float, nullable=False, server_default=text("0")),
    Column("submitted_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("queued_at", Timestamp),
    Column("started_at", Timestamp),
    Column("ended_at", Timestamp),
    Index("jobs_live", "state", postgresql_where=text("state NOT IN ('succeeded', 'failed', 'cancelled')")),
    Index("jobs_succeeded", "ended_at", "id", postgresql_where=text("state = 'succeeded'")),
    Index("jobs_by_tenant", "tenant_id", "id"),
    Index("jobs_labels", "labels", postgresql_using="gin", postgresql_ops={"labels": "jsonb_path_ops"}),
)

budgets = Table(
    "budgets",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("project", Text, nullable=False),
    Column("quantity", Text, nullable=False),
    Column("amount", Float, nullable=False),
    Column("action", Text, nullable=False),
    Column("month", Text),
    Column("used", Float, nullable=False, server_default=text("0")),
    Column("exceeded", Boolean, nullable=False, server_default=text("false")),
    Column("detail", Text),
    UniqueConstraint("tenant_id", "project", "quantity", name="budgets_of_a_project"),
)
"""What a project (empty: the whole tenant) may use per month, and how much of it is used. The scheduler starts no
queued job of a project whose budget is ``exceeded`` and whose ``action`` is ``hold``."""

submissions = Table(
    "submissions",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("body_sha256", LargeBinary, nullable=False),
    Column("job_ids", ARRAY(Text), nullable=False),
    Column("batch", Boolean, nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""The jobs that an idempotency key refers to."""

job_events = Table(
    "job_events",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=True),
    Column("transaction_id", BigInteger, nullable=False, server_default=text("pg_current_xact_id()::text::bigint")),
    Column("job_id", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("at", Timestamp, nullable=False, server_default=text("now()")),
    Column("type", Text, nullable=False),
    Column("data", JSONB, nullable=False, server_default=text("'{}'")),
    Index("job_events_by_job", "job_id", "transaction_id", "sequence"),
    Index("job_events_in_order", "transaction_id", "sequence"),
)
"""What happened. A reader goes by ``(transaction_id, sequence)`` and stops before the oldest transaction still open:
sequences are assigned before their rows are visible, so a reader of sequences alone would skip rows of slower
transactions."""

audit_log = Table(
    "audit_log",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=True),
    Column("at", Timestamp, nullable=False, server_default=text("now()")),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("data", JSONB, nullable=False, server_default=text("'{}'")),
)
"""What operators and admins did."""
