"""Plans of fleets that are searched by measurement, on a real database."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.contracts.apps import AppReportQuery
from tests.serving.fleets import ACME, OPERATOR, FleetWorld, a_fleet, a_fleet_world, an_app


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[FleetWorld]:
    async with a_fleet_world(database_url) as made:
        yield made


def frugal_small(kinds: Counter[str]) -> tuple[float, float]:
    """Answer within the SLA; the fewer instances of the big variant, the less energy."""
    big = sum(count for kind, count in kinds.items() if kind.startswith("big"))
    return 150.0, 5.0 + 10.0 * big


async def measured_fleet(world: FleetWorld, **changes: Any) -> None:
    """Bring a fleet to BASE, and have the intensity change."""
    await world.fleets.put("edge", a_fleet(evaluation="measured"), OPERATOR)
    await world.apps.put("photos", an_app(carbon_weight=0.5, repartition="any_time", **changes), ACME)
    await world.settle()
    world.grid.gco2_per_kwh["GB"] = 300
    await world.later(10)


async def searched(
    world: FleetWorld, figures: Callable[[Counter[str]], tuple[float, float]], *, killed: bool = False
) -> Any:
    """Take turns under traffic until the plan has ended; return it."""
    for _ in range(300):
        await world.turn()
        await world.serve(figures)
        plan = await world.plan()
        if plan["trigger"] != "first" and plan["state"] in ("applied", "failed", "superseded"):
            await world.turn()
            return plan
        if killed and plan["state"] != "solving":
            world.planner = world.another()
    raise AssertionError(f"the plan did not end: {await world.plan()}")


def tried(plan: Any) -> list[Any]:
    return [
        application
        for evaluation in plan["search"]["evaluations"]
        for application in evaluation["applications"]
        if application["is_tried"]
    ]


async def test_what_was_measured_to_be_best_is_in_force_in_the_end(world: FleetWorld) -> None:
    await measured_fleet(world)
    plan = await searched(world, frugal_small)
    assert plan["state"] == "applied", plan["detail"]
    first, *others = plan["search"]["evaluations"]
    assert first["applications"][0]["instances"] == [{"variant": "big", "slice": "7g", "count": 2}]
    assert others, "nothing was tried"
    measured = [each["applications"][0]["measured"] for each in plan["search"]["evaluations"]]
    best = max(measured, key=lambda each: each["objective_pct"])
    (found,) = plan["result"]["applications"]
    assert found["objective_pct"] == best["objective_pct"]
    assert found["energy_j_per_request"] == best["energy_j_per_request"]
    assert await world.running() == {
        f"photos {each['variant']}.{each['slice']}": each["count"] for each in found["instances"]
    }
    assert "ended by its rules" in plan["search"]["detail"]
    assert len(tried(plan)) <= 30
    assert all(each["predicted"] for each in tried(plan)[1:]), "neighbours are those that the model allows"
    shown = await world.apps.find("photos", ACME)
    assert shown.plan is not None
    assert shown.plan.search is not None
    assert len(shown.plan.search.evaluations) == len(plan["search"]["evaluations"])
    report = (await world.apps.report("photos", AppReportQuery(hours=1, step_s=60), ACME)).evaluations
    assert report is not None
    assert (report.evaluations, report.unmeasured) == (len(measured), 0)
    assert report.answered == sum(each["applications"][0]["answered"] for each in plan["search"]["evaluations"])
    assert report.accuracy_error_pct is not None


async def test_energy_is_that_of_the_instances_and_the_idle_power_of_the_rest(world: FleetWorld) -> None:
    await measured_fleet(world)
    plan = await searched(world, frugal_small)
    first = plan["search"]["evaluations"][0]["applications"][0]
    assert first["measured"]["energy_j_per_request"] == pytest.approx(25, rel=0.02), "both GPUs are held"
    assert first["answered"] % 200 == 0
    assert (first["late"], first["measured"]["accuracy_pct"]) == (0, 84)
    other = tried(plan)[0]
    ledger_j = 5 + 10 * sum(each["count"] for each in other["instances"] if each["variant"] == "big")
    rest_gpus = (
        (other["measured"]["energy_j_per_request"] - ledger_j) * 40 / 83.8
    )  # 40 answers/s, the catalogue's watts
    assert 0 < rest_gpus < 2
    assert rest_gpus == pytest.approx(2 - sum(int(e["slice"][0]) * e["count"] for e in other["instances"]) / 7, abs=0.3)


async def test_whoever_is_killed_between_any_two_steps_is_followed_by_another(world: FleetWorld) -> None:
    await measured_fleet(world)
    plan = await searched(world, frugal_small, killed=True)
    assert plan["state"] == "applied"
    graphs = [str(each["instances"]) for each in tried(plan)]
    assert len(set(graphs)) == len(graphs), "nothing is measured twice"
    assert await world.running() == {
        f"photos {each['variant']}.{each['slice']}": each["count"]
        for each in plan["result"]["applications"][0]["instances"]
    }


async def test_without_room_in_the_sla_nothing_is_tried(world: FleetWorld) -> None:
    await measured_fleet(world)
    plan = await searched(world, lambda _: (375.0, 20.0))
    assert plan["state"] == "applied"
    assert (len(plan["search"]["evaluations"]), tried(plan)) == (1, [])
    assert "more than 90 % of its SLA of 400 ms" in plan["search"]["detail"]
    assert await world.running() == {"photos big.7g": 2}


async def test_a_configuration_without_room_is_left_for_the_best_one(world: FleetWorld) -> None:
    await measured_fleet(world)

    def only_base_is_fast(kinds: Counter[str]) -> tuple[float, float]:
        return (100.0, 25.0) if kinds == {"big.7g": 2} else (900.0, 1.0)

    plan = await searched(world, only_base_is_fast)
    assert plan["state"] == "applied"
    evaluations = plan["search"]["evaluations"]
    assert [each["applications"][0]["is_tried"] for each in evaluations[:4]] == [False, True, False, True]
    slow = evaluations[1]["applications"][0]
    assert slow["late"] == slow["answered"] > 0
    assert len(tried(plan)) == 5, "five in a row without a better one"
    assert await world.running() == {"photos big.7g": 2}


async def test_limits_that_what_runs_breaks_are_planned_for_by_the_model(world: FleetWorld) -> None:
    await measured_fleet(world)
    plan = await searched(world, lambda _: (500.0, 20.0))
    assert plan["state"] == "applied"
    assert "the model's plan is carried out unmeasured" in plan["search"]["detail"]
    assert await world.running() != {"photos big.7g": 2}


async def test_too_few_requests_leave_the_plan_to_the_model(world: FleetWorld) -> None:
    await measured_fleet(world)
    for _ in range(60):
        await world.turn()
        await world.serve(frugal_small, answers=1, seconds=100)
        plan = await world.plan()
        if plan["state"] == "applied":
            break
    (evaluation,) = plan["search"]["evaluations"]
    assert re.fullmatch(r"photos had 1\d answers within 60 s; 20 are needed\.", evaluation["detail"])
    assert await world.running() != {"photos big.7g": 2}


async def test_a_driver_that_refuses_ends_the_search_and_the_best_stays(world: FleetWorld) -> None:
    await measured_fleet(world)
    world.refusing = {0, 1}
    plan = await searched(world, frugal_small)
    assert plan["state"] == "applied", plan["detail"]
    assert "the driver says no" in plan["search"]["detail"]
    assert "the driver says no" in plan["search"]["evaluations"][-1]["detail"]
    assert await world.running() == {"photos big.7g": 2}
    assert all(not sizes for sizes in (await world.cuts()).values())


async def test_a_change_gives_the_search_up(world: FleetWorld) -> None:
    await measured_fleet(world)
    for _ in range(60):
        await world.turn()
        if (await world.plan())["state"] == "measuring":
            break
    await world.apps.put("photos", an_app(carbon_weight=0.2, repartition="any_time"), ACME)
    await world.turn()
    found = await world.database.fetchrow("SELECT * FROM fleet_plans ORDER BY id LIMIT 1 OFFSET 1")
    assert found["state"] == "superseded"
    assert "changed while it was measured" in found["search"]["detail"]
    await world.later(10)
    await world.turn()
    assert (await world.plan())["trigger"] == "parameter"


async def test_two_applications_are_searched_at_once(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(gpus=4, evaluation="measured"), OPERATOR)
    for name in ("photos", "streets"):
        await world.apps.put(name, an_app(carbon_weight=0.5, repartition="any_time"), ACME)
    await world.settle()
    world.grid.gco2_per_kwh["GB"] = 300
    await world.later(10)
    plan = await searched(world, frugal_small)
    assert plan["state"] == "applied"
    assert {each["name"] for each in tried(plan)} == {"photos", "streets"}
    shown = await world.apps.find("streets", ACME)
    assert shown.plan is not None
    assert shown.plan.search is not None
    assert {each.name for each in shown.plan.search.present.applications} == {"streets"}


async def test_an_application_that_no_gpu_is_left_for_keeps_no_other_from_being_measured(world: FleetWorld) -> None:
    await world.node("n1", 1)
    await world.fleets.put("edge", a_fleet(gpus=2, evaluation="measured"), OPERATOR)
    for name in ("photos", "streets"):
        await world.apps.put(name, an_app(carbon_weight=0.5, repartition="any_time"), ACME)
    await world.settle()
    await world.later(10)
    await world.lose("n0")
    await world.turn(2)
    await world.settle()
    world.grid.gco2_per_kwh["GB"] = 300
    await world.later(10)
    plan = await searched(world, frugal_small)
    assert (plan["trigger"], plan["state"]) == ("intensity", "applied")
    assert plan["detail"] == "There is nothing for streets with 1 GPU."
    assert {each["name"] for each in tried(plan)} == {"photos"}
