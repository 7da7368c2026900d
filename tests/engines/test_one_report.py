"""Whatever a statement says of one job of an engine, at whichever step: its others start, run and end."""

from __future__ import annotations

import pytest

from services.scheduler.engines import ingest
from tests.engines.bridge import SUBMITTED, Bridge, a_job, on
from tests.scheduler.world import World
from tests.support.statements import Statements, shown


async def a_life(world: World, statements: Statements, turn: str, refused: str = "") -> list[str | None]:
    """Let jobs live beside one that a statement fails over; return what became of those, and of it without that."""
    bridge, names = Bridge(world), (f"first-{turn}", f"bad-{turn}", f"last-{turn}")

    async def all_say(state: str) -> list[str | None]:
        shares = [on("g1", 1), on("g1", 2), on("g1", 3)]
        words = {"started_at": SUBMITTED, "revision": 1} if state != "pending" else {}
        await bridge.say(
            *(
                a_job(name, state, **words, shares=[share] if state == "running" else [])
                for name, share in zip(names, shares, strict=True)
            )
        )
        rows = await world.fetch("SELECT external_id, id, state FROM jobs WHERE external_id LIKE '%-' || $1", turn)
        statements.names = statements.names and [
            names[1],
            *(row["id"].removeprefix("job_") for row in rows if row["external_id"] == names[1]),
        ]
        found = {row["external_id"]: row["state"] for row in rows}
        return [found.get(name) for name in names]

    statements.names, statements.refused = [names[1]], refused
    found: list[str | None] = []
    for state in ("pending", "running", "succeeded"):
        became = await all_say(state)
        found += [became[0], became[2]]
    statements.names = []
    await world.fetch("UPDATE jobs SET not_before = NULL WHERE external_id = $1 RETURNING 1", names[1])
    await bridge.say(present=[])
    return found


async def test_a_report_that_any_statement_fails_over_stops_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Bridge(world).enrol(nodes=1, gpus=64)
    statements = Statements(world.scheduler, monkeypatch)
    well = await a_life(world, statements, "well")
    assert well == ["starting", "starting", "running", "running", "succeeded", "succeeded"]
    assert len(statements.seen) > 10

    failed = dict[str, object]()
    # Reports are taken and ticked off by their ids alone, which are the table's own.
    of_values = [query for query in statements.seen if "AND e.unfolded" not in query]
    for at, refused in enumerate(of_values):
        try:
            if (found := await a_life(world, statements, str(at), refused)) != well:
                failed[refused] = found
        except Exception as error:
            failed[refused] = error
    assert not failed, shown(failed)


async def test_a_failure_that_is_no_reports_fault_leaves_none_of_them_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = Bridge(world)
    await bridge.enrol()

    async def fails(_: object) -> None:
        raise KeyError("of what somebody else holds")

    with monkeypatch.context() as patched:
        patched.setattr(ingest, "_claim", fails)
        await bridge.say(a_job("1"), a_job("2"))
    await world.scheduler.turn()

    assert [(await bridge.job(name))["state"] for name in "12"] == ["starting"] * 2
