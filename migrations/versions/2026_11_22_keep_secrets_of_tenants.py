"""Keep secrets of tenants, encrypted."""

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE secrets (tenant_id TEXT NOT NULL REFERENCES tenants (id), project TEXT NOT NULL, "
        "name TEXT NOT NULL, version INTEGER NOT NULL, sealed BYTEA NOT NULL, "
        "created_at TIMESTAMPTZ NOT NULL DEFAULT now(), updated_at TIMESTAMPTZ NOT NULL DEFAULT now(), "
        "PRIMARY KEY (tenant_id, project, name))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE secrets")
