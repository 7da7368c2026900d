"""What becomes of plans, on a real database: when they are due, and what is applied, proposed, late or superseded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from services.contracts.background import WorkFailure, WorkFailureCode
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, Role
from services.contracts.serving import PlanMode, PlanOutcome, PlanTrigger, PoolPlanQuery, PoolPlanResult
from services.kit.problems import ProblemError
from services.serving.planning import planner
from services.serving.planning.events import Present, Standing
from services.serving.planning.plans import Plans
from services.serving.repository import ServingRepository
from services.serving.repository.plans import plan_repository
from tests.serving.pools import a_spec, add_pool, revise
from tests.serving.world import ANSWER, World, a_world

OPERATOR = Identity(tenant_id="ops", role=Role.OPERATOR, key_id="key_ops")
AWAY = WorkFailure(code=WorkFailureCode.UNAVAILABLE, detail="The carbon service does not answer; try again.")


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with a_world(database_url) as world:
        yield world


async def test_a_new_pool_is_planned_at_once_and_once_a_slot(world: World) -> None:
    first = await world.planned("a")
    assert await world.in_force("a") == first
    await world.look()
    assert await world.outcomes("a") == [("succeeded", "applied")]
    (plan,) = await world.of("a")
    assert plan["from_at"] > plan["slot_at"], "its half hour has begun"
    given = plan["deadline_at"] - plan["from_at"]
    assert given == timedelta(seconds=world.settings.plan_interval_s), "there is no older plan to keep"
    await world.shift("a", timedelta(days=7))
    await world.look()
    second = await world.answered("a")
    assert await world.in_force("a") == second != first
    (_, plan) = await world.of("a")
    assert plan["deadline_at"] - plan["from_at"] == timedelta(seconds=world.settings.plan_late_s)


async def test_a_plan_that_cannot_be_decided_keeps_no_other_pool_from_its_plans(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_pool(world.database, "bad", a_spec())
    await world.look()
    (bad,) = await world.of("bad")
    await world.answer(bad["id"])
    decide = Plans.decide

    async def failing(self: Plans, plan_id: str) -> PlanOutcome | None:
        if plan_id == bad["id"]:
            raise ZeroDivisionError
        return await decide(self, plan_id)

    monkeypatch.setattr(Plans, "decide", failing)
    await add_pool(world.database, "good", a_spec())
    with pytest.raises(ZeroDivisionError):
        await world.look()
    (plan,) = await world.of("good")
    await world.answer(plan["id"])
    with pytest.raises(ZeroDivisionError):
        await world.look()
    assert await world.in_force("good") == plan["id"]


async def test_a_plan_of_which_no_event_can_be_told_keeps_no_other_from_its_events(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pool in ("bad", "good"):
        await world.planned(pool)

    def told(standing: Standing, _: Present) -> PlanTrigger:
        if standing.pool == "bad":
            raise ZeroDivisionError
        return PlanTrigger.NODE_LOST

    monkeypatch.setattr(planner, "event_of", told)
    assert [(each.pool, event) for each, event in await world.watch.look()] == [("good", PlanTrigger.NODE_LOST)]


async def test_what_a_later_release_adds_to_a_stored_plan_is_left_out(world: World) -> None:
    await add_pool(world.database, "later", a_spec())
    await world.look()
    (plan,) = await world.of("later")
    await world.answer(plan["id"])
    more = "result = result || '{\"of_next_year\": 1}', problem = problem || '{\"of_next_year\": 1}'"
    await world.database.execute(f"UPDATE pool_plans SET {more} WHERE id = $1", plan["id"])
    await world.look()
    assert await world.in_force("later") == plan["id"]


async def test_a_pool_may_be_planned_more_often_than_others(world: World) -> None:
    first = await world.planned("often", plan_every_min=5)
    (plan,) = await world.of("often")
    assert plan["slot_at"].timestamp() % 300 == 0
    assert plan["from_at"] - plan["slot_at"] < timedelta(minutes=5)
    assert plan["deadline_at"] - plan["from_at"] == timedelta(minutes=5)
    await world.shift("often", timedelta(days=7))
    await world.look()
    (_, plan) = await world.of("often")
    assert plan["deadline_at"] - plan["from_at"] == timedelta(minutes=2.5), "the next plan is not far"
    assert await world.answered("often") == await world.in_force("often") != first


async def test_an_answer_after_a_pools_own_interval_is_late(world: World) -> None:
    await add_pool(world.database, "slow", a_spec(plan_every_min=5))
    await world.look()
    (plan,) = await world.of("slow")
    await world.answer(plan["id"])
    await world.database.execute(
        "UPDATE pool_plans SET from_at = from_at - interval '6 min', ended_at = ended_at - interval '6 min'"
    )
    await world.look()
    assert (await world.outcomes("slow"))[0] == ("succeeded", "late")


async def test_a_slot_is_planned_ahead(world: World) -> None:
    settings = world.settings.model_copy(update={"plan_lead_s": 604_800})
    plans = Plans(ServingRepository(world.engine), plan_repository(world.engine), settings)
    await add_pool(world.database, "ahead", a_spec())
    await plans.submit("ahead", PlanTrigger.CLOCK)
    (plan,) = await world.of("ahead")
    assert plan["from_at"] == plan["slot_at"] > plan["submitted_at"]


async def test_who_asks_again_ahead_of_a_slot_gets_another_plan(world: World) -> None:
    settings = world.settings.model_copy(update={"plan_lead_s": 604_800})
    plans = Plans(ServingRepository(world.engine), plan_repository(world.engine), settings)
    await add_pool(world.database, "again", a_spec())
    first = await plans.submit("again", PlanTrigger.REQUEST)
    assert await plans.submit("again", PlanTrigger.REQUEST) == first, "it is being made"
    await world.answer(first)
    await plans.decide(first)
    second = await plans.submit("again", PlanTrigger.REQUEST)
    assert second != first
    assert len({plan["from_at"] for plan in await world.of("again")}) == 1


async def test_several_services_make_one_plan_and_apply_it_once(world: World) -> None:
    await world.database.execute("""
        CREATE TABLE applied (id TEXT);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO applied VALUES (NEW.plan_id); RETURN NEW; END $$;
        CREATE TRIGGER applied AFTER UPDATE OF plan_id ON pools FOR EACH ROW EXECUTE FUNCTION note();
    """)
    names = [f"p{number}" for number in range(4)]
    for name in names:
        await add_pool(world.database, name, a_spec())
    await asyncio.gather(*(world.look() for _ in range(4)))
    assert [await world.outcomes(name) for name in names] == [[("queued", None)]] * 4
    made = [(await world.of(name))[0]["id"] for name in names]
    for plan_id in made:
        await world.answer(plan_id)
    await asyncio.gather(*(world.look() for _ in range(4)))
    applied = [row["id"] for row in await world.database.fetch("SELECT id FROM applied")]
    assert sorted(applied) == sorted(made)


async def test_a_failed_plan_is_made_again_until_the_deadline(world: World) -> None:
    old = await world.planned("f")
    await world.shift("f", timedelta(days=7))
    await world.look()
    await world.answered("f", AWAY)
    assert await world.outcomes("f") == [("succeeded", "applied"), ("failed", "failed"), ("queued", None)]
    assert await world.in_force("f") == old
    plans = await world.of("f")
    assert plans[1]["deadline_at"] == plans[2]["deadline_at"], "another attempt has no more time"
    await world.shift("f", timedelta(seconds=world.settings.plan_late_s + 1))
    await world.answered("f", AWAY)
    assert [outcome for _, outcome in await world.outcomes("f")] == ["applied", "failed", "failed"]
    await world.look()
    assert len(await world.of("f")) == 3, "the time for that is over"
    assert await world.in_force("f") == old


async def test_a_plan_without_an_answer_in_time_is_cancelled(world: World) -> None:
    old = await world.planned("l")
    await world.shift("l", timedelta(days=7))
    await world.look()
    late = (await world.of("l"))[-1]["id"]
    store = plan_repository(world.engine)
    assert await store.claim(late, "slow", 60)
    await world.shift("l", timedelta(seconds=world.settings.plan_late_s + 1))
    await world.look()
    assert not await store.succeed(late, "slow", ANSWER), "the worker has lost its claim"
    assert await world.outcomes("l") == [("succeeded", "applied"), ("cancelled", "late")]
    assert await world.in_force("l") == old
    await world.look()
    assert len(await world.of("l")) == 2


@pytest.mark.parametrize("column", ["deadline_at", "from_at"])
async def test_an_answer_that_came_late_or_is_found_after_its_half_hour_is_not_applied(
    world: World, column: str
) -> None:
    old = await world.planned(column)
    await world.shift(column, timedelta(days=7))
    await world.look()
    (_, plan) = await world.of(column)
    await world.answer(plan["id"])
    by = timedelta(hours=1) if column == "deadline_at" else timedelta(days=7)
    await world.database.execute(
        f"UPDATE pool_plans SET {column} = {column} - $2::interval WHERE id = $1", plan["id"], by
    )
    await world.look()
    assert (await world.outcomes(column))[1] == ("succeeded", "late")
    assert await world.in_force(column) == old


async def test_a_changed_pool_is_planned_anew_and_what_was_under_way_is_superseded(world: World) -> None:
    await add_pool(world.database, "c", a_spec())
    await world.look()
    first = (await world.of("c"))[0]["id"]
    store = plan_repository(world.engine)
    assert await store.claim(first, "busy", 60)
    await revise(world.database, "c", a_spec(head_room=2))
    await world.look()
    assert not await store.succeed(first, "busy", ANSWER)
    assert await world.outcomes("c") == [("cancelled", "superseded"), ("queued", None)]
    plan = (await world.of("c"))[1]
    assert (plan["revision"], plan["problem"]["spec"]["head_room"]) == (2, 2)
    await world.answer(plan["id"])
    await revise(world.database, "c", a_spec(head_room=3))
    await world.look()
    assert [outcome for _, outcome in await world.outcomes("c")] == ["superseded", "superseded", None]
    assert await world.in_force("c") is None


async def test_a_fixed_pools_plan_is_in_force_once_an_operator_applies_it(world: World) -> None:
    proposed = await world.planned("x", mode=PlanMode.FIXED)
    assert (await world.outcomes("x"), await world.in_force("x")) == ([("succeeded", "proposed")], None)
    await asyncio.gather(*(world.plans.apply(proposed, OPERATOR) for _ in range(3)))
    assert (await world.outcomes("x"), await world.in_force("x")) == ([("succeeded", "applied")], proposed)
    (entry,) = await world.database.fetch("SELECT * FROM audit_log")
    assert (entry["key_id"], entry["action"], entry["target"]) == ("key_ops", "pool.plan_applied", "x")
    assert entry["data"] == {"plan": proposed}


async def refused(world: World, plan_id: str) -> ProblemCode:
    with pytest.raises(ProblemError) as refusal:
        await world.plans.apply(plan_id, OPERATOR)
    assert refusal.value.status in (404, 409)
    return refusal.value.problem_code


async def test_what_is_no_proposal_any_more_is_not_applied(world: World) -> None:
    older = await world.planned("r", mode=PlanMode.FIXED)
    waiting = await world.plans.submit("r", PlanTrigger.REQUEST, OPERATOR)
    assert await refused(world, waiting) == ProblemCode.INVALID_TRANSITION
    newer = await world.answered("r")
    assert newer == waiting
    await world.plans.apply(newer, OPERATOR)
    assert await world.outcomes("r") == [("succeeded", "superseded"), ("succeeded", "applied")]
    assert await refused(world, older) == ProblemCode.INVALID_TRANSITION
    proposal = await world.plans.submit("r", PlanTrigger.REQUEST, OPERATOR)
    await world.answered("r")
    await revise(world.database, "r", a_spec(mode=PlanMode.FIXED, gap=0.1))
    assert await refused(world, proposal) == ProblemCode.CONFLICT
    assert await refused(world, "plan_" + "0" * 26) == ProblemCode.NOT_FOUND
    assert await world.in_force("r") == newer


async def test_a_request_makes_a_plan_beside_the_clocks_and_waits_for_one_under_way(world: World) -> None:
    await world.planned("q")
    asked = await world.plans.submit("q", PlanTrigger.REQUEST, OPERATOR)
    assert await world.plans.submit("q", PlanTrigger.REQUEST, OPERATOR) == asked
    plan = (await world.of("q"))[-1]
    assert (plan["id"], plan["trigger"], plan["key_id"], plan["tenant_id"]) == (asked, "request", "key_ops", "acme")
    await world.answered("q")
    assert await world.in_force("q") == asked
    assert await world.plans.submit("q", PlanTrigger.REQUEST, OPERATOR) != asked
    with pytest.raises(ProblemError, match="no such pool"):
        await world.plans.submit("nowhere", PlanTrigger.REQUEST, OPERATOR)


async def test_an_older_plan_never_replaces_a_newer_one(world: World) -> None:
    await add_pool(world.database, "o", a_spec())
    await world.look()
    older = (await world.of("o"))[0]["id"]
    await world.database.execute("UPDATE pool_plans SET deadline_at = now() - interval '1 s' WHERE id = $1", older)
    newer = await world.plans.submit("o", PlanTrigger.REQUEST, OPERATOR)
    await world.database.execute("UPDATE pool_plans SET deadline_at = now() + interval '1 h' WHERE id = $1", older)
    await world.answer(newer)
    assert await world.plans.decide(newer) is PlanOutcome.APPLIED
    assert await world.outcomes("o") == [("cancelled", "superseded"), ("succeeded", "applied")]


async def test_a_plan_from_before_the_clock_was_set_back_gives_way(world: World) -> None:
    """Otherwise the pool would keep it until the clock is there again."""
    ahead = await world.planned("b")
    shifted = "UPDATE pool_plans SET submitted_at = submitted_at + $2, slot_at = slot_at + $2 WHERE id = $1"
    await world.database.execute(shifted, ahead, timedelta(hours=1))
    new = await world.plans.submit("b", PlanTrigger.REQUEST, OPERATOR)
    await world.answered("b")
    assert await world.in_force("b") == new


async def test_a_deleted_pool_is_not_planned_and_one_made_anew_knows_nothing_of_it(world: World) -> None:
    first = await world.planned("d")
    waiting = await world.plans.submit("d", PlanTrigger.REQUEST, OPERATOR)
    await world.database.execute("UPDATE pools SET deleted_at = now() WHERE name = 'd'")
    await world.look()
    assert (await world.of("d"))[-1]["outcome"] == "superseded"
    with pytest.raises(ProblemError, match="being deleted"):
        await world.plans.submit("d", PlanTrigger.REQUEST, OPERATOR)
    await world.database.execute("DELETE FROM pools")
    await world.planned("d")
    listed = (await world.plans.page("d", PoolPlanQuery())).items
    assert len(listed) == 1
    assert {first, waiting}.isdisjoint(plan.id for plan in listed)
    with pytest.raises(ProblemError, match="no such plan"):
        await world.plans.find("d", first)


async def test_plans_are_listed_and_read(world: World) -> None:
    made = [await world.planned("p")]
    for _ in range(3):
        made.append(await world.plans.submit("p", PlanTrigger.REQUEST, OPERATOR))
        await world.answered("p", None if len(made) < 4 else AWAY)
    first = await world.plans.page("p", PoolPlanQuery(limit=3))
    rest = await world.plans.page("p", PoolPlanQuery(limit=3, cursor=first.next_cursor))
    assert [plan.id for plan in first.items + rest.items] == made[::-1]
    assert rest.next_cursor is None
    (failed,) = (await world.plans.page("p", PoolPlanQuery(outcome=[PlanOutcome.FAILED]))).items
    assert (failed.id, failed.failure) == (made[-1], AWAY)
    whole = await world.plans.find("p", made[0])
    assert (whole.outcome, whole.result) == (PlanOutcome.APPLIED, PoolPlanResult.model_validate(ANSWER))
    with pytest.raises(ProblemError, match="cursor"):
        await world.plans.page("p", PoolPlanQuery(cursor="abc"))


async def test_old_plans_are_deleted_but_not_the_one_in_force(world: World) -> None:
    first = await world.planned("k")
    second = await world.plans.submit("k", PlanTrigger.REQUEST, OPERATOR)
    await world.answered("k")
    await world.shift("k", timedelta(days=40))
    assert await plan_repository(world.engine).forget_ended(30) == 1
    assert [plan["id"] for plan in await world.of("k")] == [second]
    assert first != second == await world.in_force("k")


async def test_a_pool_or_plan_that_cannot_be_read_keeps_no_other_from_its_plans(world: World) -> None:
    await world.planned("odd")
    await world.planned("plan-odd")
    await world.planned("good")
    await world.database.execute("""UPDATE pools SET spec = spec || '{"objective": "water"}' WHERE name = 'odd'""")
    await world.database.execute(
        "UPDATE pool_plans SET result = jsonb_set(result, '{plan,status}', '\"dreamt\"') WHERE pool = 'plan-odd'"
    )
    world.watch._known.clear()
    assert await world.watch.look() == []
    assert [each.pool for each in world.watch._known.values() if each] == ["good", "odd"]
    await add_pool(world.database, "new", a_spec())
    await world.look()
    await world.answered("new")
    assert await world.outcomes("new") == [("succeeded", "applied")]
