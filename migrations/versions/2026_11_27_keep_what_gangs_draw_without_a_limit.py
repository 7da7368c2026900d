"""Keep what gangs draw without a limit, and how far the models of an order's scope are off."""

from alembic import op

revision = "0074"
down_revision = "0073"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE allocations ADD COLUMN unlimited_w FLOAT")
    op.execute("ALTER TABLE grid_orders ADD COLUMN ratio FLOAT NOT NULL DEFAULT 1")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE grid_orders DROP COLUMN ratio")
    op.execute("ALTER TABLE allocations DROP COLUMN unlimited_w")
