-- What processes read of their neighbours' rows, by the process that keeps it (`owners.toml`): the columns here are a
-- contract, those of the tables are not. The migrations make these views; a test compares them. Columns may be added
-- at the end of a view, and a view may be read alone: rows are locked and changed by functions of `services/db`.

-- telemetry: nodes, without what they prove themselves with. `heard`: the lease holds.
CREATE VIEW known_nodes AS
SELECT id, address, zone, labels, devices, readings, containers, checkpoints, engine, queues, measures_only, state,
       draining, closed, registered_at, heartbeat_at, lease_until, silent_at,
       coalesce(lease_until > now(), false) AS heard
  FROM nodes;

-- telemetry: nodes that run work, or will once they are awake; those that are `draining` get nothing new.
CREATE VIEW usable_nodes AS
SELECT n.id, n.zone, n.labels, n.devices, n.readings, n.containers, n.engine, n.queues,
       n.draining OR n.closed IS NOT NULL AS draining, coalesce(p.state, 'on') AS power
  FROM nodes n LEFT JOIN node_power p ON p.node_id = n.id
 WHERE n.state = 'up' AND NOT n.measures_only AND coalesce(p.state, 'on') <> 'failed'
   AND (n.lease_until > now() OR p.state IN ('off', 'waking'));

-- telemetry: GPUs that get no new work though their nodes do: sick ones, and those that an operator has taken out of
-- service.
CREATE VIEW unusable_gpus AS
SELECT node_id, gpu, uuid, drained, cause, detail, since, ends_gangs, lasts
  FROM gpu_health WHERE cause IS NOT NULL OR drained;

-- telemetry: how the agents of nodes are reached, and by what they are known.
CREATE VIEW node_agents AS
SELECT n.id, n.state, n.agent_url, k.enrolment, k.certificate_sha256
  FROM nodes n LEFT JOIN node_credentials k ON k.node_id = n.id;

-- telemetry: the last report of each node on its share of a gang.
CREATE VIEW rank_reports AS
SELECT allocation_id, node_id, state, exit_code, ended_by, detail, started_at, updated_at, settings,
       holds_checkpoint, listener
  FROM rank_statuses;

-- telemetry: engines by the last reports of their bridges.
CREATE VIEW known_engines AS
SELECT name, kind, version, places, mode, queues, problem, reported_at,
       EXISTS (SELECT FROM node_credentials k WHERE k.node_id = name AND k.revoked_at IS NOT NULL) AS revoked,
       orders
  FROM engines;

-- telemetry: what jobs said of their work. `version` changes with each report.
CREATE VIEW reported_work AS
SELECT job_id, done, total, noise_scale, updated_at, xmin AS version, saved_at, save_every_s, save_s FROM job_progress;

-- telemetry: what the ledger charges jobs in all. `version` changes with each charge.
CREATE VIEW footprints AS
SELECT job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s, xmin AS version FROM job_footprints;

-- telemetry: lines of the ledger that are not summed by day yet.
CREATE VIEW energy_lines AS
SELECT node_id, boot_id, job_id, start_at, end_at, zone, signal, gpu_energy_j,
       cpu_energy_j + static_energy_j AS host_energy_j, gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j,
       carbon_gco2, intensity_gco2_per_kwh, intensity_estimated, pue
  FROM energy_usages;

-- telemetry: the whole ledger, with the daily sums of old lines, and what jobs used in cells.
CREATE VIEW booked_energy AS
SELECT node_id, job_id, start_at, zone, signal, gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j,
       (gpu_energy_j + cpu_energy_j + static_energy_j) * pue AS facility_energy_j, carbon_gco2,
       gpus * greatest(0, extract(epoch FROM end_at - start_at)::float8) AS gpu_s
  FROM energy_usages
UNION ALL
SELECT node_id, job_id, start_at, zone, signal, energy_j, energy_j * pue, carbon_gco2, gpu_s FROM energy_days
UNION ALL
SELECT 'cell:' || cell, job_id, hour, zone, signal, energy_j, energy_j * pue, carbon_gco2, gpu_s FROM cell_energy;

-- telemetry: what requests to models used, by key.
CREATE VIEW key_usages AS
SELECT key_id, start_at, model, input_tokens, output_tokens, carbon_gco2, requests FROM request_usages;

-- carbon: what electricity costs by hour, in the currency of the newest hour.
CREATE VIEW hourly_prices AS
SELECT zone, start_at AS hour, currency, per_kwh, demand_per_kw_month FROM carbon_prices
 WHERE currency = (SELECT p.currency FROM carbon_prices p ORDER BY p.start_at DESC, p.zone LIMIT 1);

-- scheduler: where orders of the grid are in force; `zone` is NULL for the whole cluster.
CREATE VIEW orders_in_force AS
SELECT zone FROM grid_orders WHERE withdrawn_at IS NULL AND start_at <= now() AND end_at > now();

-- scheduler: all gangs that there were, with whose they are. `leader` is the node of rank 0.
CREATE VIEW gangs AS
SELECT a.id, a.job_id, j.tenant_id, j.project, a.generation, a.state, a.gpus, a.shares,
       a.shares -> 0 ->> 'node_id' AS leader, a.started_at, a.running_at, a.ended_at
  FROM allocations a LEFT JOIN jobs j ON j.id = a.job_id;

-- scheduler: gangs that start, run or stop.
CREATE VIEW live_gangs AS
SELECT id, job_id, generation, state, gpus, shares, shares -> 0 ->> 'node_id' AS leader, master_port, batch_size,
       running_at, power_limit_w, clock_mhz, stop_requested_at
  FROM allocations WHERE state <> 'ended';

-- scheduler: the operator's file of the network's levels.
CREATE VIEW known_topology AS
SELECT topology AS file FROM scheduler_state;

-- scheduler: devices that gangs hold, the `gpu` that each is or is part of, and for which job.
CREATE VIEW held_devices AS
SELECT c.node_id, c.device, coalesce(c.parent, c.device) AS gpu, c.allocation_id, a.job_id, j.spec
  FROM device_claims c LEFT JOIN allocations a ON a.id = c.allocation_id LEFT JOIN jobs j ON j.id = a.job_id;

-- scheduler: the gangs that each node may run now: those that the answer to its heartbeat names.
CREATE VIEW node_gangs AS
SELECT DISTINCT c.node_id, c.allocation_id, a.job_id
  FROM device_claims c JOIN allocations a ON a.id = c.allocation_id
 WHERE a.state <> 'ended'
   AND NOT EXISTS (SELECT FROM rank_ends e WHERE e.allocation_id = c.allocation_id AND e.node_id = c.node_id);

-- admission: jobs as reports name them: those that there are, and what is kept of those that were forgotten.
CREATE VIEW reported_jobs AS
SELECT j.id, j.tenant_id, j.project, j.name, j.state, coalesce(u.name, j.labels ->> 'user') AS user_name,
       j.array_id, a.name AS array_name, j.spec -> 'work' ->> 'unit' AS work_unit, p.done AS work_done
  FROM jobs j LEFT JOIN users u ON u.id = j.user_id LEFT JOIN job_arrays a ON a.id = j.array_id
  LEFT JOIN job_progress p ON p.job_id = j.id
UNION ALL
SELECT k.id, k.tenant_id, k.project, k.name, k.state, coalesce(u.name, k.user_label), k.array_id, k.array_name,
       k.work_unit, k.work_done
  FROM past_jobs k LEFT JOIN users u ON u.id = k.user_id;

-- admission: what tenants are guaranteed, what they may hold, and what they are to have against others.
CREATE VIEW tenant_limits AS
SELECT id AS tenant_id, (limits ->> 'max_gpus')::int AS max_gpus,
       (limits ->> 'share_weight')::float8 AS share_weight, (limits ->> 'flex')::float8 AS flex,
       (limits ->> 'guaranteed_gpus')::int AS guaranteed_gpus
  FROM tenants;

-- admission: the accuracy that keys ask for at least of variants of a model, and of which models they may.
CREATE VIEW key_floors AS
SELECT tenant_id, replaced || id AS key_ids, (limits ->> 'least_accuracy_pct')::float8 AS least_accuracy_pct,
       limits -> 'models' AS models, limits -> 'aliases' AS aliases
  FROM api_keys
 WHERE limits ->> 'least_accuracy_pct' IS NOT NULL AND revoked_at IS NULL
   AND (expires_at IS NULL OR expires_at > now());

-- admission: projects whose budgets let nothing start; an empty project is the whole tenant.
CREATE VIEW held_projects AS
SELECT tenant_id, project FROM budgets WHERE exceeded AND action = 'hold';

-- admission: what jobs used in cells, by the hour in which that became known; each cell counts as one node.
CREATE VIEW cell_lines AS
SELECT 'cell:' || cell AS node_id, job_id, hour, zone, signal, pue, energy_j, gpu_energy_j, estimated_energy_j,
       carbon_gco2, gpu_s
  FROM cell_energy;
