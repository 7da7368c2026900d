"""Say where orders of the grid are in force."""

from alembic import op

revision = "0071"
down_revision = "0070"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE VIEW orders_in_force AS
        SELECT zone FROM grid_orders WHERE withdrawn_at IS NULL AND start_at <= now() AND end_at > now()
        """
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW orders_in_force")
