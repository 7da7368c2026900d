"""Show the progress of solves."""

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE solves ADD COLUMN progress JSONB")


def downgrade() -> None:
    op.execute("ALTER TABLE solves DROP COLUMN progress")
