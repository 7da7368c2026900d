"""Say which releases may run on this schema, so that an older one can be started again after an upgrade.

A migration that takes something away from the release before sets ``least_revision`` to its own revision; all others
leave it. A release whose newest migration is older than that refuses the schema, any other goes on with it.
"""

from alembic import op

revision = "0057"
down_revision = "0056"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("CREATE TABLE schema_compatibility (least_revision TEXT NOT NULL)")
    op.execute("INSERT INTO schema_compatibility VALUES ('0057')")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP TABLE schema_compatibility")
