"""Find the events of one tenant."""

from alembic import op

revision = "0080"
down_revision = "0079"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("CREATE INDEX job_events_by_tenant ON job_events (tenant_id, transaction_id, sequence)")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP INDEX job_events_by_tenant")
