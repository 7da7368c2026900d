"""Keep the clocks of model servers."""

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """CREATE TABLE server_clocks (
            job_id TEXT NOT NULL,
            start_at TIMESTAMPTZ NOT NULL,
            node_id TEXT NOT NULL,
            policy TEXT NOT NULL,
            dry_run BOOLEAN NOT NULL,
            decisions INTEGER NOT NULL,
            exceeded INTEGER NOT NULL,
            mean_mhz DOUBLE PRECISION NOT NULL,
            lowest_mhz DOUBLE PRECISION NOT NULL,
            highest_mhz DOUBLE PRECISION NOT NULL,
            last_mhz DOUBLE PRECISION NOT NULL,
            model_error DOUBLE PRECISION,
            unused TEXT,
            PRIMARY KEY (job_id, start_at, node_id)
        )"""
    )
    op.execute("CREATE INDEX server_clocks_by_time ON server_clocks (start_at)")


def downgrade() -> None:
    op.execute("DROP TABLE server_clocks")
