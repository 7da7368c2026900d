"""Say who ended a rank."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE rank_statuses ADD COLUMN ended_by TEXT")
    op.execute("ALTER TABLE rank_ends ADD COLUMN ended_by TEXT")


def downgrade() -> None:
    op.execute("ALTER TABLE rank_ends DROP COLUMN ended_by")
    op.execute("ALTER TABLE rank_statuses DROP COLUMN ended_by")
