"""Count the jobs a tenant had accepted."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A constant default is no rewrite of the table: the lock is held for a moment only.
    op.execute("ALTER TABLE tenants ADD COLUMN accepted_jobs BIGINT DEFAULT 0 NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE tenants DROP COLUMN accepted_jobs")
