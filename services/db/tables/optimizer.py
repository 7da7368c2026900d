"""Tables of the optimizer: solves, and the idempotency keys that stand for them."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Float, ForeignKey, Index, Integer, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata

solves = Table(
    "solves",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("problem", JSONB, nullable=False),
    Column("problem_sha256", LargeBinary, nullable=False),
    Column("result", JSONB),
    Column("failure", JSONB),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("claim", Text),
    Column("lease_until", Timestamp),
    Column("submitted_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("enqueued_at", Timestamp),
    Column("started_at", Timestamp),
    Column("ended_at", Timestamp),
    Column("solve_s", Float),
    Index("solves_by_tenant", "tenant_id", "id"),
    Index("solves_live", "state", postgresql_where=text("state IN ('queued', 'running')")),
    Index(
        "solves_one_per_problem",
        "tenant_id",
        "kind",
        "problem_sha256",
        unique=True,
        postgresql_where=text("state IN ('queued', 'running', 'succeeded')"),
    ),
    CheckConstraint("state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name="solves_state"),
)
"""A worker owns a running solve while ``claim`` is its own and ``lease_until`` lies ahead; only the owner ends it. The
partial unique index is the last word on "the same problem is not solved twice"."""

solve_submissions = Table(
    "solve_submissions",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("body_sha256", LargeBinary, nullable=False),
    Column("solve_id", Text, ForeignKey("solves.id", ondelete="CASCADE"), nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Index("solve_submissions_by_solve", "solve_id"),
)
"""Which solve an idempotency key stands for; forgotten together with it."""
