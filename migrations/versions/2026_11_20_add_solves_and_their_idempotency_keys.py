"""Add solves and their idempotency keys."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

STATEMENTS = [
    """
    CREATE TABLE solves (
        id TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        key_id TEXT NOT NULL,
        kind TEXT NOT NULL,
        state TEXT NOT NULL,
        problem JSONB NOT NULL,
        problem_sha256 BYTEA NOT NULL,
        result JSONB,
        failure JSONB,
        attempts INTEGER DEFAULT 0 NOT NULL,
        claim TEXT,
        lease_until TIMESTAMP WITH TIME ZONE,
        submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        enqueued_at TIMESTAMP WITH TIME ZONE,
        started_at TIMESTAMP WITH TIME ZONE,
        ended_at TIMESTAMP WITH TIME ZONE,
        solve_s FLOAT,
        PRIMARY KEY (id),
        CONSTRAINT solves_state CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled'))
    )
    """,
    "CREATE INDEX solves_by_tenant ON solves (tenant_id, id)",
    "CREATE INDEX solves_live ON solves (state) WHERE state IN ('queued', 'running')",
    """
    CREATE UNIQUE INDEX solves_one_per_problem ON solves (tenant_id, kind, problem_sha256)
    WHERE state IN ('queued', 'running', 'succeeded')
    """,
    """
    CREATE TABLE solve_submissions (
        tenant_id TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        body_sha256 BYTEA NOT NULL,
        solve_id TEXT NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (tenant_id, idempotency_key),
        FOREIGN KEY(solve_id) REFERENCES solves (id) ON DELETE CASCADE
    )
    """,
    "CREATE INDEX solve_submissions_by_solve ON solve_submissions (solve_id)",
]


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    for table in ("solve_submissions", "solves"):
        op.execute(f"DROP TABLE {table}")
