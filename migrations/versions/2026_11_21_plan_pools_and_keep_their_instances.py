"""Plan pools of model servers, and keep their traffic, plans and instances."""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE pools (name TEXT NOT NULL, tenant_id TEXT NOT NULL, key_id TEXT NOT NULL, spec JSONB NOT "
        "NULL, revision INTEGER DEFAULT 1 NOT NULL, plan_id TEXT, planned_at TIMESTAMPTZ, deleted_at TIMESTAMPTZ, "
        "created_at TIMESTAMPTZ DEFAULT now() NOT NULL, updated_at TIMESTAMPTZ DEFAULT now() NOT NULL, PRIMARY "
        "KEY (name))"
    )
    op.execute(
        "CREATE TABLE pool_traffic (pool TEXT NOT NULL, start_at TIMESTAMPTZ NOT NULL, source TEXT NOT NULL, "
        "counts JSONB NOT NULL, PRIMARY KEY (pool, start_at, source))"
    )
    op.execute(
        "CREATE TABLE pool_plans (id TEXT NOT NULL, tenant_id TEXT NOT NULL, key_id TEXT NOT NULL, pool TEXT NOT "
        "NULL, revision INTEGER NOT NULL, trigger TEXT NOT NULL, slot_at TIMESTAMPTZ NOT NULL, from_at "
        "TIMESTAMPTZ NOT NULL, deadline_at TIMESTAMPTZ NOT NULL, outcome TEXT, decided_at TIMESTAMPTZ, state TEXT "
        "NOT NULL, problem JSONB NOT NULL, problem_sha256 BYTEA NOT NULL, result JSONB, failure JSONB, attempts "
        "INTEGER DEFAULT 0 NOT NULL, claim TEXT, lease_until TIMESTAMPTZ, submitted_at TIMESTAMPTZ DEFAULT now() "
        "NOT NULL, enqueued_at TIMESTAMPTZ, started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ, plan_s FLOAT, PRIMARY "
        "KEY (id), CONSTRAINT pool_plans_state CHECK (state IN ('queued', 'running', 'succeeded', 'failed', "
        "'cancelled')))"
    )
    op.execute("CREATE INDEX pool_plans_by_pool ON pool_plans (pool, id)")
    op.execute(
        "CREATE UNIQUE INDEX pool_plans_one_per_problem ON pool_plans (pool, problem_sha256) WHERE state IN "
        "('queued', 'running', 'succeeded')"
    )
    op.execute("CREATE INDEX pool_plans_undecided ON pool_plans (pool) WHERE outcome IS NULL")
    op.execute(
        "CREATE TABLE pool_instances (id TEXT NOT NULL, pool TEXT NOT NULL, tenant_id TEXT NOT NULL, plan_id "
        "TEXT, place TEXT NOT NULL, mode TEXT NOT NULL, partition TEXT, request_class TEXT, terms JSONB NOT NULL, "
        "state TEXT NOT NULL, job_id TEXT, url TEXT, reason TEXT, detail TEXT, created_at TIMESTAMPTZ DEFAULT "
        "now() NOT NULL, ready_at TIMESTAMPTZ, silent_since TIMESTAMPTZ, draining_at TIMESTAMPTZ, stopping_at "
        "TIMESTAMPTZ, ended_at TIMESTAMPTZ, PRIMARY KEY (id), CONSTRAINT pool_instances_state CHECK (state IN "
        "('wanted', 'starting', 'ready', 'draining', 'stopping', 'ended')))"
    )
    op.execute("CREATE INDEX pool_instances_by_pool ON pool_instances (pool, id)")
    op.execute("CREATE INDEX pool_instances_live ON pool_instances (pool) WHERE state <> 'ended'")


def downgrade() -> None:
    for table in ("pool_instances", "pool_plans", "pool_traffic", "pools"):
        op.execute(f"DROP TABLE {table}")
