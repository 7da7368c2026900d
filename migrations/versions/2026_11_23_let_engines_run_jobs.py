"""Mirror what engines such as Slurm run: their nodes and jobs, what was decided of those, and what they did instead."""

from alembic import op

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE jobs ADD COLUMN engine TEXT NOT NULL DEFAULT 'wattshift', ADD COLUMN external_id TEXT")
    op.execute("CREATE UNIQUE INDEX jobs_of_an_engine ON jobs (engine, external_id) WHERE external_id IS NOT NULL")
    op.execute("""
        ALTER TABLE nodes ADD COLUMN engine TEXT NOT NULL DEFAULT 'wattshift',
            ADD COLUMN queues TEXT[] NOT NULL DEFAULT '{}'
    """)
    op.execute("""
        CREATE TABLE engines (
            name TEXT PRIMARY KEY,
            kind TEXT NOT NULL,
            version TEXT NOT NULL,
            places TEXT NOT NULL,
            mode TEXT NOT NULL,
            queues TEXT[] NOT NULL,
            problem TEXT,
            boot_id TEXT NOT NULL,
            reported_at TIMESTAMPTZ NOT NULL DEFAULT now()
        )
    """)
    op.execute("""
        CREATE TABLE engine_jobs (
            engine TEXT NOT NULL,
            external_id TEXT NOT NULL,
            report JSONB NOT NULL,
            over BOOLEAN NOT NULL,
            unfolded BOOLEAN NOT NULL DEFAULT true,
            reported_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            job_id TEXT,
            decision JSONB,
            revision BIGINT NOT NULL DEFAULT 0,
            sent_at TIMESTAMPTZ,
            PRIMARY KEY (engine, external_id)
        )
    """)
    op.execute("CREATE INDEX engine_jobs_unfolded ON engine_jobs (engine) WHERE unfolded")
    op.execute("CREATE INDEX engine_jobs_live ON engine_jobs (engine, external_id) WHERE NOT over")
    op.execute("CREATE INDEX engine_jobs_by_job ON engine_jobs (job_id)")
    op.execute("""
        CREATE TABLE engine_days (
            engine TEXT NOT NULL,
            day DATE NOT NULL,
            what TEXT NOT NULL,
            count BIGINT NOT NULL,
            PRIMARY KEY (engine, day, what)
        )
    """)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for table in ("engine_days", "engine_jobs", "engines"):
        op.execute(f"DROP TABLE {table}")
    op.execute("ALTER TABLE nodes DROP COLUMN queues, DROP COLUMN engine")
    op.execute("DROP INDEX jobs_of_an_engine")
    op.execute("ALTER TABLE jobs DROP COLUMN external_id, DROP COLUMN engine")
