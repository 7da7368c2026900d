"""Let instances prove who they are: who listens on their port, and a key that only their node and routers know."""

from alembic import op

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE rank_statuses ADD COLUMN listener TEXT")
    op.execute("""
        ALTER TABLE pool_instances
            ADD COLUMN listener TEXT, ADD COLUMN sealed_key BYTEA, ADD COLUMN checks_key BOOLEAN
    """)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE pool_instances DROP COLUMN checks_key, DROP COLUMN sealed_key, DROP COLUMN listener")
    op.execute("ALTER TABLE rank_statuses DROP COLUMN listener")
