"""Measure configurations of fleets."""

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

STATES = "'solving', 'proposed', 'carrying_out', 'applied', 'failed', 'superseded'"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("ALTER TABLE fleet_plans ADD COLUMN search JSONB")
    op.execute("ALTER TABLE app_observations ADD COLUMN waiting INTEGER NOT NULL DEFAULT 0")
    _allow(f"{STATES}, 'measuring'", "'solving', 'measuring', 'carrying_out'")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.execute("UPDATE fleet_plans SET state = 'superseded', ended_at = now() WHERE state = 'measuring'")
    _allow(STATES, "'solving', 'carrying_out'")
    op.execute("ALTER TABLE app_observations DROP COLUMN waiting")
    op.execute("ALTER TABLE fleet_plans DROP COLUMN search")


def _allow(states: str, active: str) -> None:
    op.execute("ALTER TABLE fleet_plans DROP CONSTRAINT fleet_plans_state")
    op.execute(f"ALTER TABLE fleet_plans ADD CONSTRAINT fleet_plans_state CHECK (state IN ({states}))")
    op.execute("DROP INDEX fleet_plans_one_at_a_time")
    op.execute(f"CREATE UNIQUE INDEX fleet_plans_one_at_a_time ON fleet_plans (fleet) WHERE state IN ({active})")
