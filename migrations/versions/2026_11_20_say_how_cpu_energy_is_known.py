"""Say on every ledger line how its CPU energy is known."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE energy_usages ADD COLUMN cpu_source TEXT DEFAULT 'modelled' NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE energy_usages DROP COLUMN cpu_source")
