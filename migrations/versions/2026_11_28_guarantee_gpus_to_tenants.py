"""Say to schedulers how many GPUs tenants are guaranteed."""

from alembic import op

revision = "0078"
down_revision = "0077"
branch_labels = None
depends_on = None

LIMITS = """
    SELECT id AS tenant_id, (limits ->> 'max_gpus')::int AS max_gpus,
           (limits ->> 'share_weight')::float8 AS share_weight, (limits ->> 'flex')::float8 AS flex{more}
      FROM tenants
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    more = ", (limits ->> 'guaranteed_gpus')::int AS guaranteed_gpus"
    op.execute(f"CREATE OR REPLACE VIEW tenant_limits AS {LIMITS.format(more=more)}")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW tenant_limits")
    op.execute(f"CREATE VIEW tenant_limits AS {LIMITS.format(more='')}")
