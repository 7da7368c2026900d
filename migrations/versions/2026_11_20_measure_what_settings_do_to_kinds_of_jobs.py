"""Measure what settings do to kinds of jobs."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE setting_measurements (allocation_id TEXT PRIMARY KEY REFERENCES allocations (id), "
        "job_id TEXT NOT NULL, kind TEXT NOT NULL, gpu_model TEXT NOT NULL, setting TEXT NOT NULL, "
        "gpus INTEGER NOT NULL, nodes INTEGER NOT NULL, settings JSONB NOT NULL, window_s FLOAT NOT NULL, "
        "position INTEGER NOT NULL DEFAULT 0, slice_since TIMESTAMPTZ, state TEXT NOT NULL DEFAULT 'running', "
        "detail TEXT NOT NULL DEFAULT '', began_at TIMESTAMPTZ NOT NULL DEFAULT now(), ended_at TIMESTAMPTZ, "
        "CONSTRAINT setting_measurements_state CHECK (state IN ('running', 'done', 'cut', 'failed')))"
    )
    op.execute(
        "CREATE INDEX setting_measurements_running ON setting_measurements (allocation_id) WHERE state = 'running'"
    )
    op.execute("CREATE INDEX setting_measurements_by_kind ON setting_measurements (kind, began_at)")
    op.execute(
        "CREATE TABLE setting_points (kind TEXT NOT NULL, gpu_model TEXT NOT NULL, setting TEXT NOT NULL, "
        "gpus INTEGER NOT NULL, nodes INTEGER NOT NULL, local_batch FLOAT NOT NULL, value FLOAT NOT NULL, "
        "step_time_s FLOAT NOT NULL, power_w FLOAT NOT NULL, elapsed_s FLOAT NOT NULL, job_id TEXT NOT NULL, "
        "measured_at TIMESTAMPTZ NOT NULL DEFAULT now(), "
        "PRIMARY KEY (kind, gpu_model, setting, gpus, nodes, local_batch, value))"
    )
    op.execute(
        "CREATE TABLE setting_profiles (kind TEXT NOT NULL, gpu_model TEXT NOT NULL, setting TEXT NOT NULL, "
        "gpus JSONB NOT NULL, settings JSONB NOT NULL, speed JSONB NOT NULL, power_w JSONB NOT NULL, "
        "measured_gpus JSONB NOT NULL, points INTEGER NOT NULL, time_mape FLOAT, energy_mape FLOAT, "
        "detail TEXT NOT NULL DEFAULT '', fitted_at TIMESTAMPTZ NOT NULL DEFAULT now(), "
        "PRIMARY KEY (kind, gpu_model, setting))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE setting_profiles")
    op.execute("DROP TABLE setting_points")
    op.execute("DROP TABLE setting_measurements")
