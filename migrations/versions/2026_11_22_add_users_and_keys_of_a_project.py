"""Add users and keys of a project."""

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE users (
            id TEXT PRIMARY KEY,
            tenant_id TEXT NOT NULL REFERENCES tenants (id),
            name TEXT NOT NULL,
            account TEXT,
            created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            disabled_at TIMESTAMPTZ,
            CONSTRAINT users_of_a_tenant UNIQUE (tenant_id, name)
        )
        """
    )
    op.execute("ALTER TABLE api_keys ADD COLUMN user_id TEXT REFERENCES users (id), ADD COLUMN project TEXT")
    op.execute("ALTER TABLE jobs ADD COLUMN user_id TEXT")
    op.execute("ALTER TABLE job_arrays ADD COLUMN user_id TEXT")


def downgrade() -> None:
    op.execute("ALTER TABLE job_arrays DROP COLUMN user_id")
    op.execute("ALTER TABLE jobs DROP COLUMN user_id")
    op.execute("ALTER TABLE api_keys DROP COLUMN user_id, DROP COLUMN project")
    op.execute("DROP TABLE users")
