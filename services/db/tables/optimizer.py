"""Tables of the optimizer: solves, and their idempotency keys."""

from sqlalchemy import Column, ForeignKey, Index, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata
from services.db.tables.work import KEPT, LIVE, work_columns

solves = Table(
    "solves",
    metadata,
    *work_columns("solves", "solve_s"),
    Column("kind", Text, nullable=False),
    Column("progress", JSONB),
    Index("solves_by_tenant", "tenant_id", "id"),
    Index("solves_live", "state", postgresql_where=LIVE),
    Index("solves_one_per_problem", "tenant_id", "kind", "problem_sha256", unique=True, postgresql_where=KEPT),
)
"""Problems, and their answers once a worker has solved them."""

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
"""The solve that an idempotency key refers to; deleted together with it."""
