"""Let keys expire, and show when they were used."""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE api_keys ADD COLUMN expires_at TIMESTAMPTZ, ADD COLUMN last_used_at TIMESTAMPTZ")


def downgrade() -> None:
    op.execute("ALTER TABLE api_keys DROP COLUMN expires_at, DROP COLUMN last_used_at")
