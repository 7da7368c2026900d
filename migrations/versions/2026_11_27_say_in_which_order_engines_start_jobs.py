"""Say in which order engines start jobs, where their sites ask for that."""

from alembic import op

revision = "0072"
down_revision = "0071"
branch_labels = None
depends_on = None

COLUMNS = "name, kind, version, places, mode, queues, problem, reported_at"
REVOKED = "EXISTS (SELECT FROM node_credentials k WHERE k.node_id = name AND k.revoked_at IS NOT NULL) AS revoked"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE engine_jobs ADD COLUMN rank INTEGER")
    op.execute("ALTER TABLE engines ADD COLUMN orders BOOLEAN NOT NULL DEFAULT false")
    op.execute(f"CREATE OR REPLACE VIEW known_engines AS SELECT {COLUMNS}, {REVOKED}, orders FROM engines")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW known_engines")
    op.execute(f"CREATE VIEW known_engines AS SELECT {COLUMNS}, {REVOKED} FROM engines")
    op.execute("ALTER TABLE engines DROP COLUMN orders")
    op.execute("ALTER TABLE engine_jobs DROP COLUMN rank")
