"""Keep what each lever of the policy in force saved, day by day."""

from alembic import op

revision = "0056"
down_revision = "0055"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("CREATE TABLE savings (day DATE PRIMARY KEY, simulation_id TEXT, figures JSONB NOT NULL)")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP TABLE savings")
