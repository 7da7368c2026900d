"""What the control plane's own machines draw is in the ledger, once."""

from __future__ import annotations

import asyncio

import pytest

from services.core.domain.carbon import Signal
from services.kit.ids import utc_now
from services.telemetry.idle import CONTROL_PLANE, SLOT_S, book_control_plane
from services.telemetry.intensity import Intensity
from services.telemetry.ledger import Ledger
from tests.support.control_plane import OPERATOR, service_headers


class Flat:
    """300 gCO2/kWh at any time."""

    async def during(self, zone: str, start_s: float, end_s: float) -> Intensity:
        return Intensity(300.0, Signal.AVERAGE_DIRECT, estimated=False)


async def test_each_slot_is_booked_once_as_modelled_idle_energy(plane) -> None:
    ledger = Ledger(plane.database, Flat(), 1.5)  # type: ignore[arg-type]
    slot_s = utc_now().timestamp() // SLOT_S * SLOT_S
    book = [book_control_plane(ledger, "DE", 200.0, slot_s + late_s) for late_s in (1, 2, 300)]
    await asyncio.gather(*book, book_control_plane(ledger, "DE", 200.0, slot_s - SLOT_S + 5))

    async with plane.database.connection() as connection:
        lines = await connection.fetch(
            "SELECT * FROM energy_usages WHERE node_id = $1 ORDER BY start_at", CONTROL_PLANE
        )
    assert [line["end_at"].timestamp() for line in lines] == [slot_s - SLOT_S, slot_s]
    assert {(line["job_id"], line["static_energy_j"], line["gpus"], line["source"]) for line in lines} == {
        (None, 200.0 * SLOT_S, 0, "modelled")
    }
    assert lines[0]["carbon_gco2"] == pytest.approx(200 * SLOT_S / 3.6e6 * 300 * 1.5)
    answer = await plane.http.get("/v1/reports/footprint", headers=service_headers(OPERATOR))
    found = answer.json()
    assert found["idle"]["energy_j"] == found["idle"]["estimated_energy_j"] == 2 * 200 * SLOT_S
    invariants = await plane.http.get("/v1/invariants", headers=service_headers(OPERATOR))
    assert invariants.json()["holds"], invariants.text
