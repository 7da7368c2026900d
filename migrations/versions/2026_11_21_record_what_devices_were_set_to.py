"""Record what devices were set to."""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE settings_in_force (allocation_id TEXT NOT NULL, node_id TEXT NOT NULL, "
        "revision INTEGER NOT NULL, power_limit_w FLOAT, clock_mhz INTEGER, refused JSONB NOT NULL, "
        "enforced_w JSONB NOT NULL, since TIMESTAMPTZ NOT NULL, PRIMARY KEY (allocation_id, node_id, revision))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE settings_in_force")
