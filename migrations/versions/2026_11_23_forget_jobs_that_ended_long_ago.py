"""Keep of jobs that ended long ago what reports need: whose they were, and what they did."""

from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE TABLE past_jobs (
            id TEXT PRIMARY KEY,
            tenant_id TEXT NOT NULL,
            project TEXT NOT NULL,
            name TEXT NOT NULL,
            state TEXT NOT NULL,
            user_id TEXT,
            user_label TEXT,
            array_id TEXT,
            array_name TEXT,
            work_unit TEXT,
            work_done DOUBLE PRECISION
        )
        """
    )
    op.execute("CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP INDEX jobs_ended")
    op.execute("DROP TABLE past_jobs")
