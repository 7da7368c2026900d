"""What nodes draw while nobody can measure it, off or booting: into the ledger as nobody's, modelled, each once."""

from __future__ import annotations

from services.contracts.nodes import EnergyInterval, EnergySource, Usage
from services.db.database import Database
from services.telemetry.ledger import Ledger, Reporter

LIFE = "power"
"""Stands for the agent's life in lines that no agent reported; their sequence is the period's id."""
BOOK_EVERY_S = 5.0

_UNBOOKED = """
SELECT d.id, d.node_id, d.start_at, d.end_at, d.power_w, n.zone FROM node_power_periods d
JOIN nodes n ON n.id = d.node_id
WHERE d.power_w > 0
    AND NOT EXISTS (
        SELECT FROM energy_intervals e WHERE e.node_id = d.node_id AND e.boot_id = $1 AND e.sequence = d.id)
    AND NOT EXISTS (
        SELECT FROM folded_intervals f WHERE f.node_id = d.node_id AND f.boot_id = $1 AND f.through_sequence >= d.id)
ORDER BY d.id LIMIT 100
"""


async def book(database: Database, ledger: Ledger) -> int:
    """Write a ledger line for every period of a node's sleep that has none; return how many there were.

    Raises:
        ProblemError: 503, no intensity is known for a zone.
    """
    async with database.connection() as connection:
        rows = await connection.fetch(_UNBOOKED, LIFE)
    for row in rows:
        static_j = row["power_w"] * (row["end_at"] - row["start_at"]).total_seconds()
        usage = Usage(
            allocation_id=None,
            devices=[],
            gpu_energy_j=0.0,
            cpu_energy_j=0.0,
            static_energy_j=static_j,
            source=EnergySource.MODELLED,
        )
        interval = EnergyInterval(
            boot_id=LIFE,
            sequence=row["id"],
            start_at=row["start_at"],
            end_at=row["end_at"],
            metered_gpu_energy_j=0.0,
            usages=[usage],
        )
        await ledger.store(Reporter(row["node_id"], row["zone"], EnergySource.MODELLED), [interval])
    return len(rows)
