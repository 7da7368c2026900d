"""Take orders of the grid, and say of gangs what they drew before one set their devices."""

from alembic import op

revision = "0066"
down_revision = "0065"
branch_labels = None
depends_on = None

LIMITS = """
    SELECT id AS tenant_id, (limits ->> 'max_gpus')::int AS max_gpus,
           (limits ->> 'share_weight')::float8 AS share_weight{more}
      FROM tenants
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE TABLE grid_orders (
            id TEXT NOT NULL,
            key_id TEXT NOT NULL,
            source TEXT NOT NULL,
            idempotency_key TEXT,
            body_sha256 BYTEA NOT NULL,
            name TEXT NOT NULL,
            zone TEXT,
            announced_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
            start_at TIMESTAMP WITH TIME ZONE NOT NULL,
            end_at TIMESTAMP WITH TIME ZONE NOT NULL,
            notice_s FLOAT NOT NULL,
            steps JSONB NOT NULL,
            baseline_w FLOAT,
            baseline_at TIMESTAMP WITH TIME ZONE,
            withdrawn_at TIMESTAMP WITH TIME ZONE,
            revision INTEGER DEFAULT 1 NOT NULL,
            past JSONB DEFAULT '[]' NOT NULL,
            PRIMARY KEY (id)
        )
        """
    )
    op.execute("CREATE UNIQUE INDEX grid_orders_keyed ON grid_orders (key_id, idempotency_key)")
    op.execute("CREATE INDEX grid_orders_by_end ON grid_orders (end_at)")
    op.execute("ALTER TABLE allocations ADD COLUMN unordered_w FLOAT")
    more = ", (limits ->> 'flex')::float8 AS flex"
    op.execute(f"CREATE OR REPLACE VIEW tenant_limits AS {LIMITS.format(more=more)}")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW tenant_limits")
    op.execute(f"CREATE VIEW tenant_limits AS {LIMITS.format(more='')}")
    op.execute("ALTER TABLE allocations DROP COLUMN unordered_w")
    op.execute("DROP TABLE grid_orders")
