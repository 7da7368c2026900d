"""Limit what keys may ask of models, and count what they use."""

from alembic import op

revision = "0064"
down_revision = "0063"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE api_keys ADD COLUMN limits JSONB NOT NULL DEFAULT '{}'")
    op.execute("ALTER TABLE api_keys ADD COLUMN used JSONB")
    op.execute("ALTER TABLE api_keys ADD COLUMN replaced TEXT[] NOT NULL DEFAULT '{}'")
    op.execute("CREATE INDEX request_usages_by_key ON request_usages (key_id, start_at)")
    op.execute(
        """
        CREATE VIEW key_usages AS
        SELECT key_id, start_at, model, input_tokens, output_tokens, carbon_gco2 FROM request_usages
        """
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW key_usages")
    op.execute("DROP INDEX request_usages_by_key")
    for column in ("replaced", "used", "limits"):
        op.execute(f"ALTER TABLE api_keys DROP COLUMN {column}")
