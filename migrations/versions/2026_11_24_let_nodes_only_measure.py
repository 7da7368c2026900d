"""Let nodes have agents that only measure, and say for which node of an engine they do."""

from alembic import op

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("""
        ALTER TABLE nodes ADD COLUMN measures_only BOOLEAN NOT NULL DEFAULT false, ADD COLUMN engine_node TEXT
    """)
    op.execute("CREATE INDEX nodes_by_engine_node ON nodes (engine_node) WHERE engine_node IS NOT NULL")
    op.execute("CREATE INDEX allocations_ended ON allocations (ended_at) WHERE ended_at IS NOT NULL")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP INDEX allocations_ended")
    op.execute("ALTER TABLE nodes DROP COLUMN engine_node, DROP COLUMN measures_only")
