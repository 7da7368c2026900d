"""Add simulations, their idempotency keys and the files they read."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

STATEMENTS = [
    """
    CREATE TABLE simulations (
        id TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        key_id TEXT NOT NULL,
        state TEXT NOT NULL,
        problem JSONB NOT NULL,
        problem_sha256 BYTEA NOT NULL,
        inputs TEXT[] NOT NULL,
        result JSONB,
        failure JSONB,
        done INTEGER DEFAULT 0 NOT NULL,
        total INTEGER NOT NULL,
        attempts INTEGER DEFAULT 0 NOT NULL,
        claim TEXT,
        lease_until TIMESTAMP WITH TIME ZONE,
        submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        enqueued_at TIMESTAMP WITH TIME ZONE,
        started_at TIMESTAMP WITH TIME ZONE,
        ended_at TIMESTAMP WITH TIME ZONE,
        run_s FLOAT,
        PRIMARY KEY (id),
        CONSTRAINT simulations_state CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled'))
    )
    """,
    "CREATE INDEX simulations_by_tenant ON simulations (tenant_id, id)",
    "CREATE INDEX simulations_live ON simulations (state) WHERE state IN ('queued', 'running')",
    "CREATE INDEX simulations_by_input ON simulations USING gin (inputs)",
    """
    CREATE UNIQUE INDEX simulations_one_per_problem ON simulations (tenant_id, problem_sha256)
    WHERE state IN ('queued', 'running', 'succeeded')
    """,
    """
    CREATE TABLE simulation_submissions (
        tenant_id TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        body_sha256 BYTEA NOT NULL,
        simulation_id TEXT NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (tenant_id, idempotency_key),
        FOREIGN KEY(simulation_id) REFERENCES simulations (id) ON DELETE CASCADE
    )
    """,
    "CREATE INDEX simulation_submissions_by_simulation ON simulation_submissions (simulation_id)",
    """
    CREATE TABLE simulation_inputs (
        sha256 TEXT NOT NULL,
        content BYTEA NOT NULL,
        stored_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (sha256)
    )
    """,
]


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    for table in ("simulation_inputs", "simulation_submissions", "simulations"):
        op.execute(f"DROP TABLE {table}")
