"""Tables of the simulator: what-if runs, the idempotency keys that stand for them, and the files they read."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Float, ForeignKey, Index, Integer, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from services.db.metadata import Timestamp, metadata

simulations = Table(
    "simulations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("problem", JSONB, nullable=False),
    Column("problem_sha256", LargeBinary, nullable=False),
    Column("inputs", ARRAY(Text), nullable=False),
    Column("result", JSONB),
    Column("failure", JSONB),
    Column("done", Integer, nullable=False, server_default=text("0")),
    Column("total", Integer, nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("claim", Text),
    Column("lease_until", Timestamp),
    Column("submitted_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("enqueued_at", Timestamp),
    Column("started_at", Timestamp),
    Column("ended_at", Timestamp),
    Column("run_s", Float),
    Index("simulations_by_tenant", "tenant_id", "id"),
    Index("simulations_live", "state", postgresql_where=text("state IN ('queued', 'running')")),
    Index("simulations_by_input", "inputs", postgresql_using="gin"),
    Index(
        "simulations_one_per_problem",
        "tenant_id",
        "problem_sha256",
        unique=True,
        postgresql_where=text("state IN ('queued', 'running', 'succeeded')"),
    ),
    CheckConstraint("state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="simulations_state"),
)
"""A worker owns a running simulation while ``claim`` is its own and ``lease_until`` lies ahead, as with ``solves``."""

simulation_submissions = Table(
    "simulation_submissions",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("body_sha256", LargeBinary, nullable=False),
    Column("simulation_id", Text, ForeignKey("simulations.id", ondelete="CASCADE"), nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Index("simulation_submissions_by_simulation", "simulation_id"),
)
"""Which simulation an idempotency key stands for; forgotten together with it."""

simulation_inputs = Table(
    "simulation_inputs",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("stored_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""Files by their content, packed with gzip; kept while a simulation names them in ``inputs``."""
