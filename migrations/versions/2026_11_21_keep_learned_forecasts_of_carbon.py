"""Keep learned forecasts of carbon intensity, and the backtests behind them."""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE TABLE carbon_learned_forecasts (zone TEXT NOT NULL, signal TEXT NOT NULL, provider TEXT NOT NULL, "
        "generated_at TIMESTAMPTZ NOT NULL, method TEXT NOT NULL, note TEXT NOT NULL, points JSONB NOT NULL, "
        "backtest JSONB, PRIMARY KEY (zone, signal, provider, generated_at))"
    )


def downgrade() -> None:
    op.execute("DROP TABLE carbon_learned_forecasts")
