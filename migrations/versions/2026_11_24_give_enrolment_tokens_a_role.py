"""Give tokens to enrol with a role, and credentials the role that they were given for; NULL is either, as before."""

from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE node_enrolments ADD COLUMN role TEXT")
    op.execute("ALTER TABLE node_credentials ADD COLUMN role TEXT")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE node_credentials DROP COLUMN role")
    op.execute("ALTER TABLE node_enrolments DROP COLUMN role")
