"""Keep why a node itself takes no new work, as its heartbeats say: a disk that is nearly full, no GPUs."""

from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE nodes ADD COLUMN closed TEXT")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE nodes DROP COLUMN closed")
