"""Let policies choose batches."""

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("ALTER TABLE allocations ADD COLUMN batch_size INTEGER")
    op.execute("ALTER TABLE job_progress ADD COLUMN noise_scale FLOAT")
    op.execute("CREATE INDEX job_progress_with_noise ON job_progress (job_id) WHERE noise_scale IS NOT NULL")
    op.execute("ALTER TABLE setting_profiles ADD COLUMN by_batch JSONB")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("ALTER TABLE setting_profiles DROP COLUMN by_batch")
    op.execute("DROP INDEX job_progress_with_noise")
    op.execute("ALTER TABLE job_progress DROP COLUMN noise_scale")
    op.execute("ALTER TABLE allocations DROP COLUMN batch_size")
