"""Say to whoever plans pools which accuracy keys ask for, and how many requests they make."""

from alembic import op

revision = "0065"
down_revision = "0064"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE OR REPLACE VIEW key_usages AS
        SELECT key_id, start_at, model, input_tokens, output_tokens, carbon_gco2, requests FROM request_usages
        """
    )
    op.execute(
        """
        CREATE VIEW key_floors AS
        SELECT tenant_id, replaced || id AS key_ids, (limits ->> 'least_accuracy_pct')::float8 AS least_accuracy_pct,
               limits -> 'models' AS models, limits -> 'aliases' AS aliases
          FROM api_keys
         WHERE limits ->> 'least_accuracy_pct' IS NOT NULL AND revoked_at IS NULL
           AND (expires_at IS NULL OR expires_at > now())
        """
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW key_floors")
    op.execute("DROP VIEW key_usages")
    op.execute(
        """
        CREATE VIEW key_usages AS
        SELECT key_id, start_at, model, input_tokens, output_tokens, carbon_gco2 FROM request_usages
        """
    )
