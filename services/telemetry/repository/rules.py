"""The rules of the live system, each with a query for its breaches."""

from typing import NamedTuple

from services.db.database import Database
from services.telemetry.repository.lines import EARLY_LINES, KNOWN_LATE_S, LATE_DAYS, LATE_LINES, LEDGER, METERED

LEDGER_TOLERANCE = 1e-3  #: Device energy = sum over owners + idle, to within this share

ROUNDING_J = 1e-3  #: By how much sums of floats may differ in addition


class Rule(NamedTuple):
    """A rule, the query whose rows each break it, and the texts for no breach and for each breach."""

    name: str
    query: str
    holds: str
    breach: str  #: A format string for the query's columns


_LEDGER_BY_NODE = f"""
WITH {LEDGER}, {METERED}, sums AS (
    SELECT node_id, sum(metered_gpu_energy_j) AS metered_j, 0::float8 AS owners_j FROM metered GROUP BY node_id
    UNION ALL
    SELECT node_id, 0, sum(gpu_energy_j) FROM ledger GROUP BY node_id
), per_node AS (
    SELECT node_id, sum(metered_j) AS metered_j, sum(owners_j) AS owners_j FROM sums
    GROUP BY GROUPING SETS (node_id, ())
)
SELECT coalesce(node_id, 'all nodes') AS node, metered_j, owners_j FROM per_node
WHERE abs(owners_j - metered_j) > {LEDGER_TOLERANCE} * metered_j + {ROUNDING_J}
ORDER BY abs(owners_j - metered_j) DESC
"""

_FOOTPRINTS = f"""
WITH {LEDGER}, lines AS (
    SELECT job_id, sum(energy_j) AS energy_j, sum(carbon_gco2) AS carbon_gco2
    FROM ledger WHERE job_id IS NOT NULL GROUP BY job_id
)
SELECT coalesce(l.job_id, f.job_id) AS job, coalesce(l.energy_j, 0) AS lines_j, coalesce(f.energy_j, 0) AS sum_j
FROM lines l FULL JOIN job_footprints f ON f.job_id = l.job_id
WHERE abs(coalesce(l.energy_j, 0) - coalesce(f.energy_j, 0)) > 1e-6 * coalesce(l.energy_j, 0) + {ROUNDING_J}
   OR abs(coalesce(l.carbon_gco2, 0) - coalesce(f.carbon_gco2, 0)) > 1e-6 * abs(coalesce(l.carbon_gco2, 0)) + 1e-6
ORDER BY abs(coalesce(l.energy_j, 0) - coalesce(f.energy_j, 0)) DESC
"""

_HOURS = f"""
WITH {LEDGER}, kept AS (
    SELECT date_trunc('hour', start_at, 'UTC') AS hour, node_id, count(*) AS lines, sum(energy_j) AS energy_j,
        sum(carbon_gco2) AS carbon_gco2, sum(estimated_gco2) AS estimated_gco2,
        sum(guessed_gco2) AS guessed_gco2, sum(abs(energy_j)) AS most
    FROM ledger GROUP BY 1, 2
), summed AS (
    SELECT hour, node_id, sum(lines) AS lines, sum(energy_j)::float8 AS energy_j,
        sum(carbon_gco2)::float8 AS carbon_gco2, sum(estimated_gco2)::float8 AS estimated_gco2,
        sum(guessed_gco2)::float8 AS guessed_gco2
    FROM energy_hours GROUP BY 1, 2
)
SELECT node_id AS node, hour, coalesce(k.lines, 0) AS lines, coalesce(k.energy_j, 0) AS lines_j,
    coalesce(s.lines, 0) AS summed, coalesce(s.energy_j, 0) AS sum_j
FROM kept k FULL JOIN summed s USING (hour, node_id)
WHERE k.lines IS DISTINCT FROM s.lines OR abs(k.energy_j - s.energy_j) > 1e-9 * k.most + {ROUNDING_J}
    OR abs(k.carbon_gco2 - s.carbon_gco2) > 1e-6 * abs(k.carbon_gco2) + 1e-6
    OR abs(k.estimated_gco2 - s.estimated_gco2) > 1e-6 * abs(k.carbon_gco2) + 1e-6
    OR abs(k.guessed_gco2 - s.guessed_gco2) > 1e-6 * abs(k.carbon_gco2) + 1e-6
ORDER BY hour, node_id
"""

_CARBON = """
SELECT node_id AS node, sequence, carbon_gco2 FROM energy_usages
WHERE abs(carbon_gco2
        - (gpu_energy_j + cpu_energy_j + static_energy_j) / 3.6e6 * intensity_gco2_per_kwh * pue)
    > 1e-9 * abs(carbon_gco2) + 1e-9
"""

_KNOWN_LATE = f"interval '{KNOWN_LATE_S} seconds'"

_AFTER_END = f"""
SELECT job_id AS job, allocation, node_id AS node, start_at, end_at,
    gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j
FROM ({LATE_LINES}) AS lines WHERE end_at > gang_end + {_KNOWN_LATE}
UNION ALL
SELECT job_id, allocation, node_id, start_at, end_at, energy_j FROM ({LATE_DAYS}) AS days
WHERE (energy_j <> 0 OR gpu_s <> 0) AND end_at > gang_end + {_KNOWN_LATE}
ORDER BY start_at, allocation, node
"""

_BEFORE_BEGIN = f"""
SELECT job_id AS job, allocation, node_id AS node, start_at, end_at,
    gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j
FROM ({EARLY_LINES}) AS lines ORDER BY start_at, allocation, node
"""

_CAPACITY = """
SELECT c.node_id AS node, count(*) AS claimed, count(d.found) AS existing
FROM device_claims c
LEFT JOIN nodes n ON n.id = c.node_id
LEFT JOIN LATERAL (
    SELECT 1 AS found FROM jsonb_array_elements(n.devices) AS listed WHERE (listed ->> 'index')::int = c.device LIMIT 1
) d ON true
GROUP BY c.node_id HAVING count(*) > count(d.found) ORDER BY 1
"""

_CLAIMS_OF_ENDED = """
SELECT c.node_id AS node, c.device, c.allocation_id AS allocation FROM device_claims c
JOIN allocations a ON a.id = c.allocation_id WHERE a.state = 'ended' ORDER BY 1, 2
"""

# A share whose node was given up has released its devices; all others hold theirs until the whole gang has ended.
_CLAIMS_MISSING = """
SELECT a.id AS allocation, s.node_id AS node, count(c.device) AS claimed, jsonb_array_length(s.devices) AS held
FROM allocations a
CROSS JOIN LATERAL jsonb_to_recordset(a.shares) AS s (node_id text, devices jsonb)
LEFT JOIN rank_ends e ON e.allocation_id = a.id AND e.node_id = s.node_id
LEFT JOIN device_claims c ON c.allocation_id = a.id AND c.node_id = s.node_id
WHERE a.state <> 'ended' AND e.node_id IS NULL
GROUP BY a.id, s.node_id, s.devices HAVING count(c.device) <> jsonb_array_length(s.devices) ORDER BY 1, 2
"""

_ASLEEP = """
SELECT p.node_id AS node, p.state, count(*) AS claimed FROM node_power p JOIN device_claims c ON c.node_id = p.node_id
WHERE p.state IN ('going_down', 'off', 'failed') GROUP BY 1, 2 ORDER BY 1
"""

_ONE_GANG = """
SELECT job_id AS job, count(*) AS gangs FROM allocations WHERE state <> 'ended' GROUP BY job_id HAVING count(*) > 1
"""

_LIMBO = """
SELECT j.id AS job, j.state, count(a.id) AS gangs FROM jobs j
LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
WHERE (j.state NOT IN ('succeeded', 'failed', 'cancelled') AND j.cell IS NULL) OR a.id IS NOT NULL
GROUP BY j.id, j.state
HAVING (j.state IN ('starting', 'running', 'preempting')) <> (count(a.id) > 0) ORDER BY 1
"""

RULES = (
    Rule(
        "ledger_adds_up",
        _LEDGER_BY_NODE,
        "On every node and in total, the devices' energy is the sum over owners and idle, to 0.1 %.",
        "{node}: owners {owners_j:.1f} J, devices {metered_j:.1f} J",
    ),
    Rule(
        "footprints_match_ledger",
        _FOOTPRINTS,
        "Every job's footprint is the sum of its ledger lines.",
        "{job}: lines {lines_j:.1f} J, footprint {sum_j:.1f} J",
    ),
    Rule(
        "hours_match_ledger",
        _HOURS,
        "Every hour's sums are those of its ledger lines.",
        "{node}, {hour:%Y-%m-%d %H:00}: {lines} lines of {lines_j:.1f} J, summed {summed} of {sum_j:.1f} J",
    ),
    Rule(
        "carbon_recomputes",
        _CARBON,
        "Every line's emissions are its energy x its intensity x its PUE.",
        "node {node}, interval {sequence}: {carbon_gco2:.6f} g",
    ),
    Rule(
        "no_line_after_its_gang",
        _AFTER_END,
        "No line of a job ends more than 10 s after its gang.",
        "{job}: {energy_j:.1f} J on {node} from {start_at:%Y-%m-%d %H:%M:%S} to {end_at:%H:%M:%S}, after {allocation}",
    ),
    Rule(
        "no_line_before_its_gang",
        _BEFORE_BEGIN,
        "No line of a job ends more than 10 s before its gang was there.",
        "{job}: {energy_j:.1f} J on {node} from {start_at:%Y-%m-%d %H:%M:%S} to {end_at:%H:%M:%S}, before {allocation}",
    ),
    Rule(
        "allocation_within_capacity",
        _CAPACITY,
        "No node has more devices claimed than it has.",
        "{node}: {claimed} claimed, {existing} of them exist",
    ),
    Rule(
        "ended_gangs_hold_nothing",
        _CLAIMS_OF_ENDED,
        "No device is claimed by a gang that has ended.",
        "device {device} of {node} by {allocation}",
    ),
    Rule(
        "live_gangs_hold_their_devices",
        _CLAIMS_MISSING,
        "Every live gang holds its devices, each once.",
        "{allocation} on {node}: {claimed} of {held}",
    ),
    Rule(
        "sleeping_nodes_hold_nothing",
        _ASLEEP,
        "No gang holds a device of a node that is powered down and not being woken.",
        "{node} is {state}: {claimed} claimed",
    ),
    Rule("one_gang_per_job", _ONE_GANG, "Every job has at most one live gang.", "{job} has {gangs}"),
    Rule(
        "no_job_in_limbo",
        _LIMBO,
        "Jobs that start, run or stop have a gang, and no others do.",
        "{job} is {state} with {gangs} live gangs",
    ),
)


async def breaches_of(database: Database, most: int) -> list[tuple[Rule, list[str]]]:
    """Return the breaches of each rule, at most ``most`` of each, in one snapshot of the database."""
    async with database.transaction("repeatable_read", readonly=True) as connection:
        return [
            (rule, [rule.breach.format(**dict(row)) for row in await connection.fetch(f"{rule.query} LIMIT {most}")])
            for rule in RULES
        ]
