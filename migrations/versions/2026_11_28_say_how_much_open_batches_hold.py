"""Say how many bytes of requests batches that have not ended hold."""

from alembic import op

revision = "0081"
down_revision = "0080"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE batches ADD COLUMN input_bytes BIGINT DEFAULT 0 NOT NULL")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE batches DROP COLUMN input_bytes")
