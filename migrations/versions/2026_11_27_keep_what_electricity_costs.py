"""Keep what electricity costs, by zone and hour."""

from alembic import op

revision = "0070"
down_revision = "0069"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(
        """
        CREATE TABLE carbon_prices (
            start_at TIMESTAMP WITH TIME ZONE NOT NULL,
            zone TEXT NOT NULL,
            currency TEXT NOT NULL,
            per_kwh NUMERIC NOT NULL,
            demand_per_kw_month NUMERIC NOT NULL,
            fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
            PRIMARY KEY (start_at, zone)
        )
        """
    )
    op.execute(
        """
        CREATE VIEW hourly_prices AS
        SELECT zone, start_at AS hour, currency, per_kwh, demand_per_kw_month FROM carbon_prices
         WHERE currency = (SELECT p.currency FROM carbon_prices p ORDER BY p.start_at DESC, p.zone LIMIT 1)
        """
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("DROP VIEW hourly_prices")
    op.execute("DROP TABLE carbon_prices")
