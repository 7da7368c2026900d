"""Predict the lengths of jobs."""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE length_trainings (id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL, key_id TEXT NOT NULL, "
        "state TEXT NOT NULL, problem JSONB NOT NULL, problem_sha256 BYTEA NOT NULL, result JSONB, failure JSONB, "
        "attempts INTEGER NOT NULL DEFAULT 0, claim TEXT, lease_until TIMESTAMPTZ, "
        "submitted_at TIMESTAMPTZ NOT NULL DEFAULT now(), enqueued_at TIMESTAMPTZ, started_at TIMESTAMPTZ, "
        "ended_at TIMESTAMPTZ, train_s FLOAT, CONSTRAINT length_trainings_state "
        "CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')))"
    )
    op.execute("CREATE INDEX length_trainings_live ON length_trainings (state) WHERE state IN ('queued', 'running')")
    op.execute(
        "CREATE TABLE length_models (id TEXT PRIMARY KEY, trained_at TIMESTAMPTZ NOT NULL DEFAULT now(), "
        "through_at TIMESTAMPTZ NOT NULL, group_version INTEGER NOT NULL, jobs INTEGER NOT NULL, "
        "groups INTEGER NOT NULL, evaluation JSONB NOT NULL, is_active BOOLEAN NOT NULL DEFAULT false, "
        "content BYTEA NOT NULL)"
    )
    op.execute("CREATE UNIQUE INDEX length_models_one_active ON length_models (is_active) WHERE is_active")
    op.execute(
        "CREATE TABLE job_predictions (job_id TEXT PRIMARY KEY, group_version INTEGER NOT NULL, "
        "group_id BIGINT NOT NULL, user_id BIGINT NOT NULL, predicted_at TIMESTAMPTZ, model_id TEXT, "
        "gpu_s FLOAT NOT NULL DEFAULT 0, spread_gpu_s FLOAT NOT NULL DEFAULT 0, seen BOOLEAN NOT NULL DEFAULT false, "
        "examples INTEGER NOT NULL DEFAULT 0, low_gpu_s FLOAT, median_gpu_s FLOAT, high_gpu_s FLOAT)"
    )
    op.execute("CREATE INDEX jobs_succeeded ON jobs (ended_at, id) WHERE state = 'succeeded'")


def downgrade() -> None:
    op.execute("DROP INDEX jobs_succeeded")
    op.execute("DROP TABLE job_predictions")
    op.execute("DROP TABLE length_models")
    op.execute("DROP TABLE length_trainings")
