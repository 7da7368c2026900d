"""Count the GPU time a job has attained on the job itself."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE jobs ADD COLUMN attained_gpu_s FLOAT DEFAULT 0 NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE jobs DROP COLUMN attained_gpu_s")
