"""The energy of the control plane's own machines, modelled from their stated power, and booked as idle."""

from datetime import UTC, datetime

from services.contracts.nodes import EnergyInterval, EnergySource, Usage
from services.telemetry.ledger import Ledger, Reporter

NODE = "control-plane"
SLOT_S = 600.0  #: Length of a line: a start or an end of telemetry leaves out no more than that


async def book_control_plane(ledger: Ledger, zone: str, power_w: float, now_s: float) -> None:
    """Write a ledger line for the slot before the present one, once, however many processes ask.

    Raises:
        ProblemError: 503 if no intensity is known for the zone.
    """
    sequence = int(now_s // SLOT_S) - 1
    start_at, end_at = (datetime.fromtimestamp(number * SLOT_S, UTC) for number in (sequence, sequence + 1))
    usage = Usage(
        allocation_id=None,
        devices=[],
        gpu_energy_j=0.0,
        cpu_energy_j=0.0,
        static_energy_j=power_w * SLOT_S,
        source=EnergySource.MODELLED,
    )
    interval = EnergyInterval(
        boot_id="power", sequence=sequence, start_at=start_at, end_at=end_at, metered_gpu_energy_j=0.0, usages=[usage]
    )
    await ledger.store(Reporter(NODE, zone, EnergySource.MODELLED), [interval])
