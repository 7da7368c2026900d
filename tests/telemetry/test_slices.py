"""The ledger of a node whose GPU is cut: parts that are estimated, and a sum that is the counter's."""

from __future__ import annotations

from random import Random

import pytest

from services.core.accounting.slices import SliceUse, split_slice_energy
from services.core.domain.mig import placed, slice_index
from services.core.policies.clover.layouts import LAYOUTS
from tests.support.control_plane import OPERATOR, accept_job, allocate, service_headers
from tests.telemetry.conftest import Plane


def usage(owner: str | None, devices: list[int], gpu_j: float, source: str) -> dict[str, object]:
    return {
        "allocation_id": owner,
        "devices": devices,
        "gpu_energy_j": gpu_j,
        "cpu_energy_j": 0.0,
        "static_energy_j": 0.0,
        "source": source,
    }


@pytest.mark.parametrize("seed", range(4))
async def test_lines_of_slices_add_up_to_the_counter_and_are_estimated(plane: Plane, seed: int) -> None:
    random = Random(seed)
    cut = random.choice([layout for layout in LAYOUTS if len(layout) > 1])
    counter_j, idle_j = random.uniform(0, 1e6), random.uniform(0, 1e6)
    uses = {
        slice_index(0, place.start): SliceUse(
            place.sevenths, random.random() < 0.7, random.choice([None, random.random()])
        )
        for place in placed(cut)
    }
    parts = split_slice_energy(counter_j, idle_j, uses)
    node = "n0"
    agent = await plane.agent(node, gpus=1)
    agent.cut(0, cut)
    await agent.register()
    owners: dict[int, str] = {}
    for device, use in uses.items():
        if use.in_use:
            owners[device] = await allocate(plane.database, await accept_job(plane.database), {node: [device]})

    usages = [usage(owners.get(device), [device], part, "estimated") for device, part in parts.items()]
    body = {"intervals": [agent.interval(1_000.0, 1_010.0, *usages, metered_j=counter_j)]}
    assert (await agent.post(f"/v1/nodes/{node}/energy", body)).json() == {"accepted": 1, "duplicates": 0}

    async with plane.database.connection() as connection:
        rows = await connection.fetch("SELECT owner, gpu_energy_j, source FROM energy_usages WHERE node_id = $1", node)
        footprints = await connection.fetch("SELECT gpu_energy_j, estimated_energy_j FROM job_footprints")
    assert sum(row["gpu_energy_j"] for row in rows) == pytest.approx(counter_j, rel=1e-9, abs=1e-6)
    assert {row["source"] for row in rows} == {"estimated"}
    assert {row["owner"] for row in rows} - {""} == set(owners.values())
    assert all(row["estimated_energy_j"] == row["gpu_energy_j"] for row in footprints)
    found = (await plane.http.get("/v1/invariants", headers=service_headers(OPERATOR))).json()
    broken = [rule["name"] for rule in found["invariants"] if not rule["holds"]]
    assert not {"ledger_adds_up", "footprints_match_ledger", "allocation_within_capacity"} & set(broken)
