"""Keep the operator's file of where nodes are in the network."""

from alembic import op

revision = "0077"
down_revision = "0076"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE scheduler_state ADD COLUMN topology TEXT DEFAULT '' NOT NULL")
    op.execute("CREATE VIEW known_topology AS SELECT topology AS file FROM scheduler_state")


def downgrade() -> None:
    op.execute("DROP VIEW known_topology")
    op.execute("ALTER TABLE scheduler_state DROP COLUMN topology")
