"""Remember the zones of nodes."""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE node_zones (node_id TEXT NOT NULL, since TIMESTAMPTZ NOT NULL, zone TEXT NOT NULL, "
        "PRIMARY KEY (node_id, since))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE node_zones")
