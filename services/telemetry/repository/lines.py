"""The ledger as one table: raw lines, and the daily sums of older ones."""

_FOLLOWING = """
    energy_j * pue AS facility_energy_j, CASE WHEN estimated THEN carbon_gco2
        ELSE coalesce(carbon_gco2 * estimated_energy_j / nullif(energy_j, 0), 0) END AS estimated_gco2
"""

FIGURES_OF_LINES = f"""
    SELECT *, {_FOLLOWING} FROM (
        SELECT node_id, owner, job_id, start_at, end_at, zone, signal, intensity_gco2_per_kwh, pue,
            gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j, gpu_energy_j,
            CASE WHEN source IN ('counter', 'sampled') THEN 0 ELSE gpu_energy_j END
                + CASE WHEN cpu_source IN ('counter', 'sampled') THEN 0 ELSE cpu_energy_j END
                + static_energy_j AS estimated_energy_j,
            carbon_gco2,
            gpus * greatest(0, date_part('epoch', end_at - start_at)) AS gpu_s,
            intensity_estimated OR source NOT IN ('counter', 'sampled') AS estimated,
            CASE WHEN intensity_estimated THEN carbon_gco2 ELSE 0 END AS guessed_gco2 {{more}}
        FROM {{raw}}
    ) AS lines
"""
"""Rows of ``energy_usages`` as the figures that reports sum, with ``more`` columns; static watts are configured, never
measured."""

RAW_LINES = FIGURES_OF_LINES.replace("{more}", "")

FIGURES_OF_DAYS = f"""
    SELECT *, {_FOLLOWING} FROM (
        SELECT node_id, owner, job_id, start_at, end_at, zone, signal,
            coalesce(carbon_gco2 / nullif(energy_j / 3.6e6 * pue, 0), 0) AS intensity_gco2_per_kwh, pue,
            energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s, estimated,
            CASE WHEN estimated THEN carbon_gco2 ELSE 0 END AS guessed_gco2 {{more}}
        FROM energy_days
    ) AS days
"""
"""Rows of ``energy_days`` in the same columns; the intensity is the mean over the line."""

DAY_LINES = FIGURES_OF_DAYS.replace("{more}", "")

GANG_END = "CASE WHEN r.ended_at < r.started_at THEN a.ended_at ELSE coalesce(r.ended_at, a.ended_at) END"
"""When the gang ``a`` ended on the node whose last report is ``r``: by the node's own clock, as its lines are, if the
node has said, and not that it ended before it began, as one does whose clock was set back; else when it was given up.
NULL while it lives."""

GANG_BEGIN = "CASE WHEN r.started_at IS NOT NULL THEN least(r.started_at, a.started_at) END"
"""When the gang ``a`` was there on the node at the earliest, by the clock of the node or of the database, whichever is
behind; NULL where the node never said that it ran."""

KNOWN_LATE_S = 10.0
"""An agent learns of an end at its next look, a second later, or some on a busy node: an interval may begin meanwhile.
As much, the clocks of a node and of the database are taken to be apart."""
_KNOWN_LATE = f"interval '{KNOWN_LATE_S} seconds'"

RETURNED = "returned:"
"""Begins the life, in place of an agent's run, of lines that give back to idle what ``corrections`` found."""

_STANDING = f"""NOT starts_with(u.boot_id, '{RETURNED}') AND NOT EXISTS (
            SELECT FROM energy_usages c WHERE c.node_id = u.node_id AND c.sequence = u.sequence AND c.owner = u.owner
                AND c.boot_id = '{RETURNED}' || u.owner || ':' || u.boot_id)"""
"""The line ``u`` is no correction, and was not corrected."""

LATE_LINES = f"""
    SELECT u.*, a.id AS allocation, {GANG_END} AS gang_end, u.start_at AS out_from, 1.0::float8 AS out_share
    FROM gangs a
    CROSS JOIN LATERAL (SELECT min(ended_at) AS first_at FROM rank_statuses r WHERE r.allocation_id = a.id) AS ends
    JOIN energy_usages u ON u.owner = a.id AND u.job_id = a.job_id AND u.start_at >= least(ends.first_at, a.ended_at)
    LEFT JOIN rank_statuses r ON r.allocation_id = a.id AND r.node_id = u.node_id
    WHERE u.start_at >= {GANG_END} AND {_STANDING}
        AND NOT EXISTS (
            SELECT FROM energy_usages n WHERE n.job_id = u.job_id AND n.owner = u.owner AND n.node_id = u.node_id
                AND n.boot_id = u.boot_id AND n.sequence > u.sequence AND n.start_at < {GANG_END})
    UNION ALL
    SELECT u.*, a.id, {GANG_END}, {GANG_END},
        CASE WHEN u.source = 'modelled' OR EXISTS (SELECT FROM nodes m WHERE m.id = u.node_id AND m.measures_only)
            THEN 0.0 ELSE extract(epoch FROM u.end_at - {GANG_END}) / extract(epoch FROM u.end_at - u.start_at) END
    FROM gangs a CROSS JOIN jsonb_to_recordset(a.shares) AS s (node_id text)
    LEFT JOIN rank_statuses r ON r.allocation_id = a.id AND r.node_id = s.node_id
    CROSS JOIN LATERAL (
        SELECT * FROM energy_usages l WHERE l.job_id = a.job_id AND l.owner = a.id AND l.node_id = s.node_id
            AND l.start_at < {GANG_END} AND NOT starts_with(l.boot_id, '{RETURNED}')
        ORDER BY l.start_at DESC LIMIT 1
    ) AS u
    WHERE u.end_at > {GANG_END} + {_KNOWN_LATE} AND {_STANDING}
"""
"""Lines of jobs that go on after their gang's end and were not given back, with the moment from which on and the share
of the energy which is not the job's: those that begin after the end, and the last before it where that goes on for
longer than an agent takes to know. What an agent models over an absence, or measures for an engine, it has shared out
by time itself, so that only the time is too long. What was measured while a clock was ahead is not late: lines that
follow begin before the end."""

EARLY_LINES = f"""
    SELECT u.*, a.id AS allocation, {GANG_BEGIN} AS gang_begin, u.start_at AS out_from, 1.0::float8 AS out_share
    FROM gangs a JOIN rank_statuses r ON r.allocation_id = a.id AND r.started_at IS NOT NULL
    JOIN energy_usages u ON u.owner = a.id AND u.job_id = a.job_id AND u.node_id = r.node_id
        AND u.start_at < {GANG_BEGIN} - {_KNOWN_LATE}
    WHERE u.end_at < {GANG_BEGIN} - {_KNOWN_LATE} AND {_STANDING}
"""
"""Lines of jobs that end before their gang was there, and were not given back."""

LATE_DAYS = f"""
    SELECT d.*, a.id AS allocation, {GANG_END} AS gang_end
    FROM (
        SELECT day, node_id, owner, zone, signal, pue, job_id, min(start_at) AS start_at, max(end_at) AS end_at,
            sum(energy_j) AS energy_j, sum(gpu_energy_j) AS gpu_energy_j, sum(estimated_energy_j) AS estimated_energy_j,
            sum(carbon_gco2) AS carbon_gco2, sum(gpu_s) AS gpu_s, bool_or(estimated) AS estimated
        FROM energy_days GROUP BY day, node_id, owner, zone, signal, pue, job_id
        HAVING abs(sum(energy_j)) > 1e-9 * sum(abs(energy_j)) OR abs(sum(gpu_s)) > 1e-9 * sum(abs(gpu_s))
    ) d JOIN gangs a ON a.id = d.owner AND a.job_id = d.job_id
    LEFT JOIN rank_statuses r ON r.allocation_id = a.id AND r.node_id = d.node_id
    WHERE d.start_at >= {GANG_END}
"""
"""Daily sums of jobs that begin after their gang's end, less what was given back. What of the day of the end came later
is not known any more."""

LEDGER = f"""
ledger AS (
    {RAW_LINES.format(raw="energy_usages")}
    UNION ALL
    {DAY_LINES}
)
"""
"""A common table expression: energies in joules, ``intensity_gco2_per_kwh`` the mean over the line."""

METERED = """
metered AS (
    SELECT node_id, start_at, metered_gpu_energy_j FROM energy_intervals
    UNION ALL
    SELECT node_id, day, metered_gpu_energy_j FROM metered_days
)
"""
"""A common table expression: energy by the devices' own counters, joules."""

WHOLE_HOURS = "($1::timestamptz IS NULL OR hour >= $1) AND ($2::timestamptz IS NULL OR hour <= $2 - interval '1 hour')"
"""The hours that lie wholly in a period."""

PART_HOURS = """
    start_at >= $1 AND start_at < least($2, date_trunc('hour', $1 - interval '1 us', 'UTC') + interval '1 hour')
        OR start_at < $2 AND start_at >= greatest($1, date_trunc('hour', $2, 'UTC'))
"""
"""The lines of a period that begin in none of them."""

_SUMMED = (
    "energy_j",
    "gpu_energy_j",
    "estimated_energy_j",
    "carbon_gco2",
    "gpu_s",
    "facility_energy_j",
    "estimated_gco2",
    "guessed_gco2",
)

SUMS = f"""
sums AS (
    SELECT hour AS start_at, node_id, nullif(job_id, '') AS job_id, zone, signal, {", ".join(_SUMMED)}
    FROM energy_hours
    WHERE {WHOLE_HOURS}
    UNION ALL
    SELECT start_at, node_id, job_id, zone, signal, {", ".join(f"{name}::text::numeric" for name in _SUMMED)}
    FROM ({RAW_LINES} UNION ALL {DAY_LINES}) l
    WHERE {PART_HOURS}
    UNION ALL
    SELECT hour, node_id, job_id, zone, signal, {", ".join(f"{name}::text::numeric" for name in _SUMMED)}
    FROM (SELECT *, {_FOLLOWING} FROM (SELECT *, false AS estimated, 0 AS guessed_gco2 FROM cell_lines) c) l
)
""".replace("{raw}", "energy_usages")
"""A common table expression: the lines that begin from $1 until $2, either of which may be NULL, summed by hours as far
as these lie wholly between. Sums of its amounts are exact."""
