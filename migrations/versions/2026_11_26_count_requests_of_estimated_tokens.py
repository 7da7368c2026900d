"""Count the requests whose server did not state their tokens."""

from alembic import op

revision = "0054"
down_revision = "0053"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE request_usages ADD COLUMN estimated_requests BIGINT NOT NULL DEFAULT 0")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE request_usages DROP COLUMN estimated_requests")
