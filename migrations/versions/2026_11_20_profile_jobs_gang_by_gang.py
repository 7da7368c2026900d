"""Profile jobs gang by gang: count from each gang's first report of progress."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE job_profiles ADD COLUMN generation INTEGER DEFAULT 0 NOT NULL")
    op.execute("ALTER TABLE job_profiles ADD COLUMN since_at TIMESTAMP WITH TIME ZONE")


def downgrade() -> None:
    op.execute("ALTER TABLE job_profiles DROP COLUMN since_at")
    op.execute("ALTER TABLE job_profiles DROP COLUMN generation")
