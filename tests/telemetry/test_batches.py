"""Reports of many nodes in one transaction: each is answered as if it were alone."""

import asyncio
from collections.abc import Mapping

import pytest

import services.telemetry.batches as batches_module
from services.telemetry.batches import Batches
from tests.support.control_plane import usage


async def test_reports_gather_while_others_are_stored_and_one_that_spoils_a_batch_fails_alone() -> None:
    stored: list[list[str]] = []
    go_on = asyncio.Event()

    async def store(reports: Mapping[str, str], wait: bool) -> dict[str, str]:
        stored.append(sorted(f"{said} alone" if wait else said for said in reports.values()))
        await go_on.wait()
        if "bad" in reports.values():
            raise ValueError("bad")
        found = {node: f"{said} stored" for node, said in reports.items() if said != "unknown"}
        return {node: said for node, said in found.items() if wait or said != "locked stored"}

    batches = Batches(store, lambda: KeyError("nobody knows it"))

    async def add(node_id: str, said: str) -> str:
        return await batches.add(node_id, said)

    first = asyncio.create_task(add("n1", "a"))
    await asyncio.sleep(0)
    others = [asyncio.create_task(add(*each)) for each in (("n2", "b"), ("n3", "c"), ("n2", "d"), ("n4", "locked"))]
    gone = asyncio.create_task(add("n5", "e"))
    await asyncio.sleep(0)
    gone.cancel()
    go_on.set()
    assert await asyncio.gather(first, *others) == ["a stored", "b stored", "c stored", "d stored", "locked stored"]
    assert stored[:2] == [["a"], ["b", "c", "e", "locked"]]
    assert sorted(stored[2:]) == [["d"], ["locked alone"]]

    said = await asyncio.gather(add("n1", "f"), add("n2", "bad"), add("n3", "g"), return_exceptions=True)
    assert (said[0], str(said[1]), said[2]) == ("f stored", "bad", "g stored")
    with pytest.raises(KeyError, match="nobody"):
        await add("n1", "unknown")


@pytest.mark.parametrize("enough", [2, 3])
async def test_a_few_wait_for_more_or_for_a_moment(monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
    """Otherwise most transactions would have the one or two reports that came while the last one was carried out."""
    monkeypatch.setattr(batches_module, "ENOUGH", enough)
    monkeypatch.setattr(batches_module, "GATHER_S", 0.02 if enough == 3 else 3_600)
    stored: list[list[str]] = []

    async def store(reports: Mapping[str, str], wait: bool) -> dict[str, str]:
        assert not wait
        stored.append(sorted(reports))
        await asyncio.sleep(0)
        return dict(reports)

    batches = Batches(store, KeyError)
    first = asyncio.create_task(batches.add("n1", "a"))
    await asyncio.sleep(0)
    second = asyncio.create_task(batches.add("n2", "b"))
    await first
    await asyncio.gather(second, batches.add("n3", "c"))
    assert stored == [["n1"], ["n2", "n3"]]


async def test_a_node_that_somebody_has_locked_holds_no_other_up(plane) -> None:
    agents = [await plane.agent(f"n{number}") for number in range(4)]
    async with plane.database.transaction() as connection:
        await connection.execute("SELECT FROM nodes WHERE id = 'n0' FOR UPDATE")
        waits = asyncio.create_task(agents[0].beat())
        for _ in range(3):
            await asyncio.wait_for(asyncio.gather(*(agent.beat() for agent in agents[1:])), 20)
        assert not waits.done()
    await asyncio.wait_for(waits, 20)


async def test_energy_of_many_nodes_is_stored_together_each_under_its_own_token(plane) -> None:
    agents = [await plane.agent(f"n{number}") for number in range(6)]
    agents[3].token = "of another"
    sent = [agent.interval(0, 60, usage(None, 100.0 * (at + 1))) for at, agent in enumerate(agents)]
    answers = await asyncio.gather(
        *(
            agent.post(f"/v1/nodes/{agent.node_id}/energy", {"intervals": [interval]})
            for agent, interval in zip(agents, sent, strict=True)
        )
    )
    assert [answer.status_code for answer in answers] == [200, 200, 200, 401, 200, 200]
    async with plane.database.connection() as connection:
        rows = await connection.fetch("SELECT node_id, gpu_energy_j FROM energy_usages ORDER BY node_id")
    found = [(row["node_id"], row["gpu_energy_j"]) for row in rows]
    assert found == [(f"n{at}", pytest.approx(100.0 * (at + 1))) for at in (0, 1, 2, 4, 5)]
