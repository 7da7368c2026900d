"""Keep uploads of tenants, in chunks."""

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE uploads (tenant_id TEXT NOT NULL REFERENCES tenants (id), sha256 TEXT NOT NULL, "
        "size_bytes BIGINT NOT NULL, is_complete BOOLEAN NOT NULL DEFAULT false, "
        "created_at TIMESTAMPTZ NOT NULL DEFAULT now(), used_at TIMESTAMPTZ NOT NULL DEFAULT now(), "
        "PRIMARY KEY (tenant_id, sha256))"
    )
    op.execute(
        "CREATE TABLE upload_chunks (tenant_id TEXT NOT NULL, sha256 TEXT NOT NULL, number INTEGER NOT NULL, "
        "data BYTEA NOT NULL, PRIMARY KEY (tenant_id, sha256, number), "
        "FOREIGN KEY (tenant_id, sha256) REFERENCES uploads (tenant_id, sha256) ON DELETE CASCADE)"
    )
    op.execute("ALTER TABLE upload_chunks ALTER COLUMN data SET STORAGE EXTERNAL")  # it is compressed already


def downgrade() -> None:
    op.execute("DROP TABLE upload_chunks")
    op.execute("DROP TABLE uploads")
