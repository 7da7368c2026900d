"""Say of live gangs since when they are to stop, in the view that neighbours read.

The column comes last: who knows the view without it reads as before.
"""

from alembic import op

revision = "0063"
down_revision = "0062"
branch_labels = None
depends_on = None

VIEW = """
    SELECT id, job_id, generation, state, gpus, shares, shares -> 0 ->> 'node_id' AS leader, master_port, batch_size,
           running_at, power_limit_w, clock_mhz{more}
      FROM allocations WHERE state <> 'ended'
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(f"CREATE OR REPLACE VIEW live_gangs AS {VIEW.format(more=', stop_requested_at')}")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW live_gangs")
    op.execute(f"CREATE VIEW live_gangs AS {VIEW.format(more='')}")
