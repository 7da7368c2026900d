"""Keep a day of temperatures: of each node a row every ten minutes, with the temperature of each of its GPUs."""

from alembic import op

revision = "0061"
down_revision = "0060"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE TABLE gpu_temperatures (
            at TIMESTAMP WITH TIME ZONE NOT NULL,
            node_id TEXT NOT NULL,
            celsius JSONB NOT NULL,
            PRIMARY KEY (at, node_id)
        )
        """
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP TABLE gpu_temperatures")
