"""End slices of measurements with a report of progress."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE setting_measurements ADD COLUMN slice_s FLOAT NOT NULL DEFAULT 0")


def downgrade() -> None:
    op.execute("ALTER TABLE setting_measurements DROP COLUMN slice_s")
