"""Register model servers of others."""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """CREATE TABLE model_endpoints (
            name TEXT PRIMARY KEY,
            tenant_id TEXT NOT NULL,
            key_id TEXT NOT NULL,
            spec JSONB NOT NULL,
            created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            updated_at TIMESTAMPTZ NOT NULL DEFAULT now()
        )"""
    )


def downgrade() -> None:
    op.execute("DROP TABLE model_endpoints")
