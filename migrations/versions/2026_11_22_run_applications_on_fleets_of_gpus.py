"""Run applications on fleets of GPUs."""

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """CREATE TABLE fleets (
            name TEXT PRIMARY KEY,
            tenant_id TEXT NOT NULL,
            key_id TEXT NOT NULL,
            spec JSONB NOT NULL,
            revision INTEGER NOT NULL DEFAULT 1,
            assignment JSONB NOT NULL DEFAULT '[]',
            only_proposes TEXT,
            failures INTEGER NOT NULL DEFAULT 0,
            retry_at TIMESTAMPTZ,
            deleted_at TIMESTAMPTZ,
            created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            updated_at TIMESTAMPTZ NOT NULL DEFAULT now()
        )"""
    )
    op.execute(
        """CREATE TABLE apps (
            name TEXT PRIMARY KEY,
            tenant_id TEXT NOT NULL,
            key_id TEXT NOT NULL,
            fleet TEXT NOT NULL,
            spec JSONB NOT NULL,
            revision INTEGER NOT NULL DEFAULT 1,
            planned_revision INTEGER NOT NULL DEFAULT 0,
            plan_id TEXT,
            target JSONB NOT NULL DEFAULT '{"wanted": [], "leave": []}',
            deleted_at TIMESTAMPTZ,
            created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            updated_at TIMESTAMPTZ NOT NULL DEFAULT now()
        )"""
    )
    op.execute("CREATE INDEX apps_by_fleet ON apps (fleet)")
    op.execute(
        """CREATE TABLE fleet_plans (
            id TEXT PRIMARY KEY,
            fleet TEXT NOT NULL,
            trigger TEXT NOT NULL,
            state TEXT NOT NULL,
            detail TEXT,
            gco2_per_kwh DOUBLE PRECISION NOT NULL,
            basis JSONB NOT NULL,
            problem JSONB,
            result JSONB,
            progress JSONB,
            made_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            ended_at TIMESTAMPTZ,
            CONSTRAINT fleet_plans_state CHECK (
                state IN ('solving', 'proposed', 'carrying_out', 'applied', 'failed', 'superseded')
            )
        )"""
    )
    op.execute("CREATE INDEX fleet_plans_by_fleet ON fleet_plans (fleet, id)")
    op.execute(
        "CREATE UNIQUE INDEX fleet_plans_one_at_a_time ON fleet_plans (fleet) "
        "WHERE state IN ('solving', 'carrying_out')"
    )
    op.execute(
        """CREATE TABLE app_observations (
            app TEXT NOT NULL,
            start_at TIMESTAMPTZ NOT NULL,
            router TEXT NOT NULL,
            arrivals INTEGER NOT NULL,
            answered INTEGER NOT NULL,
            failed INTEGER NOT NULL,
            latency JSONB NOT NULL,
            variants JSONB NOT NULL,
            servers JSONB NOT NULL,
            accuracy_sum DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (app, start_at, router)
        )"""
    )
    op.execute("CREATE INDEX app_observations_by_time ON app_observations (start_at)")


def downgrade() -> None:
    op.execute("DROP TABLE app_observations, fleet_plans, apps, fleets")
