"""Say where nodes keep checkpoints, and bind jobs to the nodes that alone have theirs."""

from alembic import op

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE nodes ADD COLUMN checkpoints TEXT")
    op.execute("ALTER TABLE rank_statuses ADD COLUMN holds_checkpoint BOOLEAN")
    op.execute("ALTER TABLE jobs ADD COLUMN bound_to TEXT[]")
    op.execute("CREATE INDEX jobs_bound ON jobs (id) WHERE bound_to IS NOT NULL")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE jobs DROP COLUMN bound_to")
    op.execute("ALTER TABLE rank_statuses DROP COLUMN holds_checkpoint")
    op.execute("ALTER TABLE nodes DROP COLUMN checkpoints")
