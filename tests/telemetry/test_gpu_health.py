"""GPUs that are out of service: what nodes say, and what operators make of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.control_plane import OPERATOR, USER, service_headers


def fault(gpu: int, name: str = "f1", **facts: Any) -> dict[str, Any]:
    said = {"cause": "xid", "detail": "Its driver reported Xid 79.", "ends_gangs": True, "lasts": False}
    when = "2026-03-01T00:00:00Z"
    return {"id": name, "gpu": gpu, "uuid": f"GPU-{gpu}", "since": when, **said, **facts}


async def call(plane: Any, node: str, what: str, headers: Any = OPERATOR) -> Any:
    return await plane.http.post(f"/v1/nodes/{node}/gpus/{what}", headers=service_headers(headers))


async def out_of_service(plane: Any, node: str) -> dict[int, tuple[bool, str | None]]:
    shown = (await plane.http.get(f"/v1/nodes/{node}", headers=service_headers(OPERATOR))).json()
    return {each["gpu"]: (each["drained"], each["cause"]) for each in shown["gpu_health"]}


async def audited(plane: Any) -> list[tuple[str, Any]]:
    async with plane.database.connection() as connection:
        rows = await connection.fetch("SELECT action, data FROM audit_log WHERE action LIKE 'gpu.%' ORDER BY sequence")
    return [(row["action"], row["data"].get("gpu")) for row in rows]


async def test_a_fault_counts_until_the_node_says_that_it_is_over(plane: Any) -> None:
    agent = await plane.agent("n0", gpus=2)
    for _ in range(2):
        await agent.beat(gpu_faults=[fault(1)])
    assert await out_of_service(plane, "n0") == {1: (False, "xid")}
    await agent.beat()
    assert await out_of_service(plane, "n0") == {1: (False, "xid")}, "an older agent says nothing of it"
    await agent.beat(gpu_faults=[])
    assert await out_of_service(plane, "n0") == {}
    assert await audited(plane) == [("gpu.quarantined", 1), ("gpu.recovered", 1)]


async def test_an_operator_returns_a_gpu_after_a_fault_that_is_over(plane: Any) -> None:
    agent = await plane.agent("n0", gpus=2)
    await agent.beat(gpu_faults=[fault(0, lasts=True, cause="lost", detail="It is lost.")])
    refused = await call(plane, "n0", "0/resume")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert refused.json()["detail"] == "GPU 0 of n0 cannot be returned yet: It is lost."

    await agent.beat(gpu_faults=[fault(0)])
    assert (await call(plane, "n0", "0/resume")).json()["gpu_health"] == []
    reply = await agent.beat(gpu_faults=[fault(0)])  # on its way before the agent hears of it
    assert reply.returned_faults == ["f1"]
    assert await out_of_service(plane, "n0") == {}
    assert (await agent.beat(gpu_faults=[])).returned_faults == ["f1"]
    assert (await agent.beat(gpu_faults=[])).returned_faults == []
    await agent.beat(gpu_faults=[fault(0, "f2")])
    assert await out_of_service(plane, "n0") == {0: (False, "xid")}
    assert [action for action, _ in await audited(plane)] == ["gpu.quarantined", "gpu.resume", "gpu.quarantined"]


async def test_one_gpu_is_drained_and_comes_back(plane: Any) -> None:
    await plane.agent("n0", gpus=2)
    for _ in range(2):
        assert (await call(plane, "n0", "1/drain")).status_code == 200
    assert await out_of_service(plane, "n0") == {1: (True, None)}
    for _ in range(2):
        assert (await call(plane, "n0", "1/resume")).status_code == 200
    assert await out_of_service(plane, "n0") == {}
    assert await audited(plane) == [("gpu.drain", 1), ("gpu.resume", 1)]


@pytest.mark.parametrize("what", ["drain", "resume"])
async def test_who_may_not_or_names_no_gpu_is_refused(plane: Any, what: str) -> None:
    await plane.agent("n0", gpus=2)
    assert (await call(plane, "n0", f"1/{what}", USER)).status_code == 403
    assert (await call(plane, "n0", f"2/{what}")).status_code == 404
    assert (await call(plane, "n9", f"0/{what}")).status_code == 404
    assert (await call(plane, "n0", f"1024/{what}")).status_code == 422


async def test_another_board_in_its_place_is_not_held_responsible(plane: Any) -> None:
    agent = await plane.agent("n0", gpus=2)
    known = {device["index"]: device["uuid"] for device in agent.registration["devices"]}
    await agent.beat(gpu_faults=[fault(1, uuid=known[1])])
    await agent.register()
    assert await out_of_service(plane, "n0") == {1: (False, "xid")}
    agent.registration["devices"][1]["uuid"] = "GPU-new"
    await agent.register()
    assert await out_of_service(plane, "n0") == {}


async def test_a_gpu_that_is_named_twice_is_as_it_was_named_last(plane: Any) -> None:
    agent = await plane.agent("n0", gpus=1)
    await agent.beat(gpu_faults=[fault(0), fault(0, "f2", cause="ecc")])
    assert await out_of_service(plane, "n0") == {0: (False, "ecc")}
