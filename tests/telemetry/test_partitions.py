"""Cutting GPUs: what operators want, what nodes are asked, and what they report."""

from typing import Any

import pytest

from services.db.gpu_partitions import want
from tests.support.control_plane import OPERATOR, USER, accept_job, allocate, service_headers
from tests.telemetry.conftest import Plane

PATH = "/v1/nodes/n0/gpus/0/partition"


async def put(plane: Plane, sizes: Any, path: str = PATH, caller=OPERATOR) -> tuple[int, dict[str, Any]]:
    answer = await plane.http.put(path, json={"sizes": sizes}, headers=service_headers(caller))
    return answer.status_code, answer.json()


async def shown(plane: Plane) -> dict[str, Any]:
    return (await plane.http.get("/v1/nodes/n0", headers=service_headers(OPERATOR))).json()


async def test_a_node_is_asked_until_it_has_cut_the_gpu_and_afterwards(plane: Plane) -> None:
    agent = await plane.agent("n0", gpus=2)
    agent.can_partition()
    await agent.register()

    status, wanted = await put(plane, [3, 2, 2])
    assert (status, wanted["sizes"], wanted["state"], wanted["revision"]) == (200, [2, 2, 3], "pending", 1)
    assert [each.model_dump() for each in (await agent.beat()).partitions] == [
        {"gpu": 0, "revision": 1, "sizes": [2, 2, 3]}
    ]

    agent.said_of(0, 1, "busy", [], "In use by process 4711.")
    await agent.beat()
    assert [(p["state"], p["detail"], p["applied_at"]) for p in (await shown(plane))["partitions"]] == [
        ("busy", "In use by process 4711.", None)
    ]

    agent.cut(0, [2, 2, 3])
    await agent.register()
    agent.said_of(0, 1, "applied", [2, 2, 3])
    assert (await agent.beat()).partitions[0].revision == 1, "a node that lost its slices makes them again"
    node = await shown(plane)
    assert (node["partitions"][0]["state"], node["partitions"][0]["applied_at"] is None) == ("applied", False)
    assert (node["gpus"], [d.get("profile") for d in node["devices"]]) == (
        2,
        [None, None, "2g.10gb", "2g.10gb", "3g.15gb"],
    )
    assert node["power_w"] == 100, "what a GPU draws contains what its slices draw"


async def test_what_a_node_says_of_an_earlier_wish_is_out_of_date(plane: Plane) -> None:
    agent = await plane.agent("n0", gpus=1)
    agent.can_partition()
    await agent.register()
    await put(plane, [7])
    await put(plane, [3, 3])

    agent.said_of(0, 1, "applied", [7])
    await agent.beat()

    assert [(p["revision"], p["state"]) for p in (await shown(plane))["partitions"]] == [(2, "pending")]


async def test_an_agent_that_cuts_nothing_is_asked_nothing(plane: Plane) -> None:
    agent = await plane.agent("n0", gpus=1, zone=None)
    async with plane.database.transaction() as connection:
        await want(connection, "n0", 0, [3, 3], None)

    answer = await agent.post("/v1/nodes/n0/heartbeat", agent.heartbeat())

    assert set(answer.json()) == {"lease_ttl_s", "allocations"}


async def test_a_gpu_with_two_slices_in_use_is_one_gpu_in_use(plane: Plane) -> None:
    agent = await plane.agent("n0", gpus=2)
    agent.can_partition()
    agent.cut(1, [3, 3])
    await agent.register()
    for device in (0, 1_032, 1_036):
        job = await accept_job(plane.database)
        await allocate(plane.database, job, {"n0": [device]})

    assert (await shown(plane))["gpus_in_use"] == 2


@pytest.mark.parametrize(
    ("sizes", "path", "status", "said"),
    [
        ([4, 4], PATH, 422, "do not fit on one GPU together"),
        ([5], PATH, 422, "no slice of 5 sevenths"),
        ("2g", PATH, 422, "list"),
        ([7], "/v1/nodes/n0/gpus/9/partition", 404, "GPU 9"),
        ([7], "/v1/nodes/n0/gpus/1024/partition", 422, "1023"),
        ([7], "/v1/nodes/n7/gpus/0/partition", 404, "node"),
        ([7], "/v1/nodes/n0/gpus/1/partition", 409, "reserved for a fleet"),
        ([7], "/v1/nodes/n1/gpus/0/partition", 409, "cannot be cut"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(plane: Plane, sizes, path, status, said) -> None:
    agent = await plane.agent("n0", gpus=2)
    agent.can_partition()
    await agent.register()
    await plane.agent("n1", gpus=1)
    async with plane.database.transaction() as connection:
        await want(connection, "n0", 1, [2, 2, 3], "vision")

    answered, problem = await put(plane, sizes, path)

    assert answered == status
    assert said in str(problem)
    assert [(p["gpu"], p["revision"], p["owner"]) for p in (await shown(plane))["partitions"]] == [(1, 1, "vision")]


async def test_only_operators_cut_gpus_and_that_is_recorded(plane: Plane) -> None:
    agent = await plane.agent("n0", gpus=1)
    agent.can_partition()
    await agent.register()

    assert (await put(plane, [7], caller=USER))[0] == 403
    assert (await put(plane, [3, 3]))[0] == 200
    async with plane.database.connection() as connection:
        rows = await connection.fetch("SELECT key_id, action, target, data FROM audit_log")
    assert [tuple(row) for row in rows] == [("key-ops", "node.partition", "n0", {"gpu": 0, "sizes": [3, 3]})]


async def test_a_node_that_cuts_nothing_has_its_whole_gpus_in_force_once_they_are_free(plane: Plane) -> None:
    agent = await plane.agent("n0", gpus=3)
    await agent.register()
    async with plane.database.transaction() as connection:
        assert await want(connection, "n0", 0, [], "vision")
        assert await want(connection, "n0", 1, [], "vision")
        assert await want(connection, "n0", 2, [3, 3], "vision")
    job = await accept_job(plane.database)
    allocation = await allocate(plane.database, job, {"n0": [1]})

    await agent.beat()

    found = {p["gpu"]: (p["state"], p["detail"], p["applied_at"] is None) for p in (await shown(plane))["partitions"]}
    assert found == {
        0: ("applied", "", False),
        1: ("pending", "", True),
        2: ("failed", "The agent of this node cannot cut GPUs.", True),
    }
    async with plane.database.connection() as connection:
        await connection.execute("DELETE FROM device_claims WHERE allocation_id = $1", allocation)
    await agent.beat()
    assert [p["state"] for p in (await shown(plane))["partitions"]] == ["applied", "applied", "failed"]
