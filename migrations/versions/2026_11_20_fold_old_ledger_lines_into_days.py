"""Fold old ledger lines into one line per day, node and owner."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

STATEMENTS = [
    """
    CREATE TABLE energy_days (
        day TIMESTAMP WITH TIME ZONE NOT NULL,
        node_id TEXT NOT NULL,
        owner TEXT NOT NULL,
        zone TEXT NOT NULL,
        signal TEXT NOT NULL,
        pue FLOAT NOT NULL,
        job_id TEXT,
        start_at TIMESTAMP WITH TIME ZONE NOT NULL,
        end_at TIMESTAMP WITH TIME ZONE NOT NULL,
        energy_j FLOAT NOT NULL,
        gpu_energy_j FLOAT NOT NULL,
        estimated_energy_j FLOAT NOT NULL,
        carbon_gco2 FLOAT NOT NULL,
        gpu_s FLOAT NOT NULL,
        estimated BOOLEAN NOT NULL,
        PRIMARY KEY (day, node_id, owner, zone, signal, pue)
    )
    """,
    "CREATE INDEX energy_days_by_job ON energy_days (job_id, start_at)",
    """
    CREATE TABLE metered_days (
        day TIMESTAMP WITH TIME ZONE NOT NULL,
        node_id TEXT NOT NULL,
        metered_gpu_energy_j FLOAT NOT NULL,
        PRIMARY KEY (day, node_id)
    )
    """,
    """
    CREATE TABLE folded_intervals (
        node_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        through_sequence BIGINT NOT NULL,
        PRIMARY KEY (node_id, boot_id)
    )
    """,
]


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    for table in ("folded_intervals", "metered_days", "energy_days"):
        op.execute(f"DROP TABLE {table}")
