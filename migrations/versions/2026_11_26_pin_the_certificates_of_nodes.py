"""Note the fingerprint of the certificate by which a joined node's agent is known, as nobody vouches for it."""

from alembic import op

revision = "0058"
down_revision = "0057"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE node_credentials ADD COLUMN certificate_sha256 BYTEA")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE node_credentials DROP COLUMN certificate_sha256")
