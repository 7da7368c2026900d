"""Let a job pause before it starts again, once it has ended soon after several starts."""

from alembic import op

revision = "0050"
down_revision = "0049"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE jobs ADD COLUMN not_before TIMESTAMPTZ")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE jobs DROP COLUMN not_before")
