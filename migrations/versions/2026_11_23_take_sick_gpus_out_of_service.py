"""Keep what is the matter with single GPUs, and which an operator has taken out of service."""

from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE gpu_health (
            node_id TEXT NOT NULL,
            gpu INTEGER NOT NULL,
            uuid TEXT NOT NULL,
            drained BOOLEAN NOT NULL DEFAULT false,
            fault_id TEXT,
            cause TEXT,
            detail TEXT NOT NULL DEFAULT '',
            since TIMESTAMPTZ,
            ends_gangs BOOLEAN NOT NULL DEFAULT false,
            lasts BOOLEAN NOT NULL DEFAULT false,
            returned_fault_id TEXT,
            PRIMARY KEY (node_id, gpu),
            CONSTRAINT gpu_health_fault CHECK ((cause IS NULL) = (fault_id IS NULL))
        )
        """
    )


def downgrade() -> None:
    op.execute("DROP TABLE gpu_health")
