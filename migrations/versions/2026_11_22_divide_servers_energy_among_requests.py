"""Divide servers' energy among requests."""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """CREATE TABLE request_usages (
            router TEXT NOT NULL,
            start_at TIMESTAMPTZ NOT NULL,
            job_id TEXT NOT NULL,
            tenant_id TEXT NOT NULL,
            key_id TEXT NOT NULL,
            model TEXT NOT NULL,
            request_class TEXT NOT NULL,
            requests BIGINT NOT NULL,
            input_tokens BIGINT NOT NULL,
            output_tokens BIGINT NOT NULL,
            share_s DOUBLE PRECISION NOT NULL,
            energy_j DOUBLE PRECISION NOT NULL,
            carbon_gco2 DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (router, start_at, job_id, tenant_id, key_id, model, request_class)
        )"""
    )
    op.execute("CREATE INDEX request_usages_by_time ON request_usages (start_at)")


def downgrade() -> None:
    op.execute("DROP TABLE request_usages")
