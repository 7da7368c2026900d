"""Reserve GPUs for tenants, and nodes for maintenance, for a time."""

from alembic import op

revision = "0068"
down_revision = "0067"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE TABLE reservations (
            id TEXT NOT NULL,
            key_id TEXT NOT NULL,
            idempotency_key TEXT,
            body_sha256 BYTEA NOT NULL,
            name TEXT NOT NULL,
            tenant_id TEXT,
            made_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
            start_at TIMESTAMP WITH TIME ZONE NOT NULL,
            end_at TIMESTAMP WITH TIME ZONE NOT NULL,
            gpu_model TEXT,
            gpus JSONB NOT NULL,
            slots JSONB NOT NULL,
            stays JSONB NOT NULL,
            cancelled_at TIMESTAMP WITH TIME ZONE,
            PRIMARY KEY (id)
        )
        """
    )
    op.execute("CREATE UNIQUE INDEX reservations_keyed ON reservations (key_id, idempotency_key)")
    op.execute("CREATE INDEX reservations_by_end ON reservations (end_at)")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP TABLE reservations")
