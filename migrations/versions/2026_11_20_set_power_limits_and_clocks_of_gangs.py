"""Set power limits and clocks of gangs."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE allocations ADD COLUMN power_limit_w FLOAT, ADD COLUMN clock_mhz INTEGER, "
        "ADD COLUMN settings_revision INTEGER NOT NULL DEFAULT 0, "
        "ADD COLUMN settings_refused JSONB NOT NULL DEFAULT '{}'"
    )
    op.execute("ALTER TABLE rank_statuses ADD COLUMN settings JSONB")


def downgrade() -> None:
    op.execute("ALTER TABLE rank_statuses DROP COLUMN settings")
    op.execute(
        "ALTER TABLE allocations DROP COLUMN power_limit_w, DROP COLUMN clock_mhz, DROP COLUMN settings_revision, "
        "DROP COLUMN settings_refused"
    )
