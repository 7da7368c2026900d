"""Pools to plan: a spec with two ways to tell requests apart, and the rows that stand for nodes and traffic."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from services.contracts.serving import PoolSpec

ZONE = "US-CAL-CISO"
LIMITS = {"max_ttft_ms": 200, "max_tbt_ms": 50}
SERVED = {"ttft_ms": 100, "tbt_ms": 20}


def a_spec(**changes: Any) -> PoolSpec:
    """One place, modes of one GPU (2/s, 300 W) and of two (5/s, 550 W); one class `all`, or the four by length."""
    small = {"mode": "small", "max_qps": 2, "power_w": 300, **SERVED}
    large = {"mode": "large", "max_qps": 5, "power_w": 550, **SERVED}

    def a_class(name: str) -> dict[str, Any]:
        return {"name": name, **LIMITS, "profiles": [small, large]}

    spec = {
        "places": [{"name": "west", "zone": ZONE}],
        "modes": [
            {"name": "small", "gpu_model": "A100", "gpus": 1, "command": ["serve"]},
            {"name": "large", "gpu_model": "A100", "gpus": 2, "command": ["serve", "--tp", "2"]},
        ],
        "partitions": [
            {"name": "one", "classes": [a_class("all")]},
            {
                "name": "four",
                "thresholds": {"input_tokens": 100, "output_tokens": 100},
                "classes": [a_class(name) for name in ("SS", "SL", "LS", "LL")],
            },
        ],
    }
    return PoolSpec.model_validate({**spec, **changes})


async def add_pool(connection: Any, name: str, spec: PoolSpec) -> None:
    await connection.execute(
        "INSERT INTO pools (name, tenant_id, key_id, spec) VALUES ($1, 'acme', 'key_acme', $2)",
        name,
        spec.model_dump(mode="json"),
    )


async def revise(connection: Any, name: str, spec: PoolSpec) -> None:
    await connection.execute(
        "UPDATE pools SET spec = $2, revision = revision + 1, updated_at = now() WHERE name = $1",
        name,
        spec.model_dump(mode="json"),
    )


async def add_node(connection: Any, name: str, gpus: int = 8, zone: str = ZONE, **columns: Any) -> None:
    values = {"draining": False, "state": "up", "labels": {}, **columns}
    await connection.execute(
        "INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices, "
        "lease_until, draining, state, labels) VALUES ($1, '', '10.0.0.1', '', $2, 'simulated', false, 'modelled', $3, "
        "now() + interval '1 day', $4, $5, $6)",
        name,
        zone,
        [{"index": index, "model": "A100", "memory_gib": 40.0} for index in range(gpus)],
        *(values[column] for column in ("draining", "state", "labels")),
    )


async def add_traffic(connection: Any, pool: str, *, hours: float, per_window: int, source: str = "router") -> None:
    """Report, until now, as many short requests in every window."""
    counts = {"all": {"all": per_window}, "100,100": {"SS": per_window}}
    await connection.execute(
        "INSERT INTO pool_traffic (pool, start_at, source, counts) SELECT $1, at, $2, $3 FROM generate_series("
        "date_bin('5 s', now() - $4::interval, 'epoch'), now() - interval '5 s', '5 s') at",
        pool,
        source,
        counts,
        timedelta(hours=hours),
    )
