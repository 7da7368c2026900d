"""The ledger as one table: raw lines, and the daily sums of older ones."""

from __future__ import annotations

RAW_LINES = """
    SELECT node_id, owner, job_id, start_at, end_at, zone, signal, intensity_gco2_per_kwh, pue,
        gpu_energy_j + cpu_energy_j + static_energy_j AS energy_j, gpu_energy_j,
        CASE WHEN source IN ('counter', 'sampled') THEN 0 ELSE gpu_energy_j END
            + CASE WHEN cpu_source IN ('counter', 'sampled') THEN 0 ELSE cpu_energy_j END
            + static_energy_j AS estimated_energy_j,
        carbon_gco2,
        gpus * greatest(0, extract(epoch FROM end_at - start_at)::float8) AS gpu_s,
        intensity_estimated OR source NOT IN ('counter', 'sampled') AS estimated
    FROM {raw}
"""
"""Rows of ``energy_usages`` as the figures that reports sum; static watts are configured, never measured."""

LEDGER = f"""
ledger AS (
    {RAW_LINES.format(raw="energy_usages")}
    UNION ALL
    SELECT node_id, owner, job_id, start_at, end_at, zone, signal,
        coalesce(carbon_gco2 / nullif(energy_j / 3.6e6 * pue, 0), 0), pue,
        energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s, estimated
    FROM energy_days
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
