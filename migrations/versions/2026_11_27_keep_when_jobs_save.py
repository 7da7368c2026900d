"""Keep when jobs last said that they have saved their work."""

from alembic import op

revision = "0073"
down_revision = "0072"
branch_labels = None
depends_on = None

VIEW = "CREATE VIEW reported_work AS SELECT job_id, done, total, noise_scale, updated_at, xmin AS version"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("""ALTER TABLE job_progress ADD COLUMN saved_at TIMESTAMP WITH TIME ZONE,
        ADD COLUMN save_every_s FLOAT, ADD COLUMN save_s FLOAT""")
    op.execute("DROP VIEW reported_work")
    op.execute(f"{VIEW}, saved_at, save_every_s, save_s FROM job_progress")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW reported_work")
    op.execute(f"{VIEW} FROM job_progress")
    op.execute("ALTER TABLE job_progress DROP COLUMN saved_at, DROP COLUMN save_every_s, DROP COLUMN save_s")
