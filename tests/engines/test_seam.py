"""Jobs of an engine, from its bridge's reports to decisions and back, as rows and commands."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from services.contracts.engines import EngineJobState, EngineMode, EngineShare
from services.core.cycle.plan import Preempt
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.kit.ids import utc_now
from services.scheduler.engines.ingest import claims_of
from services.scheduler.planning.apply import _preempt
from services.scheduler.repository.engines import HeldRow
from tests.engines.bridge import SUBMITTED, Bridge, a_job, node, on
from tests.scheduler.world import World


async def test_a_job_is_released_by_the_plan_and_follows_what_the_engine_does(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol()
    await bridge.say(a_job("7", gpus=2))
    assert (await bridge.job("7"))["state"] == "starting"
    assert await bridge.sent() == [("7", "release")]
    assert len((await bridge.claims())["7"]) == 2

    await bridge.say(a_job("7", "running", gpus=2, shares=[on("g2", 1, 3)], revision=1, started_at=SUBMITTED))
    job = await bridge.job("7")
    assert (job["state"], job["generation"]) == ("running", 1)
    assert (await bridge.claims())["7"] == {("slurm.g2", 1), ("slurm.g2", 3)}

    await bridge.say(a_job("7", "succeeded", gpus=2, exit_code=0, revision=1))
    assert (await bridge.job("7"))["state"] == "succeeded"
    assert await bridge.claims() == {}
    assert await world.events(job["id"]) == ["submitted", "starting", "deviation", "running", "succeeded"]


async def test_a_run_of_which_nobody_says_where_it_is_keeps_no_other_job_from_its_turn(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol()
    await bridge.say(a_job("1", gpus=2))
    assert len((await bridge.claims())["1"]) == 2

    await bridge.say(a_job("1", "running", gpus=2, revision=1), a_job("2", "running", gpus=2), a_job("3", gpus=2))
    await world.scheduler.turn()

    assert [(await bridge.job(name))["state"] for name in "123"] == ["running", "running", "starting"]
    assert {name: len(held) for name, held in (await bridge.claims()).items()} == {"1": 2, "3": 2}
    await bridge.say(
        a_job("2", "running", gpus=2, shares=[on("g2", 1, 3)]), a_job("1", "succeeded", gpus=2, revision=1)
    )
    await world.scheduler.turn()
    assert (await bridge.claims())["2"] == {("slurm.g2", 1), ("slurm.g2", 3)}
    assert "deviation" not in await world.events((await bridge.job("1"))["id"])


async def test_its_jobs_are_numbered_with_those_of_their_tenant(world: World) -> None:
    await world.fetch(
        "INSERT INTO tenants (id, limits, last_number) VALUES ('default', '{}', 4) "
        "ON CONFLICT (id) DO UPDATE SET last_number = 4 RETURNING 1"
    )
    bridge = Bridge(world)
    await bridge.enrol()
    await bridge.say(a_job("7"), a_job("8"))
    await bridge.say(a_job("7"), a_job("8"), a_job("9"))

    numbers = [(await bridge.job(each))["number"] for each in ("7", "8", "9")]

    assert (sorted(numbers[:2]), numbers[2]) == ([5, 6], 7)
    assert await world.fetch("SELECT last_number FROM tenants WHERE id = 'default'") == [(7,)]


@pytest.mark.parametrize(("kind", "action"), [("slurm", "release"), ("kueue", "release"), ("ray", "hold")])
async def test_what_does_not_fit_waits_in_its_engines_queue_if_that_has_one(
    world: World, kind: str, action: str
) -> None:
    """Its engine is told so once; Ray, which has no queue, is told to hold it."""
    bridge = Bridge(world, kind=kind)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", gpus=4), a_job("2", gpus=4, submitted_at=SUBMITTED + timedelta(seconds=1)))
    assert [sorted(await bridge.sent()) for _ in range(2)][1] == [("1", "release"), ("2", action)]

    await bridge.say(a_job("1", "running", gpus=4, shares=[on("g1", 0, 1, 2, 3)], revision=1))
    await world.scheduler.turn()

    assert len(await bridge.sent()) == 2
    assert (await bridge.job("2"))["reason"] == "not_enough_free_gpus"


async def test_what_waits_for_something_else_than_gpus_takes_none(world: World) -> None:
    """Its engine shows why once it is released: what was planned for it is free, and it is planned again after that."""
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", gpus=4))
    assert len((await bridge.claims())["1"]) == 4

    await bridge.say(a_job("1", gpus=4, revision=1, blocked="QOSMaxGRESPerUser"), a_job("2", gpus=4))
    await world.scheduler.turn()

    job = await bridge.job("1")
    assert (job["state"], job["reason"], job["gated"]) == ("queued", "engine_limit", True)
    assert "QOSMaxGRESPerUser" in job["detail"]
    assert {name: len(held) for name, held in (await bridge.claims()).items()} == {"2": 4}
    assert (await bridge.decision("1"))["action"] == "release"
    query = "SELECT count FROM engine_days WHERE what = 'deviation_not_started'"
    assert [row["count"] for row in await world.fetch(query)] == [1]

    await bridge.say(a_job("1", gpus=4, revision=1), a_job("2", "cancelled", gpus=4))
    await world.scheduler.turn()

    assert (await bridge.job("1"))["state"] == "starting"
    assert not (await bridge.job("1"))["gated"]


async def test_what_is_blocked_from_the_first_is_never_planned(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", gpus=4, blocked="Licenses"), a_job("2", gpus=4))
    await world.scheduler.turn()

    assert [(await bridge.job(name))["state"] for name in ("1", "2")] == ["queued", "starting"]
    assert await bridge.decision("1") == {}


async def test_a_job_whose_size_is_to_be_set_waits_for_that_and_keeps_it(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", gpus=4))
    await bridge.say(a_job("1", "running", gpus=4, shares=[on("g1", 0, 1, 2, 3)], revision=1), a_job("2", max_gpus=4))
    decision = await bridge.decision("2")
    assert (decision["action"], decision["note"]) == ("hold", "waits:size")

    await bridge.say(a_job("1", "succeeded", gpus=4))
    await world.scheduler.turn()
    decision = await bridge.decision("2")
    assert decision["action"] == "release"
    await bridge.say(a_job("3", "running", gpus=4, shares=[on("g1", 0, 1, 2, 3)]))
    await world.fetch("UPDATE allocations SET started_at = now() - interval '1 hour' WHERE state = 'starting'")
    await world.scheduler.turn()

    assert (await bridge.job("2"))["state"] == "queued"
    assert await bridge.decision("2") == decision


async def test_runs_that_we_did_not_start_are_admitted_with_what_they_hold(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    theirs = a_job("9", "running", gpus=3, steered=False, stoppable=False, shares=[on("g1", 0, 1, 2)])
    await bridge.say(theirs, a_job("10", gpus=2), a_job("11", steered=False))
    await world.scheduler.turn()

    assert (await bridge.job("9"))["state"] == "running"
    assert (await bridge.job("10"))["reason"] == "not_enough_free_gpus"  # one GPU is left
    assert await world.fetch("SELECT FROM jobs WHERE external_id = '11'") == []
    assert all(external_id == "10" for external_id, _ in await bridge.sent())


async def test_a_run_begins_neither_later_than_now_nor_before_its_job_was_there(world: World) -> None:
    """Else what it holds counted as less than nothing, or as decades."""
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    at = {"1": utc_now() + timedelta(days=900), "2": datetime(1970, 1, 2, tzinfo=UTC)}
    for name, started_at in at.items():
        await bridge.say(a_job(name, "running", shares=[on("g1", int(name))], started_at=started_at))
    await world.scheduler.turn()

    query = (
        "SELECT a.started_at BETWEEN j.submitted_at AND now() AND a.running_at = a.started_at "
        "FROM allocations a JOIN jobs j ON j.id = a.job_id"
    )
    assert await world.fetch(query) == [(True,), (True,)]


async def test_what_a_user_asked_for_is_kept_as_one_of_the_sizes_of_the_gang(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=2)
    sizes = {"gpus": 2, "max_gpus": 8, "step_gpus": 2}
    await bridge.say(
        a_job("1", **sizes, asked_gpus=4), a_job("2", **sizes), a_job("3", **sizes, asked_gpus=16),
        a_job("4", **sizes, asked_gpus=5),
    )  # fmt: skip
    found = await world.fetch("SELECT external_id, spec #>> '{gpus,asked}' AS asked FROM jobs ORDER BY external_id")
    assert [row["asked"] for row in found] == ["4", "2", "8", "4"]


async def test_our_agents_get_no_jobs_of_an_engine_nor_its_nodes_ours(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    own = await world.job(1)
    await bridge.say(a_job("1", gpus=8))
    await world.node("n1", 8, model="A100")
    await world.scheduler.turn()

    assert await world.state(own) == "starting"
    assert (await bridge.job("1"))["reason"] == "no_eligible_node"
    (row,) = await world.fetch("SELECT shares FROM allocations WHERE job_id = $1", own)
    assert row["shares"][0]["node_id"] == "n1"


async def test_two_runs_swap_places_and_no_device_is_held_twice(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=2, gpus=2)
    await bridge.say(a_job("1", gpus=2), a_job("2", gpus=2))
    planned = await bridge.claims()
    swapped = {"1": planned["2"], "2": planned["1"]}
    where = {job: on(next(iter(held))[0].removeprefix("slurm."), 0, 1) for job, held in swapped.items()}
    await bridge.say(*(a_job(job, "running", gpus=2, shares=[share], revision=1) for job, share in where.items()))

    assert await bridge.claims() == swapped


async def test_a_job_that_the_engine_starts_and_requeues_by_itself_is_followed(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", "running", gpus=4, shares=[on("g1", 0, 1, 2, 3)], steered=False))
    await bridge.say(a_job("2"))
    await bridge.say(a_job("1", "succeeded", gpus=4), a_job("2", "running", shares=[on("g1", 2)], revision=1))
    job = await bridge.job("2")
    assert await world.events(job["id"]) == ["submitted", "running"]  # as it might: it waited in its engine's queue

    await bridge.say(a_job("2", "pending", revision=1))
    await world.scheduler.turn()

    assert (await bridge.job("2"))["state"] == "starting"  # it waited again, and was planned again
    assert (await world.fetch("SELECT count FROM engine_days WHERE what = 'deviation_requeued_by_engine'"))[0][0] == 1


async def test_a_cancellation_reaches_the_engine_in_every_state(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1, gpus=1)
    await bridge.say(a_job("1", "running", shares=[on("g1", 0)]))
    await bridge.say(a_job("2"))
    running, waiting = await bridge.job("1"), await bridge.job("2")
    await world.ask(running["id"], "cancel")
    await world.fetch("UPDATE jobs SET state = 'cancelled', reason = 'cancelled' WHERE id = $1", waiting["id"])
    await world.scheduler.turn()
    assert {await_["action"] for await_ in [await bridge.decision("1"), await bridge.decision("2")]} == {"cancel"}

    await bridge.say(a_job("1", "cancelled"), a_job("2", "cancelled"))

    assert [(await bridge.job(number))["state"] for number in ("1", "2")] == ["cancelled", "cancelled"]
    assert await bridge.claims() == {}


async def test_a_preempted_run_is_requeued_and_waits(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1, gpus=1)
    await bridge.say(a_job("1", "running", shares=[on("g1", 0)]))
    job = await bridge.job("1")
    await world.fetch("UPDATE jobs SET hold_requested = true WHERE id = $1", job["id"])
    await world.scheduler.turn()
    assert (await bridge.decision("1"))["action"] == "requeue"
    assert (await bridge.job("1"))["state"] == "preempting"

    await bridge.say(a_job("1", revision=1))
    await world.scheduler.turn()

    assert (await bridge.job("1"))["state"] == "held"
    assert (await bridge.decision("1"))["action"] == "hold"
    assert (await bridge.job("1"))["preemptions"] == 1


async def scale_in(world: World, job_id: str, gpus: int) -> None:
    """Have a plan want a smaller size of a running job."""
    async with world.database.transaction() as connection:
        await _preempt(connection, [Preempt(JobId(job_id), Reason.SCALE_IN, gpus)])


async def test_a_shrinkable_run_loses_gpus_in_place_and_is_stopped_if_its_engine_refuses(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol()
    run = a_job("1", "running", shares=[on("g1", 0, 1), on("g2", 0, 1)], gpus=4, max_gpus=4, shrinkable=True)
    await bridge.say(run)
    job = await bridge.job("1")
    await scale_in(world, job["id"], 2)
    decision = await bridge.decision("1")
    assert (decision["action"], decision["gpus"], (await bridge.job("1"))["state"]) == ("shrink", 2, "running")

    await bridge.say(run.model_copy(update={"shares": [EngineShare(node="g1", devices=[0, 1])], "revision": 1}))
    assert (await bridge.claims())["1"] == {("slurm.g1", 0), ("slurm.g1", 1)}
    assert ((await bridge.job("1"))["generation"], await world.events(job["id"])) == (
        1,
        ["submitted", "deviation", "running", "resized"],
    )
    assert await world.fetch("SELECT FROM engine_days WHERE what = 'deviation_other_size'") == []

    await bridge.say(run.model_copy(update={"revision": 1}))  # it has changed its mind
    await scale_in(world, job["id"], 3)
    await bridge.say(run.model_copy(update={"revision": 2, "refused": "no"}))
    await scale_in(world, job["id"], 3)
    assert (await bridge.decision("1"))["action"] == "requeue"
    assert (await bridge.job("1"))["state"] == "preempting"


async def test_a_refused_stop_leaves_the_run_as_it_is(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1, gpus=1)
    run = a_job("1", "running", shares=[on("g1", 0)])
    await bridge.say(run)
    job = await bridge.job("1")
    await world.ask(job["id"], "hold")
    revision = (await bridge.decision("1"))["revision"]
    await world.fetch("UPDATE jobs SET hold_requested = false WHERE id = $1", job["id"])

    await bridge.say(run.model_copy(update={"revision": revision, "refused": "it may not be requeued"}))

    assert (await bridge.job("1"))["state"] == "running"
    assert len((await bridge.claims())["1"]) == 1


async def test_a_dry_run_changes_nothing_and_counts_what_it_would_have_done(world: World) -> None:
    bridge = Bridge(world, EngineMode.DRY_RUN)
    await bridge.enrol(nodes=1, gpus=1)
    await bridge.say(a_job("1"), a_job("2"))
    for _ in range(3):
        await world.scheduler.turn()

    assert await bridge.sent() == []
    assert await bridge.claims() == {}
    assert (await bridge.job("1"))["state"] == "queued"
    rows = await world.fetch("SELECT what, count FROM engine_days ORDER BY what")
    assert [tuple(row) for row in rows] == [("would_release", 2)]  # the second one waits in its engine's queue


async def test_a_job_that_the_engine_has_lost_has_failed_and_if_it_returns_it_is_a_new_one(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol()
    reply = await bridge.say(a_job("1"), present=[])
    assert reply.unreported == ["1"]
    await bridge.say(a_job("1", "missing"))
    lost = await bridge.job("1")
    assert (lost["state"], lost["reason"]) == ("failed", "engine_lost")

    await bridge.say(a_job("1"))
    again = await bridge.job("1")

    assert again["id"] != lost["id"]
    assert again["state"] in ("queued", "starting")


async def test_an_end_stands_when_a_crashed_engine_shows_an_older_state(world: World) -> None:
    """The same run waits or runs again, and is named as ended, once in the day's counts; a later run is a new job."""
    bridge = Bridge(world)
    await bridge.enrol()
    run = a_job("1", "running", shares=[on("g1", 0)], started_at=SUBMITTED, requeues=1)
    end = a_job("1", "succeeded", ended_at=SUBMITTED + timedelta(seconds=60), requeues=1)
    await bridge.say(run)
    await bridge.say(end)
    done = await bridge.job("1")
    for older in (run, a_job("1", requeues=1), a_job("1", requeues=0), run):
        assert (await bridge.say(older, present=["1"])).ended == ["1"]
    assert await bridge.job("1") == done
    assert done["state"] == "succeeded"
    assert await bridge.claims() == {}
    query = "SELECT what, count FROM engine_days WHERE what = 'deviation_rolled_back'"
    assert [tuple(row) for row in await world.fetch(query)] == [("deviation_rolled_back", 1)]
    assert (await world.fetch("SELECT count(*) FROM engine_jobs WHERE unfolded"))[0][0] == 0

    later = run.model_copy(update={"started_at": SUBMITTED + timedelta(seconds=61)})
    assert (await bridge.say(later)).ended == []
    again = await bridge.job("1")
    assert (again["state"], again["id"] != done["id"]) == ("running", True)
    await bridge.say(end.model_copy(update={"ended_at": SUBMITTED + timedelta(seconds=90)}))

    assert (await bridge.say(a_job("1", requeues=2))).ended == []
    states = [row["state"] for row in await world.fetch("SELECT state FROM jobs ORDER BY submitted_at, id")]
    assert sorted(states) == ["starting", "succeeded", "succeeded"]


async def test_a_run_that_was_stopped_stays_so_when_its_engine_shows_it_as_running(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1, gpus=1)
    run = a_job("1", "running", shares=[on("g1", 0)], requeues=0)
    await bridge.say(run)
    job = await bridge.job("1")
    await world.ask(job["id"], "hold")
    await bridge.say(a_job("1", requeues=1, revision=1))
    assert (await bridge.job("1"))["state"] == "held"

    reply = await bridge.say(run)

    assert (reply.ended, reply.stopped) == ([], ["1"])
    assert (await bridge.job("1"))["state"] == "held"
    assert await bridge.claims() == {}
    query = "SELECT count FROM engine_days WHERE what = 'deviation_rolled_back'"
    assert [row["count"] for row in await world.fetch(query)] == [1]
    assert (await bridge.say(run.model_copy(update={"requeues": 1}))).stopped == []
    assert (await bridge.job("1"))["state"] != "held"


async def test_a_bridge_that_falls_silent_loses_no_job(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1)
    await bridge.say(a_job("1", "running", shares=[on("g1", 0)]), a_job("2", gpus=4))
    await world.fetch("UPDATE nodes SET lease_until = now() - interval '1 hour' RETURNING 1")
    await world.scheduler.turn()

    assert (await bridge.job("1"))["state"] == "running"
    assert (await bridge.job("2"))["state"] == "queued"
    rows = await world.fetch("SELECT id FROM nodes WHERE state = 'lost' ORDER BY id")
    assert [row["id"] for row in rows] == ["slurm", "slurm.g1"]

    await bridge.say(nodes=[node("g1")])
    assert (await bridge.claims())["1"] == {("slurm.g1", 0)}


@pytest.mark.parametrize(("kind", "action"), [("slurm", "release"), ("ray", "hold")])
async def test_a_release_that_is_not_followed_frees_its_gpus(world: World, kind: str, action: str) -> None:
    """An engine with a queue of its own is left to start it when it sees fit."""
    bridge = Bridge(world, kind=kind)
    await bridge.enrol(nodes=1, gpus=1)
    await bridge.say(a_job("1"))
    await world.fetch("UPDATE allocations SET started_at = now() - interval '1 hour'")
    await world.scheduler._engines.look()

    assert (await bridge.job("1"))["state"] == "queued"
    assert await bridge.claims() == {}
    assert (await bridge.decision("1"))["action"] == action


async def test_a_bridge_that_starts_again_is_told_everything(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1, gpus=1)
    await bridge.say(a_job("1"), a_job("2"))

    reply = await bridge.say(wants_decisions=True)

    assert [(each.external_id, each.action.value) for each in reply.decisions] == [("1", "release"), ("2", "release")]


async def test_two_engines_may_have_jobs_of_one_id(world: World) -> None:
    """The report of one waits for its own turn, and is not taken for folded with the other's."""
    first, second = Bridge(world), Bridge(world, name="slurm-b")
    await first.enrol()
    await second.enrol()
    await first.say(a_job("1"))
    async with world.database.transaction() as connection:
        locked = "SELECT FROM engine_jobs WHERE engine = 'slurm' FOR UPDATE"
        await world.fetch("UPDATE engine_jobs SET unfolded = true RETURNING 1")
        await connection.fetch(locked)
        async with asyncio.timeout(10):
            await second.say(a_job("1", "running", shares=[on("g1", 0)]))
    rows = await world.fetch("SELECT engine, state FROM jobs ORDER BY engine")
    assert [tuple(row) for row in rows] == [("slurm", "starting"), ("slurm-b", "running")]
    assert [row[0] for row in await world.fetch("SELECT engine FROM engine_jobs WHERE unfolded")] == ["slurm"]


def test_a_planned_run_gets_no_devices_of_an_engine_whose_name_begins_alike() -> None:
    planned = HeldRow("a", "starting", [{"node_id": "ray.gone", "devices": [0, 1]}], "ray", 0.0)
    devices = [("ray", "ray.n1", 0), ("ray.eu", "ray.eu.n1", 0)]
    assert claims_of([planned], devices) == {("a", "ray.n1", 0)}


async def test_a_job_on_hold_that_its_engine_has_lost_has_failed(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol()
    await bridge.say(a_job("1", gpus=64))
    await world.fetch("UPDATE jobs SET state = 'held' WHERE external_id = '1' RETURNING 1")
    await bridge.say(a_job("1", "missing", gpus=64))
    job = await bridge.job("1")
    assert (job["state"], job["reason"]) == ("failed", "engine_lost")


STATES = [state.value for state in EngineJobState]


async def test_an_engine_that_changes_its_mind_never_doubles_a_job(world: World) -> None:
    """Every sequence of three states, each by a job of its own, all at once."""
    bridge = Bridge(world)
    await bridge.enrol(nodes=43, gpus=8)
    stories = list(product(STATES, repeat=3))
    for at in range(3):
        reports = [
            a_job(
                str(number), story[at], shares=[on(f"g{number // 8 + 1}", number % 8)] if story[at] == "running" else []
            )
            for number, story in enumerate(stories)
        ]
        await bridge.say(*reports)
        await world.scheduler.turn()

    rows = await world.fetch("SELECT external_id, state FROM jobs WHERE ended_at IS NULL")
    live = {row["external_id"].partition("#")[0]: row["state"] for row in rows}
    assert len(live) == len(rows)
    assert live.keys() == {str(at) for at, story in enumerate(stories) if not EngineJobState(story[-1]).is_over}
    assert all(live[str(at)] == "running" for at, story in enumerate(stories) if story[-1] == "running")
    held = await bridge.claims()
    assert {len(devices) for devices in held.values()} == {1}
    assert (await world.fetch("SELECT count(*) FROM engine_jobs WHERE unfolded"))[0][0] == 0


async def test_a_job_that_no_job_can_be_stops_neither_others_nor_rounds(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol()
    long = timedelta(days=400).total_seconds()
    await bridge.say(a_job("6", gpus=1, max_gpus=4, step_gpus=2), a_job("7", time_limit_s=long), a_job("8"))

    assert [(await bridge.job(each))["state"] for each in ("7", "8")] == ["starting", "starting"]
    assert (await bridge.job("7"))["spec"]["time_limit_s"] == timedelta(days=365).total_seconds()
    assert await world.fetch("SELECT 1 FROM jobs WHERE external_id = '6'") == []
    await bridge.say(a_job("6", gpus=1), a_job("7"), a_job("8"))
    assert (await bridge.job("6"))["state"] == "starting"
