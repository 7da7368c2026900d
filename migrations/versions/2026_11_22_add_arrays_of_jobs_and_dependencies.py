"""Add arrays of jobs, and dependencies between jobs."""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE job_arrays (id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL, name TEXT NOT NULL, "
        "project TEXT NOT NULL, labels JSONB NOT NULL, spec JSONB NOT NULL, tasks INT NOT NULL, "
        "first_index INT NOT NULL, last_index INT NOT NULL, max_running INT, "
        "submitted_at TIMESTAMPTZ NOT NULL DEFAULT now())"
    )
    op.execute("CREATE INDEX job_arrays_by_tenant ON job_arrays (tenant_id, id)")
    op.execute(
        "ALTER TABLE jobs ADD COLUMN array_id TEXT, ADD COLUMN array_index INT, "
        "ADD COLUMN gated BOOLEAN NOT NULL DEFAULT false"
    )
    op.execute("CREATE INDEX jobs_by_array ON jobs (array_id, id) WHERE array_id IS NOT NULL")
    op.execute("CREATE INDEX jobs_gated ON jobs (id) WHERE gated AND state NOT IN ('succeeded', 'failed', 'cancelled')")
    op.execute(
        "CREATE TABLE job_dependencies (dependent_id TEXT NOT NULL, needs_id TEXT NOT NULL, condition TEXT NOT NULL, "
        "CONSTRAINT job_dependencies_pkey PRIMARY KEY (dependent_id, needs_id, condition), "
        "CONSTRAINT job_dependencies_condition CHECK (condition IN ('ok', 'any', 'not_ok')))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE job_dependencies")
    op.execute("DROP INDEX jobs_gated")
    op.execute("DROP INDEX jobs_by_array")
    op.execute("ALTER TABLE jobs DROP COLUMN gated, DROP COLUMN array_index, DROP COLUMN array_id")
    op.execute("DROP TABLE job_arrays")
