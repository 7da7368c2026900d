"""Power nodes down and up."""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE node_power (node_id TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'on', "
        "since TIMESTAMPTZ NOT NULL DEFAULT now(), pinned BOOLEAN NOT NULL DEFAULT false, "
        "reason TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT '', attempts INTEGER NOT NULL DEFAULT 0, "
        "acted_at TIMESTAMPTZ, done_at TIMESTAMPTZ, next_attempt_at TIMESTAMPTZ, off_at TIMESTAMPTZ, "
        "stays_on_until TIMESTAMPTZ, CONSTRAINT node_power_state "
        "CHECK (state IN ('on', 'going_down', 'off', 'waking', 'failed')))"
    )
    op.execute(
        "CREATE TABLE node_power_periods (id BIGSERIAL PRIMARY KEY, node_id TEXT NOT NULL, state TEXT NOT NULL, "
        "start_at TIMESTAMPTZ NOT NULL, end_at TIMESTAMPTZ NOT NULL, power_w FLOAT NOT NULL, "
        "CONSTRAINT node_power_periods_state CHECK (state IN ('off', 'waking')))"
    )
    op.execute("CREATE INDEX node_power_periods_by_node ON node_power_periods (node_id, id)")


def downgrade() -> None:
    op.execute("DROP TABLE node_power_periods")
    op.execute("DROP TABLE node_power")
