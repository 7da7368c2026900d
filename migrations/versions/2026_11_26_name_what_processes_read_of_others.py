"""Name what processes read of their neighbours' tables, as views.

Rows and columns stay as they are: a release that knows no view reads the tables.
"""

from alembic import op

revision = "0060"
down_revision = "0059"
branch_labels = None
depends_on = None

VIEWS = {
    "known_nodes": """
    SELECT id, address, zone, labels, devices, readings, containers, checkpoints, engine, queues, measures_only, state,
           draining, closed, registered_at, heartbeat_at, lease_until, silent_at,
           coalesce(lease_until > now(), false) AS heard
      FROM nodes
    """,
    "usable_nodes": """
    SELECT n.id, n.zone, n.labels, n.devices, n.readings, n.containers, n.engine, n.queues,
           n.draining OR n.closed IS NOT NULL AS draining, coalesce(p.state, 'on') AS power
      FROM nodes n LEFT JOIN node_power p ON p.node_id = n.id
     WHERE n.state = 'up' AND NOT n.measures_only AND coalesce(p.state, 'on') <> 'failed'
       AND (n.lease_until > now() OR p.state IN ('off', 'waking'))
    """,
    "unusable_gpus": """
    SELECT node_id, gpu, uuid, drained, cause, detail, since, ends_gangs, lasts
      FROM gpu_health WHERE cause IS NOT NULL OR drained
    """,
    "node_agents": """
    SELECT n.id, n.state, n.agent_url, k.enrolment, k.certificate_sha256
      FROM nodes n LEFT JOIN node_credentials k ON k.node_id = n.id
    """,
    "rank_reports": """
    SELECT allocation_id, node_id, state, exit_code, ended_by, detail, started_at, updated_at, settings,
           holds_checkpoint, listener
      FROM rank_statuses
    """,
    "known_engines": """
    SELECT name, kind, version, places, mode, queues, problem, reported_at FROM engines
    """,
    "reported_work": """
    SELECT job_id, done, total, noise_scale, updated_at, xmin AS version FROM job_progress
    """,
    "footprints": """
    SELECT job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s, xmin AS version FROM job_footprints
    """,
    "energy_lines": """
    SELECT node_id, boot_id, job_id, start_at, end_at, zone, signal, gpu_energy_j,
           cpu_energy_j + static_energy_j AS host_energy_j, gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j,
           carbon_gco2, intensity_gco2_per_kwh, intensity_estimated, pue
      FROM energy_usages
    """,
    "booked_energy": """
    SELECT node_id, job_id, start_at, zone, signal, gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j,
           (gpu_energy_j + cpu_energy_j + static_energy_j) * pue AS facility_energy_j, carbon_gco2,
           gpus * greatest(0, extract(epoch FROM end_at - start_at)::float8) AS gpu_s
      FROM energy_usages
    UNION ALL
    SELECT node_id, job_id, start_at, zone, signal, energy_j, energy_j * pue, carbon_gco2, gpu_s FROM energy_days
    """,
    "gangs": """
    SELECT a.id, a.job_id, j.tenant_id, j.project, a.generation, a.state, a.gpus, a.shares,
           a.shares -> 0 ->> 'node_id' AS leader, a.started_at, a.running_at, a.ended_at
      FROM allocations a LEFT JOIN jobs j ON j.id = a.job_id
    """,
    "live_gangs": """
    SELECT id, job_id, generation, state, gpus, shares, shares -> 0 ->> 'node_id' AS leader, master_port, batch_size,
           running_at, power_limit_w, clock_mhz
      FROM allocations WHERE state <> 'ended'
    """,
    "held_devices": """
    SELECT c.node_id, c.device, coalesce(c.parent, c.device) AS gpu, c.allocation_id, a.job_id, j.spec
      FROM device_claims c LEFT JOIN allocations a ON a.id = c.allocation_id LEFT JOIN jobs j ON j.id = a.job_id
    """,
    "node_gangs": """
    SELECT DISTINCT c.node_id, c.allocation_id, a.job_id
      FROM device_claims c JOIN allocations a ON a.id = c.allocation_id
     WHERE a.state <> 'ended'
       AND NOT EXISTS (SELECT FROM rank_ends e WHERE e.allocation_id = c.allocation_id AND e.node_id = c.node_id)
    """,
    "reported_jobs": """
    SELECT j.id, j.tenant_id, j.project, j.name, j.state, coalesce(u.name, j.labels ->> 'user') AS user_name,
           j.array_id, a.name AS array_name, j.spec -> 'work' ->> 'unit' AS work_unit, p.done AS work_done
      FROM jobs j LEFT JOIN users u ON u.id = j.user_id LEFT JOIN job_arrays a ON a.id = j.array_id
      LEFT JOIN job_progress p ON p.job_id = j.id
    UNION ALL
    SELECT k.id, k.tenant_id, k.project, k.name, k.state, coalesce(u.name, k.user_label), k.array_id, k.array_name,
           k.work_unit, k.work_done
      FROM past_jobs k LEFT JOIN users u ON u.id = k.user_id
    """,
    "tenant_limits": """
    SELECT id AS tenant_id, (limits ->> 'max_gpus')::int AS max_gpus,
           (limits ->> 'share_weight')::float8 AS share_weight
      FROM tenants
    """,
    "held_projects": """
    SELECT tenant_id, project FROM budgets WHERE exceeded AND action = 'hold'
    """,
}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(f"DROP VIEW {', '.join(VIEWS)}")
