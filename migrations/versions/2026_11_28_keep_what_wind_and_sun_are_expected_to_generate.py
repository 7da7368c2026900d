"""Keep what wind and sun are expected to generate: day-ahead forecasts of providers, by the hour."""

from alembic import op

revision = "0076"
down_revision = "0075"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE TABLE carbon_expected (
            zone TEXT NOT NULL,
            provider TEXT NOT NULL,
            start_at TIMESTAMP WITH TIME ZONE NOT NULL,
            power_mw JSONB NOT NULL,
            fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
            PRIMARY KEY (zone, provider, start_at)
        )
        """
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP TABLE carbon_expected")
