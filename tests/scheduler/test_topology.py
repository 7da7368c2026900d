"""Levels of the network, from nodes' labels and an operator's file to where gangs start and why they wait."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.contracts.identity import Role
from services.kit.metrics import Metrics
from services.scheduler.figures import show_figures
from tests.scheduler.test_api import client
from tests.scheduler.world import World

FILE = "rack r1: n[0-1]\nrack r2: n[2-3]\n"


async def four_nodes(world: World, *, label: str = "") -> None:
    await world.scheduler.turn()
    for at in range(4):
        await world.node(f"n{at}", gpus=2)
        if label:
            await world.fetch(
                "UPDATE nodes SET labels = $2 WHERE id = $1 RETURNING 1", f"n{at}", {label: f"of-{at // 2}"}
            )


async def put(world: World, file: str, role: Role = Role.OPERATOR) -> Any:
    async with client(world, role) as api:
        return await api.put("/v1/topology", json={"file": file})


async def nodes_of(world: World, job_id: str) -> set[str]:
    rows = await world.fetch("SELECT shares FROM allocations WHERE job_id = $1", job_id)
    return {share["node_id"] for row in rows for share in row["shares"]}


def gang(gpus: int, **level: str) -> dict[str, Any]:
    return {"gpus": {"min": gpus, "max": gpus, **level}}


async def test_a_file_says_where_nodes_are_and_a_malformed_one_changes_nothing(world: World) -> None:
    await four_nodes(world)
    assert (await put(world, FILE)).status_code == 200

    refused = await put(world, FILE + "rack r1: n4\n")

    assert (refused.status_code, refused.json()["detail"]) == (422, "The file says line 3: r1 is there twice.")
    assert (await put(world, "", Role.USER)).status_code == 403
    (state,) = await world.fetch("SELECT topology FROM scheduler_state")
    assert state["topology"] == FILE
    assert [tuple(each) for each in await world.fetch("SELECT action FROM audit_log")] == [("topology.set",)]


@pytest.mark.parametrize("by", ["file", "labels"])
async def test_gangs_start_within_one_rack_or_wait_and_say_why(world: World, by: str) -> None:
    await four_nodes(world, label="rack" if by == "labels" else "")
    if by == "file":
        await put(world, FILE)
    anywhere = await world.job(3)
    first, second = await world.job(**gang(4, within="rack")), await world.job(**gang(2, within="rack"))
    never, nowhere = await world.job(**gang(5, within="rack")), await world.job(**gang(1, within="pod"))

    await world.scheduler.turn()

    racks = ({"n0", "n1"}, {"n2", "n3"})
    assert await nodes_of(world, first) in racks
    assert await nodes_of(world, anywhere) in racks
    rows = await world.fetch("SELECT id, state, reason FROM jobs")
    told = {row["id"]: (row["state"], row["reason"]) for row in rows}
    assert told[second] == ("queued", "not_enough_free_gpus")
    assert told[never] == told[nowhere] == ("queued", "no_such_domain")
    assert [(each.level, each.domains, each.free) for each in world.scheduler.level_rooms] == [
        ("node", 4, 2),
        ("rack", 2, 4),
        ("cluster", 1, 8),
    ]


async def test_operators_see_the_largest_gang_that_could_start(world: World) -> None:
    await four_nodes(world)
    await put(world, FILE)
    await world.job(2)
    await world.scheduler.turn()
    await world.scheduler.turn()

    metrics = Metrics(CollectorRegistry())
    show_figures(metrics, world.database, world.redis, world.scheduler, world.settings)
    text = (await metrics.text()).decode()
    async with client(world) as api:
        shown = (await api.get("/v1/topology")).json()
    async with client(world, Role.USER) as api:
        of_user = (await api.get("/v1/topology")).json()

    assert "wattshift_free_gpus 6.0" in text
    assert 'wattshift_largest_gang_gpus{level="rack"} 4.0' in text
    assert (shown["free_gpus"], shown["file"]) == (6, FILE)
    assert of_user == shown | {"file": ""}, "users do not see nodes"
    assert shown["levels"][1] == {"level": "rack", "domains": 2, "gpus": 4, "free": 4}
