"""The query for a node's power state, shared by the scheduler, which switches nodes on and off, and telemetry, which
lists them.
"""

NODE_POWER = """
SELECT n.id AS node_id, coalesce(p.state, 'on') AS state, p.since, coalesce(p.pinned, false) AS pinned_awake,
       nullif(p.reason, '') AS reason, nullif(p.detail, '') AS detail, coalesce(p.attempts, 0) AS attempts,
       coalesce(t.wakes, 0) AS wakes, coalesce(t.off_s, 0) AS off_s, coalesce(t.waking_s, 0) AS waking_s,
       coalesce(t.energy_j, 0) AS estimated_energy_j
  FROM nodes n
  LEFT JOIN node_power p ON p.node_id = n.id
  LEFT JOIN (
    SELECT d.node_id, count(*) FILTER (WHERE d.state = 'waking') AS wakes,
           sum(d.length_s) FILTER (WHERE d.state = 'off') AS off_s,
           sum(d.length_s) FILTER (WHERE d.state = 'waking') AS waking_s, sum(d.length_s * d.power_w) AS energy_j
      FROM (SELECT node_id, state, power_w, extract(epoch FROM end_at - start_at)::float8 AS length_s
              FROM node_power_periods) d GROUP BY d.node_id
  ) t ON t.node_id = n.id
 WHERE $1::text IS NULL OR n.id = $1
"""
"""One row per node: the fields of ``contracts.nodes.NodePower``, with ``node_id`` before them."""
