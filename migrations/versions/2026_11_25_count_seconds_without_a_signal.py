"""Count the seconds in which a model server's clock was kept because nothing was seen of its requests."""

from alembic import op

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE server_clocks ADD COLUMN unobserved INTEGER NOT NULL DEFAULT 0")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE server_clocks DROP COLUMN unobserved")
