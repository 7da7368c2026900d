"""Say which engines' bridges were revoked, so that lists leave them out."""

from alembic import op

revision = "0069"
down_revision = "0068"
branch_labels = None
depends_on = None

COLUMNS = "name, kind, version, places, mode, queues, problem, reported_at"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        f"""
        CREATE OR REPLACE VIEW known_engines AS
        SELECT {COLUMNS},
               EXISTS (SELECT FROM node_credentials k WHERE k.node_id = name AND k.revoked_at IS NOT NULL) AS revoked
          FROM engines
        """
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW known_engines")
    op.execute(f"CREATE VIEW known_engines AS SELECT {COLUMNS} FROM engines")
