"""Whatever a statement says of one job's values, at whichever step: the others start, run and end."""

from __future__ import annotations

import pytest

from tests.scheduler.world import World
from tests.support.statements import Statements, shown


async def a_life(world: World, statements: Statements, fate: str, refused: str = "") -> list[str]:
    """Let jobs live beside one that a statement fails over; return what became of those, and of it without that."""

    async def all_say(said: str) -> None:
        for job in (first, bad, last, later):
            is_silent = not job or (job == bad and fate == "lost" and said == "exited")
            if not is_silent and await world.state(job) in ("starting", "running", "preempting"):
                by = "stop" if job == bad and fate == "cancel" else "itself"
                words = {"exit_code": 0, "ended_by": by} if said == "exited" else {}
                await world.report(await world.allocation(job), said, **words)
        await world.scheduler.turn()

    first = await world.job()
    bad = await world.job(gpus=FATES[fate][0])
    last, later = await world.job(), ""
    await world.fetch("DELETE FROM nodes WHERE id = 'lost' RETURNING 1")
    if fate == "lost":
        await world.node("lost", 1, model="V100")
    statements.names, statements.refused = [bad.removeprefix("job_")], refused
    await world.scheduler.turn()
    await all_say("running")
    if fate == "lost":
        await world.lease("lost", -1_000)
    elif fate == "cancel":
        await world.fetch("UPDATE jobs SET cancel_requested = true WHERE id = $1 RETURNING 1", bad)
    await world.scheduler.turn()
    await all_say("exited")
    later = await world.job()
    await world.scheduler.turn()
    found = [await world.state(each) for each in (first, last, later)]
    statements.names = []
    await world.fetch("UPDATE jobs SET not_before = NULL WHERE id = $1 RETURNING 1", bad)
    for _ in range(2):
        await world.scheduler.turn()
        await all_say("exited")
    found.append(await world.state(bad))
    await world.fetch("UPDATE jobs SET cancel_requested = true WHERE id = $1 RETURNING 1", bad)
    return found


FATES = {
    "runs": ({"min": 1, "max": 1}, "succeeded"),
    "waits": ({"min": 65, "max": 65}, "queued"),
    "cancel": ({"min": 1, "max": 1}, "cancelled"),
    "lost": ({"min": 1, "max": 1, "model": "V100"}, "queued"),
}
"""What becomes of the job: what it asks for, and how it ends up."""


@pytest.mark.parametrize("fate", FATES)
async def test_a_job_that_any_statement_fails_over_stops_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    await world.node("n1", 64)
    statements = Statements(world.scheduler, monkeypatch)
    well = await a_life(world, statements, fate)
    assert well == ["succeeded", "succeeded", "starting", FATES[fate][1]]
    assert statements.seen

    failed = dict[str, object]()
    for refused in [*statements.seen]:
        try:
            found = await a_life(world, statements, fate, refused)
            # What is to be cancelled while it waits is admission's to cancel.
            if found[:3] != well[:3] or (fate != "cancel" and found != well):
                failed[refused] = found
        except Exception as error:
            failed[refused] = error
    assert not failed, shown(failed)
