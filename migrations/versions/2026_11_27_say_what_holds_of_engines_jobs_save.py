"""Say what the holds of engines' jobs save."""

from alembic import op

revision = "0067"
down_revision = "0066"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE engine_jobs ADD COLUMN would_save_gco2 DOUBLE PRECISION")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE engine_jobs DROP COLUMN would_save_gco2")
