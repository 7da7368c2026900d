"""Sum the ledger by hour: exact sums of its lines, kept by triggers in the transaction of whatever changes a line.

Each amount is the sum of the lines' numbers as they are written in decimals. ``length_s`` and ``intensity_s``, the
intensity times the length, count each interval of a node once; ``guessed_gco2`` was priced by an intensity that was
estimated or forecast. Hours in which no line is left have no row.
"""

from alembic import op

revision = "0055"
down_revision = "0054"
branch_labels = None
depends_on = None

KEY = "hour, node_id, job_id, zone, signal"
AMOUNTS = (
    *("energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s", "facility_energy_j", "estimated_gco2"),
    *("guessed_gco2", "length_s", "intensity_s"),
)

TABLE = f"""
    CREATE TABLE energy_hours (
        hour TIMESTAMP WITH TIME ZONE NOT NULL,
        node_id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        zone TEXT NOT NULL,
        signal TEXT NOT NULL,
        lines BIGINT NOT NULL,
        {", ".join(f"{name} NUMERIC NOT NULL" for name in AMOUNTS)},
        PRIMARY KEY ({KEY})
    ) WITH (fillfactor = 70)
"""

FOLLOWING = """
    energy_j * pue AS facility_energy_j, CASE WHEN estimated THEN carbon_gco2
        ELSE coalesce(carbon_gco2 * estimated_energy_j / nullif(energy_j, 0), 0) END AS estimated_gco2
"""

LINES = """
    SELECT node_id, job_id, start_at, zone, signal, pue, gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j,
        gpu_energy_j, CASE WHEN source IN ('counter', 'sampled') THEN 0 ELSE gpu_energy_j END
            + CASE WHEN cpu_source IN ('counter', 'sampled') THEN 0 ELSE cpu_energy_j END
            + static_energy_j AS estimated_energy_j,
        carbon_gco2, gpus * greatest(0, extract(epoch FROM end_at - start_at)::float8) AS gpu_s,
        intensity_estimated OR source NOT IN ('counter', 'sampled') AS estimated, intensity_gco2_per_kwh,
        CASE WHEN intensity_estimated THEN carbon_gco2 ELSE 0 END AS guessed_gco2,
        CASE WHEN NOT starts_with(boot_id, 'returned:')
                AND row_number() OVER (PARTITION BY node_id, boot_id, sequence ORDER BY owner) = 1
            THEN extract(epoch FROM end_at - start_at)::float8 ELSE 0 END AS length_s
    FROM {rows}
"""

DAYS = """
    SELECT node_id, job_id, start_at, zone, signal, pue, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s,
        estimated, CASE WHEN estimated THEN carbon_gco2 ELSE 0 END AS guessed_gco2,
        0 AS intensity_gco2_per_kwh, 0 AS length_s
    FROM {rows}
"""

ADD = f"""
    INSERT INTO energy_hours AS known ({KEY}, lines, {", ".join(AMOUNTS)})
    SELECT date_trunc('hour', start_at, 'UTC'), node_id, coalesce(job_id, ''), zone, signal, {{sign}} * count(*),
        {", ".join(f"{{sign}} * sum({name}::text::numeric)" for name in AMOUNTS[:-1])},
        {{sign}} * sum(intensity_gco2_per_kwh::numeric * length_s::numeric)
    FROM (SELECT *, {FOLLOWING} FROM ({{lines}}) AS l) AS l GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
    ON CONFLICT ({KEY}) DO UPDATE SET lines = known.lines + excluded.lines,
        {", ".join(f"{name} = known.{name} + excluded.{name}" for name in AMOUNTS)}
"""

TAKE = """
    DELETE FROM energy_hours h USING (
        SELECT DISTINCT date_trunc('hour', start_at, 'UTC') AS hour, node_id FROM gone
    ) AS g WHERE (h.hour, h.node_id) = (g.hour, g.node_id) AND h.lines = 0
"""


def function(name: str, lines: str) -> str:
    """Return a trigger function that keeps the sums as lines are added, changed and taken."""
    return f"""
        CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SET extra_float_digits = 1 AS $$
        BEGIN
            IF TG_OP <> 'DELETE' THEN
                {ADD.format(sign="1", lines=lines.format(rows="added"))};
            END IF;
            IF TG_OP <> 'INSERT' THEN
                {ADD.format(sign="-1", lines=lines.format(rows="gone"))};
                {TAKE};
            END IF;
            RETURN NULL;
        END $$
    """


SOURCES = (("energy_usages", LINES), ("energy_days", DAYS))
CHANGES = (
    ("insert", "NEW TABLE AS added"),
    ("update", "NEW TABLE AS added OLD TABLE AS gone"),
    ("delete", "OLD TABLE AS gone"),
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("SET LOCAL extra_float_digits = 1")
    op.execute(TABLE)
    for table, lines in SOURCES:
        op.execute(function(f"{table}_in_hours", lines))
        for change, rows in CHANGES:
            op.execute(
                f"CREATE TRIGGER {table}_hours_{change} AFTER {change} ON {table} REFERENCING {rows} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_in_hours()"
            )
        op.execute(ADD.format(sign="1", lines=lines.format(rows=table)))


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for table, _ in SOURCES:
        for change, _ in CHANGES:
            op.execute(f"DROP TRIGGER {table}_hours_{change} ON {table}")
        op.execute(f"DROP FUNCTION {table}_in_hours")
    op.execute("DROP TABLE energy_hours")
