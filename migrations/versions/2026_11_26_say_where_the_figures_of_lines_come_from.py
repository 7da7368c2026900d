"""Say of every line of the ledger which devices it is of, and where its carbon intensity comes from."""

from alembic import op

revision = "0052"
down_revision = "0051"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("""
        ALTER TABLE energy_usages
            ADD COLUMN devices INTEGER[] NOT NULL DEFAULT '{}', ADD COLUMN provider TEXT,
            ADD COLUMN intensity_kind TEXT, ADD COLUMN fetched_at TIMESTAMPTZ, ADD COLUMN release TEXT
    """)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("""
        ALTER TABLE energy_usages DROP COLUMN release, DROP COLUMN fetched_at, DROP COLUMN intensity_kind,
            DROP COLUMN provider, DROP COLUMN devices
    """)
