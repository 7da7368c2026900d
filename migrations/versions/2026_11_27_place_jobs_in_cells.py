"""Place jobs in other installations, the cells of this one."""

from alembic import op

revision = "0075"
down_revision = "0074"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE cells (
    name TEXT NOT NULL,
    url TEXT NOT NULL,
    key BYTEA NOT NULL,
    home TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    project TEXT,
    draining BOOLEAN DEFAULT false NOT NULL,
    added_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    heard_at TIMESTAMP WITH TIME ZONE,
    problem TEXT,
    PRIMARY KEY (name)
);
CREATE TABLE cell_jobs (
    job_id TEXT NOT NULL,
    cell TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    moves INTEGER DEFAULT 0 NOT NULL,
    state TEXT NOT NULL,
    body TEXT NOT NULL,
    remote_id TEXT,
    doubt_until TIMESTAMP WITH TIME ZONE,
    seen JSONB DEFAULT '{}' NOT NULL,
    zone TEXT DEFAULT '' NOT NULL,
    signal TEXT DEFAULT '' NOT NULL,
    pue FLOAT DEFAULT 1 NOT NULL,
    PRIMARY KEY (job_id),
    CONSTRAINT cell_jobs_state CHECK (state IN ('sending', 'there', 'leaving', 'over'))
);
CREATE INDEX cell_jobs_live ON cell_jobs (cell) WHERE state <> 'over';
CREATE TABLE cell_energy (
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    cell TEXT NOT NULL,
    hour TIMESTAMP WITH TIME ZONE NOT NULL,
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    pue FLOAT NOT NULL,
    energy_j FLOAT NOT NULL,
    gpu_energy_j FLOAT NOT NULL,
    estimated_energy_j FLOAT NOT NULL,
    carbon_gco2 FLOAT NOT NULL,
    gpu_s FLOAT NOT NULL,
    PRIMARY KEY (job_id, attempt, hour)
);
CREATE INDEX cell_energy_by_hour ON cell_energy (hour);
ALTER TABLE jobs ADD COLUMN cell TEXT;
CREATE INDEX jobs_to_place ON jobs (id) WHERE cell = '' AND state = 'queued';
CREATE INDEX jobs_roaming ON jobs (id) WHERE cell IS NULL AND state = 'queued' AND spec ? 'cells'
"""

BOOKED = """
CREATE OR REPLACE VIEW booked_energy AS
SELECT node_id, job_id, start_at, zone, signal, gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j,
       (gpu_energy_j + cpu_energy_j + static_energy_j) * pue AS facility_energy_j, carbon_gco2,
       gpus * greatest(0, extract(epoch FROM end_at - start_at)::float8) AS gpu_s
  FROM energy_usages
UNION ALL
SELECT node_id, job_id, start_at, zone, signal, energy_j, energy_j * pue, carbon_gco2, gpu_s FROM energy_days
"""

OF_CELLS = """
UNION ALL
SELECT 'cell:' || cell, job_id, hour, zone, signal, energy_j, energy_j * pue, carbon_gco2, gpu_s FROM cell_energy
"""

LINES = """
CREATE VIEW cell_lines AS
SELECT 'cell:' || cell AS node_id, job_id, hour, zone, signal, pue, energy_j, gpu_energy_j, estimated_energy_j,
       carbon_gco2, gpu_s
  FROM cell_energy
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for statement in (*TABLES.split(";"), LINES, BOOKED + OF_CELLS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(BOOKED)
    op.execute("DROP VIEW cell_lines")
    op.execute("DROP INDEX jobs_roaming")
    op.execute("DROP INDEX jobs_to_place")
    op.execute("ALTER TABLE jobs DROP COLUMN cell")
    for table in ("cell_energy", "cell_jobs", "cells"):
        op.execute(f"DROP TABLE {table}")
