"""Give each node a credential of its own, and one-time tokens to enrol with."""

from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE node_credentials (
            node_id TEXT PRIMARY KEY,
            credential_sha256 BYTEA NOT NULL,
            redis_sha256 TEXT NOT NULL,
            enrolment BYTEA NOT NULL,
            next_credential_sha256 BYTEA,
            next_redis_sha256 TEXT,
            next_enrolment BYTEA,
            enrolled_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            rotated_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            revoked_at TIMESTAMPTZ
        )
    """)
    op.execute("""
        CREATE TABLE node_enrolments (
            token_sha256 BYTEA PRIMARY KEY,
            node_id TEXT NOT NULL,
            created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
            expires_at TIMESTAMPTZ NOT NULL,
            used_as BYTEA
        )
    """)
    op.execute("CREATE INDEX node_enrolments_by_node ON node_enrolments (node_id)")


def downgrade() -> None:
    op.execute("DROP TABLE node_enrolments")
    op.execute("DROP TABLE node_credentials")
