"""Add carbon intensity history, forecasts and replays."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

STATEMENTS = [
    """
    CREATE TABLE carbon_points (
        zone TEXT NOT NULL,
        signal TEXT NOT NULL,
        provider TEXT NOT NULL,
        start_at TIMESTAMP WITH TIME ZONE NOT NULL,
        end_at TIMESTAMP WITH TIME ZONE NOT NULL,
        gco2_per_kwh FLOAT NOT NULL,
        is_estimated BOOLEAN NOT NULL,
        fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (zone, signal, provider, start_at)
    )
    """,
    """
    CREATE TABLE carbon_forecasts (
        zone TEXT NOT NULL,
        signal TEXT NOT NULL,
        provider TEXT NOT NULL,
        generated_at TIMESTAMP WITH TIME ZONE NOT NULL,
        fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
        points JSONB NOT NULL,
        PRIMARY KEY (zone, signal, provider, generated_at)
    )
    """,
    """
    CREATE TABLE carbon_replays (
        name TEXT NOT NULL,
        real_at TIMESTAMP WITH TIME ZONE NOT NULL,
        grid_at TIMESTAMP WITH TIME ZONE NOT NULL,
        speed FLOAT NOT NULL,
        requested_start_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (name)
    )
    """,
]


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    for table in ("carbon_replays", "carbon_forecasts", "carbon_points"):
        op.execute(f"DROP TABLE {table}")
