"""Fleets and applications on a real database: planned, carried out, and whatever happens on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from services.contracts.apps import AppList, AppReportQuery, FleetList
from services.contracts.identity import Identity, Role
from services.contracts.queries import PageQuery
from services.kit.problems import ProblemError
from services.serving.repository.cluster import read_cluster
from tests.serving.fleets import ACME, OPERATOR, FleetWorld, a_fleet, a_fleet_world, an_app


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[FleetWorld]:
    async with a_fleet_world(database_url) as made:
        yield made


async def test_base_runs_first_and_then_what_the_search_found(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    assert await world.plans() == [("first", "applied")]
    assert await world.running() == {"photos big.7g": 2}
    assert not world.asked

    world.grid.gco2_per_kwh["GB"] = 260
    await world.later(10)
    plan = await world.settle()

    assert await world.plans() == [("first", "applied"), ("intensity", "applied")]
    assert world.asked == [plan["id"]]
    (found,) = plan["result"]["applications"]
    assert found["keeps_limits"]
    assert await world.running() == {
        f"photos {each['variant']}.{each['slice']}": each["count"] for each in found["instances"]
    }
    shown = await world.apps.find("photos", ACME)
    assert {f"photos {each.variant}.{each.slice}": each.count for each in shown.running} == await world.running()
    assert len((await world.fleets.find("edge", ACME)).gpus) == 2
    assert (await world.database.fetchval("SELECT planned_revision FROM apps")) == 1


async def test_two_applications_share_the_fleet_and_one_that_is_deleted_leaves_it(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(gpus=4), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.apps.put("streets", an_app(requests_per_s=20), ACME)
    await world.later(10)
    await world.settle()
    running = await world.running()
    assert {each.partition(" ")[0] for each in running} == {"photos", "streets"}

    await world.apps.delete("streets", ACME)
    await world.turn(3)
    assert {each.partition(" ")[0] for each in await world.running()} == {"photos"}
    with pytest.raises(ProblemError, match="photos"):
        await world.fleets.delete("edge", OPERATOR)
    await world.apps.delete("photos", ACME)
    await world.turn(3)
    await world.fleets.delete("edge", OPERATOR)
    await world.turn(3)
    assert all(not sizes for sizes in (await world.cuts()).values())
    assert await world.database.fetchval("SELECT count(*) FROM fleets") == 0
    assert {row["owner"] for row in await world.database.fetch("SELECT owner FROM gpu_partitions")} == {None}


async def test_a_new_application_has_base_on_a_free_gpu_at_once(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(gpus=4), OPERATOR)
    await world.apps.put("photos", an_app(min_interval_s=3_600), ACME)
    await world.apps.put("streets", an_app(min_interval_s=3_600), ACME)
    await world.settle()
    await world.apps.delete("streets", ACME)
    await world.turn(3)
    await world.apps.put("parks", an_app(min_interval_s=3_600), ACME)
    await world.turn(3)
    assert await world.running() == {"photos big.7g": 2, "parks big.7g": 1}
    assert await world.plans() == [("first", "applied")]


async def test_base_is_divided_anew_at_once_for_a_new_application(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(gpus=4), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    assert await world.running() == {"photos big.7g": 4}
    await world.apps.put("streets", an_app(min_interval_s=3_600), ACME)
    await world.settle()
    assert await world.running() == {"photos big.7g": 2, "streets big.7g": 2}
    assert (await world.plans(), world.asked) == ([("first", "applied"), ("parameter", "applied")], [])


async def test_an_application_that_comes_while_base_is_carried_out_is_taken_into_that_plan(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(gpus=4), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.turn(3)
    assert await world.plans() == [("first", "carrying_out")]
    await world.apps.put("streets", an_app(), ACME)
    await world.settle()
    assert await world.plans() == [("first", "applied")]
    assert await world.running() == {"photos big.7g": 2, "streets big.7g": 2}
    assert await world.database.fetchval("SELECT min(planned_revision) FROM apps") == 1


async def test_a_gpu_on_which_a_job_runs_does_not_keep_applications_waiting(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.turn()
    await world.database.execute("UPDATE gpu_partitions SET state = 'pending' WHERE gpu = 1")
    await world.database.execute("INSERT INTO device_claims (node_id, device, allocation_id) VALUES ('n0', 1, 'a')")
    await world.apps.put("photos", an_app(), ACME)
    await world.turn(3)
    assert await world.running() == {"photos big.7g": 1}
    await world.database.execute("DELETE FROM device_claims WHERE allocation_id = 'a'")
    await world.settle()
    assert await world.running() == {"photos big.7g": 2}


async def test_a_fleet_whose_gpus_jobs_use_says_so_and_begins_by_itself(world: FleetWorld) -> None:
    for gpu in range(4):
        await world.use(gpu, f"job_{gpu}")
    await world.fleets.put("edge", a_fleet(gpus=2), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.turn(3)
    shown = await world.fleets.find("edge", OPERATOR)
    assert (shown.plan, shown.missing_gpus) == (None, 2)
    assert shown.detail is not None
    assert "Jobs still run on all of its GPUs" in shown.detail
    assert [gpu.detail for gpu in shown.gpus] == ["job_0 runs on it until it ends", "job_1 runs on it until it ends"]
    assert {gpu.detail for gpu in (await world.fleets.find("edge", ACME)).gpus} == {"A job runs on it until it ends"}

    await world.use(1, None)
    await world.settle()
    assert await world.running() == {"photos big.7g": 1}
    assert (await world.fleets.find("edge", OPERATOR)).detail is None
    await world.use(0, None)
    await world.later(10)
    await world.turn(2)
    plan = await world.settle()
    assert await world.plans() == [("first", "applied"), ("gpus", "applied")]
    assert plan["basis"]["gpus"] == [["n0", 0], ["n0", 1]]


async def test_a_plan_that_waits_is_given_up_for_a_newer_one(world: FleetWorld) -> None:
    await cut_by_plan(world, requests_per_s=20)  # both GPUs are needed
    for _ in range(10):
        await world.turn()
        plan = await world.plan()
        if plan["detail"]:
            break
    assert plan["detail"] == "It waits until a GPU can be spared within the SLA of photos."
    await world.turn(2)
    assert (await world.plan())["id"] == plan["id"]
    world.grid.gco2_per_kwh["GB"] = 100
    await world.later(10)
    await world.turn(2)
    assert (await world.plans())[-2] == ("intensity", "superseded")
    assert (await world.plan())["id"] != plan["id"]


async def cut_by_plan(world: FleetWorld, **changes: Any) -> None:
    """Bring a fleet of two GPUs to BASE, and begin a plan that cuts them."""
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(carbon_weight=0.9, **changes), ACME)
    await world.settle()
    world.grid.gco2_per_kwh["GB"] = 400
    await world.later(10)


async def test_a_planner_that_is_killed_at_any_turn_ends_with_the_same(world: FleetWorld) -> None:
    await cut_by_plan(world)
    for _ in range(60):
        is_solving = (await world.plan())["state"] == "solving"
        await world.turn(2 if is_solving else 1)  # whoever is killed before the answer asks again
        world.planner = world.another()
        plan = await world.plan()
        if plan["state"] == "applied" and plan["trigger"] == "intensity":
            break
    await world.turn()
    (found,) = plan["result"]["applications"]
    assert await world.running() == {
        f"photos {each['variant']}.{each['slice']}": each["count"] for each in found["instances"]
    }
    assert set(world.asked) == {plan["id"]}, "a search that is asked for again is the same"


async def test_a_driver_that_refuses_ends_the_plan_and_everything_runs_on(world: FleetWorld) -> None:
    await cut_by_plan(world)
    world.refusing = {0, 1}
    plan = await world.settle("failed")
    assert "could not be cut into" in plan["detail"]
    assert "the driver says no" in plan["detail"]
    await world.turn(3)
    assert await world.running() == {"photos big.7g": 2}
    assert all(not sizes for sizes in (await world.cuts()).values())

    world.refusing = set()
    assert (await world.plans())[-1] == ("intensity", "failed"), "it is not tried again at once"
    await world.later(11)
    await world.settle()
    assert (await world.plans())[-1] == ("intensity", "applied")


async def test_a_search_without_an_answer_is_a_failure_that_is_tried_again_ever_later(world: FleetWorld) -> None:
    await cut_by_plan(world)
    world.fails = "The optimizer is full."
    waits: list[float] = []
    for _ in range(3):
        await world.settle("failed")
        waits.append(await world.database.fetchval("SELECT extract(epoch FROM retry_at - now())::float8 FROM fleets"))
        await world.later(3_600)
    assert [round(wait, -1) for wait in waits] == [10, 20, 40]
    assert await world.running() == {"photos big.7g": 2}
    world.fails = None
    await world.settle()
    assert await world.database.fetchval("SELECT failures FROM fleets") == 0


async def test_an_instance_that_does_not_come_up_is_left_out_of_the_next_plan(world: FleetWorld) -> None:
    await cut_by_plan(world)
    plan = await world.settle()
    crashing = {each.partition(" ")[2] for each in await world.running()}
    await world.database.execute(
        "UPDATE pool_instances SET state = 'ended', reason = 'failed', ended_at = now() WHERE mode = ANY($1)",
        [*crashing],
    )
    await world.later(10)
    world.grid.gco2_per_kwh["GB"] = 300
    await world.turn(2)
    asked = (await world.plan())["problem"]["applications"][0]["variants"]
    left = {f"{variant['name']}.{each['slice']}" for variant in asked for each in variant["profiles"]}
    assert plan["id"] != (await world.plan())["id"]
    assert left & crashing <= {"big.7g"}


async def test_a_member_that_does_not_start_holds_no_other(world: FleetWorld) -> None:
    await world.node("n1", 1)
    await world.fleets.put("edge", a_fleet(gpus=3), OPERATOR)
    world.failing = {"maps"}
    big = an_app().variants[1]
    whole = big.model_copy(update={"profiles": big.profiles[-1:]})
    await world.apps.put("maps", an_app(variants=[whole.model_dump(mode="json")]), ACME)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    assert {name.partition(" ")[0] for name in await world.running()} == {"photos"}
    for change in ("parameter", "intensity"):
        await world.later(10)
        if change == "parameter":
            await world.apps.put("photos", an_app(requests_per_s=13), ACME)
        else:
            world.grid.gco2_per_kwh["GB"] = 300
        await world.turn()
        await world.settle()
        assert (await world.plans())[-1] == (change, "applied")


async def test_a_plan_whose_new_instances_do_not_start_holds_nobodys_change(world: FleetWorld) -> None:
    await cut_by_plan(world)
    world.failing = {"photos"}
    assert "does not start on GPU" in (await world.settle("failed"))["detail"]
    world.failing = set()
    await world.apps.put("photos", an_app(requests_per_s=13), ACME)
    await world.later(1)  # the least time between two plans
    await world.turn()
    await world.settle()
    assert (await world.plans())[-1] == ("parameter", "applied"), "long before the failed plan is tried again"


async def test_gpus_that_are_lost_and_come_back_are_planned_for(world: FleetWorld) -> None:
    await world.node("n1", 1)
    await world.fleets.put("edge", a_fleet(gpus=5), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.later(10)
    await world.lose("n1")
    await world.settle()
    assert (await world.plans())[-1] == ("gpus", "applied")
    assert (await world.fleets.find("edge", OPERATOR)).missing_gpus == 1
    await world.later(10)
    await world.lose("n1", back=True)
    await world.settle()
    assert (await world.fleets.find("edge", OPERATOR)).missing_gpus == 0


async def test_a_latency_above_the_sla_is_planned_against(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.see("photos", answers=19, latency_ms=900)
    await world.later(60)
    await world.turn()
    assert await world.plans() == [("first", "applied")], "19 answers say nothing"
    now = datetime.now(UTC)
    for ago_s in range(0, 25, 5):
        await world.see("photos", answers=150, latency_ms=900, at=now - timedelta(seconds=ago_s))
    await world.turn()
    plan = await world.plan()
    assert plan["trigger"] == "sla"
    assert plan["problem"]["applications"][0]["requests_per_s"] == pytest.approx(30, rel=0.1)
    traffic = (await world.apps.find("photos", ACME)).traffic
    assert (traffic.answered, traffic.p95_ms, traffic.accuracy_pct) == (750, pytest.approx(900, rel=0.06), 84)


async def test_an_order_of_the_grid_is_met_within_the_sla_and_the_floor(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(carbon_weight=0, max_accuracy_loss_pct=8, min_interval_s=3_600), ACME)
    await world.settle()
    assert await world.running() == {"photos big.7g": 2}, "accuracy alone counts"

    await world.order("DE", name="elsewhere")
    await world.order("GB", timedelta(minutes=5), name="announced")
    await world.turn(3)
    assert await world.plans() == [("first", "applied")]
    await world.database.execute("UPDATE grid_orders SET start_at = now() WHERE id = 'announced'")
    plan = await world.settle()
    assert await world.plans() == [("first", "applied"), ("grid_order", "applied")]
    (found,) = plan["result"]["applications"]
    assert (found["keeps_limits"], found["accuracy_pct"] < 84) == (True, True)
    assert not any("big" in each for each in await world.running())

    await world.database.execute("UPDATE grid_orders SET withdrawn_at = now()")
    await world.turn(3)
    assert len(await world.plans()) == 2, "a fleet goes back when it may plan again"
    await world.later(3_600)
    await world.settle()
    assert (await world.plans())[-1] == ("grid_order", "applied")
    assert not any("small" in each for each in await world.running())


async def test_without_a_floor_an_order_leaves_the_accuracy_to_its_weight(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(carbon_weight=0), ACME)
    await world.settle()
    await world.order("GB")
    await world.settle()
    assert await world.plans() == [("first", "applied"), ("grid_order", "applied")]
    assert not any("small" in each for each in await world.running())


async def test_an_application_whose_mode_is_fixed_gets_proposals_that_an_operator_carries_out(
    world: FleetWorld,
) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(mode="fixed", carbon_weight=0.9), ACME)
    await world.settle()
    assert await world.running() == {"photos big.7g": 2}
    await world.later(10)
    world.grid.gco2_per_kwh["GB"] = 400
    plan = await world.settle("proposed")
    shown = await world.apps.find("photos", ACME)
    assert shown.only_proposes == "The mode of one of its applications is fixed."
    assert shown.plan is not None
    assert shown.plan.applications[0].instances
    await world.turn(3)
    assert await world.running() == {"photos big.7g": 2}

    await world.fleets.apply("edge", plan["id"], OPERATOR)
    await world.settle()
    assert await world.running() != {"photos big.7g": 2}
    assert (await world.fleets.apply("edge", plan["id"], OPERATOR)).state == "applied"


async def test_gpus_that_cannot_be_cut_run_base_and_get_proposals(world: FleetWorld) -> None:
    await world.node("n1", 2, model="V100-SXM2-32GB")
    await world.fleets.put("edge", a_fleet(gpu_model="V100-SXM2-32GB"), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.later(10)
    world.grid.gco2_per_kwh["GB"] = 400
    plan = await world.settle("proposed")
    assert "cannot be cut into MIG slices" in plan["detail"]
    with pytest.raises(ProblemError, match="cannot be cut"):
        await world.fleets.apply("edge", plan["id"], OPERATOR)

    await world.apps.put("streets", an_app(), ACME)
    await world.later(10)
    await world.settle()
    assert await world.running() == {"photos big.7g": 1, "streets big.7g": 1}


async def test_a_fleet_takes_and_gives_back_gpus_as_its_spec_says(world: FleetWorld) -> None:
    await world.database.execute(
        "INSERT INTO gpu_partitions (node_id, gpu, revision, sizes) VALUES ('n0', 0, 1, '[3, 3]')"
    )
    await world.fleets.put("edge", a_fleet(gpus=4), OPERATOR)
    await world.turn()
    taken = await world.database.fetch("SELECT gpu FROM gpu_partitions WHERE owner = 'edge' ORDER BY gpu")
    assert [row["gpu"] for row in taken] == [1, 2, 3], "an operator cut the first one"
    assert (await world.fleets.find("edge", OPERATOR)).missing_gpus == 1
    _, is_new = await world.fleets.put("edge", a_fleet(gpus=1), OPERATOR)
    assert not is_new
    await world.turn(2)
    assert await world.database.fetchval("SELECT count(*) FROM gpu_partitions WHERE owner = 'edge'") == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"fleet": "nowhere"}, "There is no fleet nowhere"),
        ({"fleet": "closed"}, "There is no fleet closed"),
        ({"fleet": "small"}, "none is left for photos"),
    ],
)
async def test_an_application_needs_a_fleet_with_room(world: FleetWorld, spec: dict[str, Any], said: str) -> None:
    await world.fleets.put("closed", a_fleet(tenants=["other"]), OPERATOR)
    await world.fleets.put("small", a_fleet(gpus=1), OPERATOR)
    await world.apps.put("first", an_app(fleet="small"), ACME)
    with pytest.raises(ProblemError, match=said):
        await world.apps.put("photos", an_app(**spec), ACME)
    assert [app.name for app in (await world.apps.page(PageQuery(), ACME, AppList)).items] == ["first"]
    assert [fleet.name for fleet in (await world.fleets.page(PageQuery(), ACME, FleetList)).items] == ["small"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zone": "XX"}, "There is no zone XX"),
        ({"gpu_model": "Abacus"}, "give idle_w"),
        ({"signal": "marginal"}, "not marginal"),
    ],
)
async def test_a_fleet_that_makes_no_sense_is_refused(world: FleetWorld, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        await world.fleets.put("edge", a_fleet(**changes), OPERATOR)


async def test_arrivals_are_counted_over_the_time_that_was_reported(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    now = datetime.now(UTC)
    for ago_s in (10, 15, 20, 25):
        await world.see("photos", answers=100, latency_ms=80, at=now - timedelta(seconds=ago_s))
    assert (await world.apps.find("photos", ACME)).traffic.requests_per_s == pytest.approx(20, rel=0.2)


async def test_a_report_adds_up(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.database.execute("UPDATE apps SET created_at = now() - interval '1 hour'")
    now = datetime.now(UTC)
    await world.see("photos", answers=500, latency_ms=80, at=now)
    await world.see("photos", answers=1_000, latency_ms=80, at=now)  # the same window again
    report = await world.apps.report("photos", AppReportQuery(hours=1, step_s=60), ACME)
    assert (report.requests, sum(sum(step.by_variant.values()) for step in report.mix)) == (1_000, 1_000)
    assert (report.accuracy_pct, report.accuracy_loss_pct, report.sla_ok_share) == (84, 0, 1)
    assert report.base_gco2_per_1000 is None, "the ledger has no intensity yet"


async def draw(world: FleetWorld, job: str, begun: datetime, gpu_j: float) -> None:
    """Have the ledger say what an instance drew for a minute, and its host with it 400 J."""
    await world.database.execute(
        "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j, "
        "cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, "
        "carbon_gco2) VALUES ('n0', 'b', 1, $1, $1, $2, $3, 1, $4, 300, 100, 'counter', 'GB', '', 200, false, 1.2, $5)",
        *(job, begun, begun + timedelta(seconds=60), gpu_j, (gpu_j + 400) / 3.6e6 * 1.2 * 200),
    )


async def test_a_report_charges_requests_with_nothing_of_those_that_are_forgotten(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.database.execute("UPDATE apps SET created_at = now() - interval '40 days'")
    now, kept = datetime.now(UTC), timedelta(days=world.settings.traffic_keep_days)
    await world.see("photos", answers=100, latency_ms=80, at=now - timedelta(seconds=10))
    job = await world.database.fetchval("SELECT job_id FROM pool_instances WHERE state = 'ready' ORDER BY id LIMIT 1")
    await draw(world, job, now - kept - timedelta(hours=1), 3_600.0)
    report = await world.apps.report("photos", AppReportQuery(hours=31 * 24, step_s=86_400), ACME)
    assert (report.requests, report.energy_j, report.gco2_per_1000) == (100, 0, 0)
    assert report.start_at == report.end_at - kept


@pytest.mark.parametrize("whole", [True, False])
async def test_a_report_compares_like_with_like(world: FleetWorld, whole: bool) -> None:
    await world.fleets.put("edge", a_fleet(idle_w=50), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.database.execute("UPDATE apps SET created_at = now() - interval '1 hour'")
    begun = datetime.now(UTC) - timedelta(seconds=60)
    await world.see("photos", answers=100, latency_ms=80, at=begun + timedelta(seconds=10))
    await world.see("photos", answers=25, latency_ms=2_000, at=begun + timedelta(seconds=20))
    (instance, *others) = await world.database.fetch("SELECT * FROM pool_instances WHERE state = 'ready' ORDER BY id")
    mode, held = ("big.7g", 1.0) if whole else ("small.1g", 1 / 7)
    await world.database.execute("UPDATE pool_instances SET mode = $1 WHERE id = $2", mode, instance["id"])
    assert others, "BASE is on both GPUs"
    busy_s = 125 * 0.061
    gpu_j = 50 * 60 * held + (busy_s * 138 if whole else 125 * 0.025 * 17)
    await draw(world, instance["job_id"], begun, gpu_j)
    report = await world.apps.report("photos", AppReportQuery(hours=1, step_s=3_600), ACME)

    base_j = 50 * max(60 * held, busy_s) + busy_s * 138 + 400
    assert report.base_gco2_per_1000 == pytest.approx(8 * base_j / 3.6e6 * 1.2 * 200)
    assert report.carbon_saving_pct == pytest.approx(100 * (base_j - gpu_j - 400) / base_j, abs=1e-9)
    assert report.carbon_saving_pct == pytest.approx(0, abs=1e-9) if whole else report.carbon_saving_pct > 30
    assert report.sla_ok_share == 0.8


async def test_pools_are_planned_without_the_gpus_of_fleets(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.turn(2)
    async with world.repository.reading() as queries:
        cluster = await read_cluster(queries.connection)
    (node,) = cluster.nodes
    assert sorted(node.devices) == [2, 3]
    assert "app:photos" not in cluster.needs


async def test_gpus_of_another_model_than_the_fleet_is_to_have_are_given_back(world: FleetWorld) -> None:
    await world.node("n1", 2, model="V100-SXM2-32GB")
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    await world.later(10)

    await world.fleets.put("edge", a_fleet(gpu_model="V100-SXM2-32GB"), OPERATOR)
    await world.turn(3)

    owned = await world.database.fetch("SELECT node_id, gpu FROM gpu_partitions WHERE owner = 'edge' ORDER BY 1, 2")
    assert [tuple(row) for row in owned] == [("n1", 0), ("n1", 1)]


async def test_a_proposal_is_refused_once_an_application_has_changed(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(mode="fixed", carbon_weight=0.9), ACME)
    await world.settle()
    await world.later(10)
    world.grid.gco2_per_kwh["GB"] = 400
    plan = await world.settle("proposed")
    await world.apps.put("photos", an_app(mode="fixed", variants=[an_app().most_accurate.model_dump()]), ACME)
    with pytest.raises(ProblemError, match="outdated"):
        await world.fleets.apply("edge", plan["id"], OPERATOR)


async def test_a_tenant_sees_of_a_fleet_its_own_applications_alone(world: FleetWorld) -> None:
    other = Identity(tenant_id="umbra", role=Role.USER, key_id="key_umbra")
    await world.fleets.put("edge", a_fleet(gpus=4, tenants=["acme", "umbra"]), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.apps.put("streets", an_app(), other)
    await world.settle()
    await world.later(10)
    world.grid.gco2_per_kwh["GB"] = 400
    await world.settle()
    seen: dict[str, list[set[str]]] = {}
    for caller in (OPERATOR, ACME, other):
        fleet = await world.fleets.find("edge", caller)
        plans = await world.fleets.plans("edge", PageQuery(), caller)
        (page,) = (await world.fleets.page(PageQuery(), caller, FleetList)).items
        assert fleet.plan is not None
        assert page == fleet
        assert fleet.spec.tenants == (["acme", "umbra"] if caller is OPERATOR else [caller.tenant_id])
        named = [{each.name for each in plan.applications} for plan in (fleet.plan, plans.items[0])]
        seen[caller.tenant_id] = [set(fleet.apps), *named]
    assert seen == {"ops": 3 * [{"photos", "streets"}], "acme": 3 * [{"photos"}], "umbra": 3 * [{"streets"}]}

    detail = "It waits until a GPU can be spared within the SLA of photos, streets."
    await world.database.execute("UPDATE fleet_plans SET detail = $1", detail)
    for caller, app, sentence in (
        (OPERATOR, "photos", detail),
        (ACME, "photos", detail.replace("streets", "(another tenant's)")),
        (other, "streets", detail.replace("photos", "(another tenant's)")),
    ):
        fleet = await world.fleets.find("edge", caller)
        plans = await world.fleets.plans("edge", PageQuery(), caller)
        shown = await world.apps.find(app, caller)
        assert {plan and plan.detail for plan in (fleet.plan, plans.items[0], shown.plan)} == {sentence}

    await world.database.execute("UPDATE apps SET created_at = now() + interval '1 s' WHERE name = 'photos'")
    fleet = await world.fleets.find("edge", ACME)
    assert fleet.plan is not None
    assert fleet.plan.applications == [], "what it tells was of another one of that name"


async def test_what_a_router_says_of_the_future_does_not_count(world: FleetWorld) -> None:
    """It would be the present for as long as that router's clock is ahead."""
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    with pytest.raises(ProblemError, match="Not yet"):
        await world.see("photos", answers=1_000, latency_ms=50, at=datetime.now(UTC) + timedelta(hours=1))
    await world.see("photos", answers=10, latency_ms=50, at=datetime.now(UTC) + timedelta(seconds=30))
    assert await world.database.fetchval("SELECT sum(arrivals) FROM app_observations") == 10


async def test_searches_that_another_process_decided_are_not_kept(world: FleetWorld) -> None:
    await world.fleets.put("edge", a_fleet(), OPERATOR)
    await world.apps.put("photos", an_app(), ACME)
    await world.settle()
    other = world.another()
    for intensity in (400, 100, 400):
        await world.later(10)
        world.grid.gco2_per_kwh["GB"] = intensity
        await world.planner.look()
        await other.look()
        await world.settle()
    assert len(other._solving) <= 1
    await world.apps.delete("photos", ACME)
    await world.turn(4)
    await world.database.execute("DELETE FROM apps")
    await world.fleets.delete("edge", OPERATOR)
    await world.turn(2)
    await other.look()
    assert other._solving == {}
