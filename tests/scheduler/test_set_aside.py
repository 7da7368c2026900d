"""A job that no round can be held with, for whatever reason, is left out, and stops nobody else's."""

from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.cycle.snapshot import Trigger
from services.core.domain.errors import PlanError
from services.scheduler import loop
from services.scheduler.counters import FAILURES
from services.scheduler.planning import dry_run, snapshot
from services.scheduler.planning.culprits import MOST, culprits
from services.scheduler.power.hooks import NoHook
from tests.scheduler.world import World


@given(st.sets(st.integers(0, 59), max_size=3 * MOST), st.integers(1, 60))
async def test_those_that_fail_by_themselves_are_found_and_no_others(bad: set[int], n_units: int) -> None:
    asked = 0

    async def passes(kept: Sequence[int]) -> bool:
        nonlocal asked
        asked += 1
        return bad.isdisjoint(kept)

    found = await culprits(range(n_units), passes)

    present = sorted(bad & set(range(n_units)))
    assert found is not None
    assert sorted(found)[: len(present[:MOST])] == present[:MOST]
    assert len(found) == len(present) or (len(present) > MOST and set(present) <= set(found))
    assert asked <= 2 + (1 + n_units.bit_length()) * MOST + MOST


async def test_of_units_that_fail_together_the_later_is_found_and_nothing_where_none_is_at_fault() -> None:
    async def passes(kept: Sequence[int]) -> bool:
        return not {2, 5} <= set(kept)

    async def never(kept: Sequence[int]) -> bool:
        return False

    assert await culprits(range(9), passes) == [5]
    assert await culprits(range(2), passes) == []
    assert await culprits(range(9), never) is None


@pytest.mark.parametrize("where", ["policy", "snapshot", "rows"])
async def test_others_start_and_it_says_why_it_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    await world.node("n1", 8)
    poisoned = set[str]()

    def failing(module: Any, name: str, ids: Any, error: Exception) -> None:
        real = getattr(module, name)

        def fails(*args: Any, **kwargs: Any) -> Any:
            if poisoned & {*ids(*args)}:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, fails)

    if where == "policy":
        failing(loop, "run_under_orders", lambda _, seen, __: seen.jobs.ids, PlanError("device 0 is given twice"))
    elif where == "snapshot":
        failing(snapshot, "snapshot_of", lambda rows, *_: [each.id for each in rows.jobs], IndexError("of no kind"))
    else:
        failing(snapshot, "with_permitted", lambda made, *_: made.jobs.ids, asyncpg.DataError("out of range"))
    first = await world.job()
    bad, (array, tasks) = await world.job(), await world.array(3)
    last = await world.job()
    poisoned |= {bad, tasks[1]}
    world.scheduler._turned_at_s = -1e9

    await world.scheduler.turn()
    world.scheduler.check_turns()

    assert [await world.state(each) for each in (first, last)] == ["starting"] * 2
    assert {await world.state(each) for each in (bad, *tasks)} == {"queued"}
    await world.scheduler.turn()
    said = await world.fetch("SELECT reason, detail FROM jobs WHERE id = $1 OR array_id = $2", bad, array)
    assert {each["reason"] for each in said} == {"set_aside"}
    assert all("tries again at" in each["detail"] for each in said)

    monkeypatch.setattr(world.scheduler, "_culprits", None)  # nothing fails while they are left out
    later = await world.job()
    await world.scheduler.turn()
    assert await world.state(later) == "starting"

    poisoned.clear()
    await world.fetch("UPDATE jobs SET not_before = now() WHERE reason = 'set_aside' RETURNING 1")
    await world.scheduler.turn()
    assert {await world.state(each) for each in (bad, *tasks)} == {"starting"}, "they are tried again"


async def test_a_round_that_fails_without_any_of_them_sets_nothing_aside(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.node("n1")
    job = await world.job()

    def fails(*_: Any) -> Any:
        raise PlanError("whatever is asked")

    monkeypatch.setattr(loop, "run_under_orders", fails)
    with pytest.raises(PlanError, match="whatever"):
        await world.scheduler.turn()

    monkeypatch.undo()
    await world.scheduler.turn()
    assert await world.state(job) == "starting"


@pytest.mark.parametrize("trigger", ["active", "passive"])
async def test_where_the_policy_fails_over_what_runs_or_over_anything_a_plain_one_starts_jobs(
    world: World, monkeypatch: pytest.MonkeyPatch, trigger: str
) -> None:
    await world.node("n1", 2)
    runs = await world.job()
    await world.scheduler.turn()
    held = await world.allocation(runs)
    waits = await world.job()
    real, asked = loop.run_under_orders, list[str]()

    def fails(policy: Any, seen: Any, memory: Any) -> Any:
        asked.append(policy.name)
        if policy.name != loop.PLAIN and runs in seen.jobs.ids:
            raise ZeroDivisionError
        return real(policy, seen, memory)

    for each in (loop, dry_run):
        monkeypatch.setattr(each, "run_under_orders", fails)
    await world.fetch("UPDATE scheduler_state SET policy = 'las', parameters = '{}' RETURNING 1")
    if trigger == "active":
        await world.fetch("UPDATE scheduler_state SET last_active_at = NULL RETURNING 1")
    before = FAILURES._value.get()
    await world.scheduler.turn()

    assert await world.state(waits) == "starting"
    assert (await world.allocation(runs), await world.state(runs)) == (held, "starting"), "what runs is left alone"
    assert FAILURES._value.get() == before + 1
    (plan,) = await world.fetch("SELECT policy FROM plans ORDER BY round DESC LIMIT 1")
    assert plan["policy"] == loop.PLAIN
    view = dry_run.LiveView(world.database, world.settings, world.scheduler._carbon, NoHook())
    assert view.round(await view.read(), Trigger.PASSIVE).policy.name == loop.PLAIN, "also for who only asks"

    asked.clear()
    runs = "mended"
    await world.job()
    await world.scheduler.turn()
    assert set(asked) == {"las"}, "it is asked again"
