"""Count the nodes that were lost under a job, and note when a node was silent: many at once are no job's doing."""

from alembic import op

revision = "0048"
down_revision = "0047"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE nodes ADD COLUMN silent_at TIMESTAMPTZ")
    op.execute("ALTER TABLE jobs ADD COLUMN node_losses INTEGER NOT NULL DEFAULT 0")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE jobs DROP COLUMN node_losses")
    op.execute("ALTER TABLE nodes DROP COLUMN silent_at")
