"""Send webhooks."""

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE webhooks (id TEXT PRIMARY KEY, tenant_id TEXT NOT NULL REFERENCES tenants (id), "
        "url TEXT NOT NULL, events TEXT[] NOT NULL, project TEXT, secret_revision INTEGER NOT NULL DEFAULT 1, "
        "secret_sha256 BYTEA NOT NULL, previous_secret_until TIMESTAMPTZ, "
        "created_at TIMESTAMPTZ NOT NULL DEFAULT now(), enabled_at TIMESTAMPTZ NOT NULL DEFAULT now(), "
        "disabled_at TIMESTAMPTZ, disabled_reason TEXT, failures INTEGER NOT NULL DEFAULT 0, "
        "failing_since TIMESTAMPTZ, paused_until TIMESTAMPTZ)"
    )
    op.execute("CREATE INDEX webhooks_by_tenant ON webhooks (tenant_id, id)")
    op.execute(
        "CREATE TABLE webhook_events (id BIGSERIAL PRIMARY KEY, type TEXT NOT NULL, tenant_id TEXT, project TEXT, "
        "at TIMESTAMPTZ NOT NULL DEFAULT now(), data JSONB NOT NULL)"
    )
    op.execute(
        "CREATE TABLE webhook_position (id INTEGER PRIMARY KEY CONSTRAINT webhook_position_one_row CHECK (id = 1), "
        "transaction_id BIGINT NOT NULL, sequence BIGINT NOT NULL)"
    )
    op.execute("INSERT INTO webhook_position (id, transaction_id, sequence) VALUES (1, 0, 0)")
    op.execute(
        "CREATE TABLE webhook_deliveries (id TEXT PRIMARY KEY, "
        "webhook_id TEXT NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE, type TEXT NOT NULL, body TEXT NOT NULL, "
        "state TEXT NOT NULL DEFAULT 'pending', created_at TIMESTAMPTZ NOT NULL DEFAULT now(), "
        "attempts INTEGER NOT NULL DEFAULT 0, attempted_at TIMESTAMPTZ, next_attempt_at TIMESTAMPTZ DEFAULT now(), "
        "ended_at TIMESTAMPTZ, status INTEGER, error TEXT)"
    )
    op.execute(
        "CREATE INDEX webhook_deliveries_due ON webhook_deliveries (webhook_id, next_attempt_at) "
        "WHERE state = 'pending'"
    )
    op.execute("CREATE INDEX webhook_deliveries_by_webhook ON webhook_deliveries (webhook_id, id)")
    op.execute("CREATE INDEX webhook_deliveries_ended ON webhook_deliveries (ended_at)")


def downgrade() -> None:
    op.execute("DROP TABLE webhook_deliveries, webhook_position, webhook_events, webhooks")
