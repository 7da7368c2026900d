"""Keep what plans say of jobs in dry runs of engines, and what the jobs of each day would have saved by that."""

from alembic import op

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("""
        ALTER TABLE engine_jobs ADD COLUMN watched BOOLEAN NOT NULL DEFAULT false,
            ADD COLUMN planned BOOLEAN NOT NULL DEFAULT false, ADD COLUMN would_start_at TIMESTAMPTZ
    """)
    op.execute("""
        CREATE TABLE engine_savings (
            engine TEXT NOT NULL,
            day DATE NOT NULL,
            jobs INTEGER NOT NULL,
            unplanned INTEGER NOT NULL,
            unmeasured INTEGER NOT NULL,
            unpriced INTEGER NOT NULL,
            later INTEGER NOT NULL,
            later_h DOUBLE PRECISION,
            carbon_gco2 DOUBLE PRECISION,
            would_carbon_gco2 DOUBLE PRECISION,
            settled BOOLEAN NOT NULL,
            PRIMARY KEY (engine, day)
        )
    """)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP TABLE engine_savings")
    op.execute("ALTER TABLE engine_jobs DROP COLUMN would_start_at, DROP COLUMN planned, DROP COLUMN watched")
