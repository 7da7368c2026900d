"""The energy of what no meter sees: nodes that are off or booting, and the control plane's own machines.

It is modelled from their stated power, and booked as idle, once, however many processes ask.
"""

from datetime import UTC, datetime

from services.contracts.nodes import EnergyInterval, EnergySource, Usage
from services.db.database import Database
from services.kit.repeating import each_apart
from services.telemetry.ledger import Ledger
from services.telemetry.repository import energy
from services.telemetry.repository.nodes import Reporter

LIFE = "power"  #: Stands for the agent's run in lines that no agent reported
CONTROL_PLANE = "control-plane"  #: Stands for a node
SLOT_S = 600.0  #: Length of a line of the control plane: a start or an end of telemetry leaves out no more than that
BOOK_EVERY_S = 5.0


async def book_sleeps(database: Database, ledger: Ledger) -> int:
    """Write a ledger line for every period of a node's sleep that has none; return how many there were.

    Raises:
        ProblemError: 503 if no intensity is known for a zone; the sleeps of nodes in others are booked.
    """

    rows = await energy.unbooked_sleeps(database, LIFE)

    async def book(zone: str) -> None:
        for row in rows:
            if row.zone == zone:
                await _book(ledger, row.node_id, zone, row.power_w, row.id, row.start_at, row.end_at)

    await each_apart(dict.fromkeys(row.zone for row in rows), book, failed="sleeps.zone_not_booked")
    return len(rows)


async def book_control_plane(ledger: Ledger, zone: str, power_w: float, now_s: float) -> None:
    """Write a ledger line for the slot before the present one; ``ProblemError``: 503 if its intensity is unknown."""
    slot = int(now_s // SLOT_S) - 1
    start_at, end_at = (datetime.fromtimestamp(number * SLOT_S, UTC) for number in (slot, slot + 1))
    await _book(ledger, CONTROL_PLANE, zone, power_w, slot, start_at, end_at)


async def _book(
    ledger: Ledger, node_id: str, zone: str, power_w: float, sequence: int, start_at: datetime, end_at: datetime
) -> None:
    usage = Usage(
        allocation_id=None,
        devices=[],
        gpu_energy_j=0.0,
        cpu_energy_j=0.0,
        static_energy_j=power_w * (end_at - start_at).total_seconds(),
        source=EnergySource.MODELLED,
    )
    interval = EnergyInterval(
        boot_id=LIFE, sequence=sequence, start_at=start_at, end_at=end_at, metered_gpu_energy_j=0.0, usages=[usage]
    )
    await ledger.store(Reporter(node_id, zone, EnergySource.MODELLED), [interval])
