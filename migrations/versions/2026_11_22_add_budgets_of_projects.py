"""Add budgets of projects."""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE budgets (id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL REFERENCES tenants (id), "
        "project TEXT NOT NULL, quantity TEXT NOT NULL, amount FLOAT NOT NULL, action TEXT NOT NULL, month TEXT, "
        "used FLOAT NOT NULL DEFAULT 0, exceeded BOOLEAN NOT NULL DEFAULT false, detail TEXT, "
        "CONSTRAINT budgets_of_a_project UNIQUE (tenant_id, project, quantity))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE budgets")
