"""Tables of admission: tenants, users, keys, jobs and what happened to them.

Two processes write ``jobs`` by agreement: admission accepts a job and records what its user wants (cancel, hold,
release), the scheduler moves it through its run. Each update names the state it expects, so that neither overwrites the
other.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
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
    Column("last_number", BigInteger, nullable=False, server_default=text("0")),
)
"""``accepted_jobs`` counts every job ever accepted. It is raised in the transaction that accepts them, whose lock on
the row makes quotas exact; its increase since the active jobs were last counted is the most by which they can have
grown. ``last_number`` is the newest number of a job or an array, given under the same lock, and by
the scheduler to jobs of engines (``services/db/job_numbers.py``)."""

users = Table(
    "users",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("account", Text),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("disabled_at", Timestamp),
    UniqueConstraint("tenant_id", "name", name="users_of_a_tenant"),
)
"""Who submits jobs. ``account`` is the operating system's account that the user's jobs run as on nodes."""

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
    Column("user_id", Text, ForeignKey("users.id")),
    Column("project", Text),
    Column("limits", JSONB, nullable=False, server_default=text("'{}'")),
    Column("used", JSONB),
    Column("replaced", ARRAY(Text), nullable=False, server_default=text("'{}'")),
)
"""``last_used_at`` is to within a minute: it is written at most that often. A key that has a ``project`` reaches no
other. ``used`` is what it and the keys in ``replaced``, its predecessors, used of their budget for a month."""

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
    Column("array_id", Text),
    Column("array_index", Integer),
    Column("gated", Boolean, nullable=False, server_default=text("false")),
    Column("user_id", Text),
    Column("engine", Text, nullable=False, server_default=text("'wattshift'")),
    Column("external_id", Text),
    Column("bound_to", ARRAY(Text)),
    Column("node_losses", Integer, nullable=False, server_default=text("0")),
    Column("not_before", Timestamp),
    Column("number", BigInteger),
    Index("jobs_numbered", "tenant_id", "number", unique=True, postgresql_where=text("array_id IS NULL")),
    Index("jobs_bound", "id", postgresql_where=text("bound_to IS NOT NULL")),
    Index("jobs_of_an_engine", "engine", "external_id", unique=True, postgresql_where=text("external_id IS NOT NULL")),
    Index("jobs_live", "state", postgresql_where=text("state NOT IN ('succeeded', 'failed', 'cancelled')")),
    Index("jobs_ended", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
    Index("jobs_succeeded", "ended_at", "id", postgresql_where=text("state = 'succeeded'")),
    Index("jobs_by_tenant", "tenant_id", "id"),
    Index("jobs_labels", "labels", postgresql_using="gin", postgresql_ops={"labels": "jsonb_path_ops"}),
    Index("jobs_by_array", "array_id", "id", postgresql_where=text("array_id IS NOT NULL")),
    Index("jobs_gated", "id", postgresql_where=text("gated AND state NOT IN ('succeeded', 'failed', 'cancelled')")),
)
"""``gated``: whether it may have to wait for other jobs, as it has dependencies or is a task of an array with a limit,
waits for something else than GPUs in its engine, or pauses until ``not_before``, as it failed again and again. A task
of an array has the array's spec, and the dependencies of the array are its own.

``number``: what its tenant's people type for its id, for a task that of its array; none of what an older release
accepted.

``engine``: what runs it, our own agents or an engine such as Slurm, which knows it by ``external_id``."""

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

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, ForeignKey("tenants.id"), nullable=False),
    Column("url", Text, nullable=False),
    Column("events", ARRAY(Text), nullable=False),
    Column("project", Text),
    Column("secret_revision", Integer, nullable=False, server_default=text("1")),
    Column("secret_sha256", LargeBinary, nullable=False),
    Column("previous_secret_until", Timestamp),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("enabled_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("disabled_at", Timestamp),
    Column("disabled_reason", Text),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("failing_since", Timestamp),
    Column("paused_until", Timestamp),
    Index("webhooks_by_tenant", "tenant_id", "id"),
)
"""Where messages go. Secrets are derived from the installation's and ``secret_revision``; only their hash is here.
``failures`` counts the attempts that failed since the last that succeeded; nothing is sent until ``paused_until``."""

webhook_events = Table(
    "webhook_events",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    Column("type", Text, nullable=False),
    Column("tenant_id", Text),
    Column("project", Text),
    Column("at", Timestamp, nullable=False, server_default=text("now()")),
    Column("data", JSONB, nullable=False),
)
"""Budgets that were exceeded and nodes that were lost (by the scheduler), written in the transaction that finds out.
Admission turns each into deliveries and deletes it in one transaction; without a tenant, it concerns operators."""

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", Text, primary_key=True),
    Column("webhook_id", Text, ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("type", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'pending'")),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("attempted_at", Timestamp),
    Column("next_attempt_at", Timestamp, server_default=text("now()")),
    Column("ended_at", Timestamp),
    Column("status", Integer),
    Column("error", Text),
    Index("webhook_deliveries_due", "webhook_id", "next_attempt_at", postgresql_where=text("state = 'pending'")),
    Index("webhook_deliveries_by_webhook", "webhook_id", "id"),
    Index("webhook_deliveries_ended", "ended_at"),
)
"""Messages. An attempt moves ``next_attempt_at`` past its own time-out before it begins, so that no other process makes
it too, and that it is repeated if this process dies."""

secrets = Table(
    "secrets",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    Column("project", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("updated_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""Values that jobs get, sealed by ``services/db/sealing.py``. An empty ``project`` means all of the tenant's."""

uploads = Table(
    "uploads",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    Column("sha256", Text, primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("is_complete", Boolean, nullable=False, server_default=text("false")),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("used_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""Archives with the files of jobs. ``used_at`` is when it was last uploaded to, or named by a submission."""

upload_chunks = Table(
    "upload_chunks",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("sha256", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
    ForeignKeyConstraint(["tenant_id", "sha256"], ["uploads.tenant_id", "uploads.sha256"], ondelete="CASCADE"),
)

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
