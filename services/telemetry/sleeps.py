"""The energy of nodes that are off or booting, which cannot be measured: modelled, and booked once, as idle."""

from services.contracts.nodes import EnergyInterval, EnergySource, Usage
from services.db.database import Database
from services.telemetry.ledger import Ledger, Reporter
from services.telemetry.repository import energy

LIFE = "power"  #: Stands for the agent's run in lines that no agent reported; their sequence is the period's id
BOOK_EVERY_S = 5.0


async def book(database: Database, ledger: Ledger) -> int:
    """Write a ledger line for every period of a node's sleep that has none; return how many there were.

    Raises:
        ProblemError: 503 if no intensity is known for a zone.
    """
    rows = await energy.unbooked_sleeps(database, LIFE)
    for row in rows:
        static_j = row.power_w * (row.end_at - row.start_at).total_seconds()
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
            sequence=row.id,
            start_at=row.start_at,
            end_at=row.end_at,
            metered_gpu_energy_j=0.0,
            usages=[usage],
        )
        await ledger.store(Reporter(row.node_id, row.zone, EnergySource.MODELLED), [interval])
    return len(rows)
