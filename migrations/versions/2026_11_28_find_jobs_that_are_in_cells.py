"""Find the jobs that cells have, by tenant: they count against what it may hold."""

from alembic import op

revision = "0082"
down_revision = "0081"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("CREATE INDEX jobs_in_cells ON jobs (tenant_id) WHERE cell <> '' AND ended_at IS NULL")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP INDEX jobs_in_cells")
