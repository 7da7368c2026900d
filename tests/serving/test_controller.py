"""The controller on the real database and the real admission: pools become as planned, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.core.domain.reasons import Reason
from tests.support.control_plane import eventually
from tests.support.controlled_pools import PROBES, Controlled, controlled_pools

HERE, THERE = ("here", "one"), ("there", "one")
TWO_MODES = [
    {"name": "one", "gpu_model": "A100-SXM4-40GB", "gpus": 1, "command": ["serve"], "environment": {"A": "b"}},
    {"name": "two", "gpu_model": "A100-SXM4-40GB", "gpus": 2, "image": "vllm/vllm", "working_dir": "/srv"},
]


@pytest.fixture(scope="module")
async def house(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Controlled]:
    async with controlled_pools(database_url, redis_url, tmp_path_factory.mktemp("kept")) as made:
        yield made


async def test_an_instance_comes_up_as_a_job(house: Controlled) -> None:
    pool = await house.pool({("here", "one", "SS"): 1, ("there", "two", None): 3}, modes=TWO_MODES)
    await house.look()
    (row,) = await house.rows(pool)
    assert (row["state"], row["tenant_id"], row["partition"], row["request_class"]) == (
        *("wanted", "acme", "halves"),
        "SS",
    )
    await house.look()
    (row,) = await house.rows(pool)
    (job,) = await house.jobs_of(pool)
    assert (row["state"], row["job_id"]) == ("starting", job["id"])
    spec = job["spec"]
    assert (spec["name"], job["tenant_id"], job["labels"]) == (
        *(f"{pool}-one", "acme"),
        {"pool": pool, "place": "here", "mode": "one"},
    )
    assert spec["environment"] == {"A": "b", "WATTSHIFT_POOL": pool, "WATTSHIFT_INSTANCE": row["id"]}
    assert spec["service"] == {"zone": "DE", "node_labels": {}}
    assert (spec["gpus"]["min"], spec["gpus"]["model"], spec["preemptible"]) == (1, "A100-SXM4-40GB", False)
    (server,) = (await house.serving(pool)).values()
    (row,) = await house.rows(pool)
    assert (row["state"], row["url"], row["reason"]) == ("ready", server.url, None)


async def test_it_is_ready_no_sooner_than_it_answers_and_not_waited_for_for_ever(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    await house.look(2)
    (row,) = await house.rows(pool)
    await house.waits(row["job_id"], "not_enough_free_gpus")
    await house.look()
    (row,) = await house.rows(pool)
    assert (row["state"], row["reason"], row["detail"]) == ("starting", "not_enough_free_gpus", "It waits.")
    server = await house.server()
    server.is_up = False
    await house.runs(row["job_id"], server)
    await house.look()
    (row,) = await house.rows(pool)
    assert (row["state"], row["reason"], row["url"]) == ("starting", "loading", None)
    await house.database.execute("UPDATE allocations SET running_at = now() - interval '601 s'")
    await house.look(2)
    (row,) = await house.rows(pool)
    assert (row["state"], row["reason"]) == ("stopping", "not_ready")
    assert (await house.jobs_of(pool))[0]["cancel_requested"]


async def test_a_stranger_on_its_port_makes_no_instance_ready_and_ends_one_that_is(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    await house.look(2)
    (row,) = await house.rows(pool)
    stranger = await house.server()
    await house.runs(row["job_id"], stranger)
    await house.heard(row["job_id"], "none")
    await house.look()
    assert await house.states(pool) == ["starting"], "nobody of its own listens yet"
    await house.heard(row["job_id"], "own")
    await house.look(2)
    (row,) = await house.rows(pool)
    assert (row["state"], row["listener"], row["checks_key"]) == ("ready", "own", False)
    await house.heard(row["job_id"], "foreign")
    await house.look()
    (row,) = [each for each in await house.rows(pool) if each["id"] == row["id"]]
    assert (row["state"], row["reason"], row["listener"]) == ("stopping", "port_taken", "foreign")
    await house.look()
    (old,) = [each for each in await house.jobs_of(pool) if each["id"] == row["job_id"]]
    assert old["cancel_requested"]
    for each in await house.rows(pool, "starting"):
        early = await house.server()
        await house.runs(each["job_id"], early)
        await house.heard(each["job_id"], "foreign")
        await house.look()
        assert early.sent == [] or {sent for _, sent in early.sent} == {None}, "it must not learn the key"


async def test_each_instance_has_a_key_that_only_its_server_and_the_routers_learn(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 2})
    await house.look(2)
    rows = await house.rows(pool)
    one, other = [await house.key_of(row) for row in rows]
    assert one != other
    assert min(len(one), len(other)) >= 40
    servers = [await house.server(), await house.server()]
    servers[0].checks, servers[1].checks = one, "another"
    for row, server in zip(rows, servers, strict=True):
        await house.runs(row["job_id"], server)
    await house.look()
    found = {row["id"]: (row["state"], row["reason"], row["checks_key"]) for row in await house.rows(pool)}
    assert [found[row["id"]] for row in rows] == [("ready", None, True), ("starting", "key_refused", None)]
    assert ("/v1/models", f"Bearer {one}") in servers[0].sent
    servers[1].checks = None
    await house.look()
    found = {row["id"]: (row["state"], row["checks_key"]) for row in await house.rows(pool)}
    assert found[rows[1]["id"]] == ("ready", False), "not all servers can check one"
    for job in await house.jobs_of(pool):
        assert not any(key in str(dict(job)) for key in (one, other))
        await house.ends(job["id"])
    await house.look()
    assert [row["sealed_key"] for row in await house.rows(pool, "ended")] == [None, None]


async def test_a_new_plan_makes_before_it_breaks(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1, (*HERE, "LL"): 1})
    servers = await house.serving(pool)
    await house.plan(pool, {(*HERE, "SL"): 1, (*THERE, "SL"): 1})
    await house.look(3)
    old = {row["id"]: row for row in await house.rows(pool) if row["id"] in servers}
    assert {row["state"] for row in old.values()} == {"ready"}, "the new one does not answer yet"
    (new,) = [row for row in await house.rows(pool) if row["id"] not in servers]
    assert (new["state"], new["place"], new["request_class"]) == ("starting", "there", "SL")
    assert sorted(row["request_class"] for row in old.values()) in (["LL", "SL"], ["SL", "SS"])

    await house.runs(new["job_id"], await house.server())
    await house.look()
    (gone,) = await house.rows(pool, "draining")
    assert (gone["id"] in old, gone["reason"]) == (True, "not_needed")
    servers[gone["id"]].held = 1
    await house.date_back(gone["id"], "draining_at", 10)
    await house.look(3)
    assert (await house.rows(pool, "draining"))[0]["id"] == gone["id"], "it holds a request"
    servers[gone["id"]].held = 0
    await house.look()
    assert await house.rows(pool, "draining"), "one reading is not enough"
    await house.look(2)
    (stopping,) = await house.rows(pool, "stopping")
    await house.ends(stopping["job_id"], "cancelled", "cancelled")
    await house.look()
    assert await house.states(pool) == ["ready", "ready"]
    (ended,) = await house.rows(pool, "ended")
    assert (ended["id"], ended["reason"], ended["url"]) == (gone["id"], "not_needed", None)


async def test_a_draining_instance_that_is_wanted_again_serves_again(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    ((instance, server),) = (await house.serving(pool)).items()
    server.held = 1
    await house.plan(pool, {})
    await house.look(2)
    assert await house.states(pool) == ["draining"]
    await house.plan(pool, {(*HERE, "LL"): 2})
    await house.look(2)
    rows = {row["id"]: row for row in await house.rows(pool)}
    back = rows.pop(instance)
    assert (back["state"], back["request_class"], back["reason"], back["draining_at"]) == ("ready", "LL", None, None)
    assert [row["state"] for row in rows.values()] == ["starting"], "one is made, and not two"

    await house.plan(pool, {(*THERE, "LL"): 1})
    await house.look(2)
    assert instance not in {row["id"] for row in await house.rows(pool, "draining")}, "the new one is awaited"


async def test_an_instance_that_would_be_another_now_is_not_recalled(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1}, modes=TWO_MODES)
    ((instance, server),) = (await house.serving(pool)).items()
    server.held = 1
    await house.plan(pool, {})
    await house.look(2)
    await house.change(pool, modes=[{**TWO_MODES[0], "command": ["serve", "better"]}, TWO_MODES[1]])
    await house.plan(pool, {(*HERE, "SS"): 1})
    await house.look(2)
    assert sorted(await house.states(pool)) == ["draining", "starting"]
    assert (await house.rows(pool, "draining"))[0]["id"] == instance


async def test_a_drain_ends_after_its_time_whatever_is_held(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    ((instance, server),) = (await house.serving(pool)).items()
    server.held = 1
    await house.plan(pool, {})
    await house.look()
    await house.date_back(instance, "draining_at", 301)
    await house.look()
    assert await house.states(pool) == ["stopping"]


async def test_a_server_without_metrics_drains_by_itself(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1}, probes={**PROBES, "load_path": None})
    ((instance, _),) = (await house.serving(pool)).items()
    await house.plan(pool, {})
    await house.look(2)
    assert await house.states(pool) == ["draining"], "routers have not heard of it yet"
    await house.date_back(instance, "draining_at", 5)
    await house.look()
    assert await house.states(pool) == ["stopping"]


@pytest.mark.parametrize("reason", [Reason.NOT_ENOUGH_FREE_GPUS, Reason.NOT_ENOUGH_FREE_SLICES])
async def test_who_holds_the_gpus_that_are_waited_for_gives_them_up(house: Controlled, reason: Reason) -> None:
    pool = await house.pool({(*HERE, "SS"): 3}, modes=TWO_MODES)
    await house.serving(pool)
    await house.plan(pool, {("here", "two", "SS"): 1})
    await house.look(2)
    (new,) = await house.rows(pool, "starting")
    await house.waits(new["job_id"], "waiting_for_release")
    await house.look()
    assert len(await house.rows(pool, "ready")) == 3, "they come without that"
    await house.waits(new["job_id"], reason, for_s=1)
    await house.look()
    assert len(await house.rows(pool, "ready")) == 3, "they may come still"
    await house.waits(new["job_id"], reason)
    await house.look(2)
    assert (len(await house.rows(pool, "draining")), len(await house.rows(pool, "ready"))) == (2, 1)


async def test_a_silent_server_is_replaced_and_a_short_silence_is_forgiven(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    ((instance, server),) = (await house.serving(pool)).items()
    server.is_up = False
    await house.look()
    assert (await house.rows(pool))[0]["silent_since"]
    server.is_up = True
    await house.look()
    assert (await house.rows(pool))[0]["silent_since"] is None
    server.is_up = False
    await house.look()
    await house.date_back(instance, "silent_since", 61)
    house.controller = house.another()
    await house.look()
    assert await house.states(pool) == ["ready"], "one silence may be the asker's own"
    await house.look()
    assert [(row["state"], row["reason"]) for row in await house.rows(pool)] == [("stopping", "unhealthy")]
    await house.date_back(instance, "stopping_at", 6)
    await house.look()
    assert await house.states(pool) == ["stopping", "wanted"]


async def test_a_server_that_takes_its_time_keeps_no_other_waiting(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 2})
    await house.look(2)
    slow, quick = [await house.server() for _ in range(2)]
    slow.hangs = asyncio.Event()
    for row, server in zip(await house.rows(pool), (slow, quick), strict=True):
        await house.runs(row["job_id"], server)
    house.controller = house.another(instance_look_s=0.05)

    async def are(*states: str) -> bool:
        await house.look()
        return await house.states(pool) == list(states)

    await eventually(lambda: are("starting", "ready"))
    slow.hangs.set()
    await eventually(lambda: are("ready", "ready"))
    house.controller = house.another()


async def test_failures_back_off(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    for wait_s in (5, 10, 20):
        await house.look(2)
        (row,) = await house.rows(pool, "starting")
        await house.ends(row["job_id"])
        await house.look()
        assert await house.states(pool) == []
        for passed_s, states in ((wait_s - 1, []), (1, ["wanted"])):
            for ended in await house.rows(pool, "ended"):
                await house.date_back(ended["id"], "ended_at", passed_s)
            await house.look()
            assert await house.states(pool) == states
    ended = await house.rows(pool, "ended")
    assert [(row["reason"], row["detail"]) for row in ended] == [("failed", "It ended.")] * 3


async def test_a_node_that_is_lost_takes_no_instance_from_the_pool(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    await house.serving(pool)
    (row,) = await house.rows(pool)
    await house.waits(row["job_id"], "node_lost", for_s=0)
    await house.look()
    (again,) = await house.rows(pool)
    assert (again["id"], again["state"], again["url"], again["reason"]) == (row["id"], "starting", None, "node_lost")
    server = await house.server()
    await house.runs(row["job_id"], server)
    await house.look()
    (again,) = await house.rows(pool)
    assert (again["state"], again["url"]) == ("ready", server.url)


async def test_a_changed_spec_waits_for_its_plan_and_then_replaces_what_it_changes(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1, ("here", "two", "SS"): 1}, modes=TWO_MODES)
    await house.serving(pool)
    await house.change(pool, modes=[{**TWO_MODES[0], "command": ["serve", "better"]}, {**TWO_MODES[1], "idle_w": 9.0}])
    await house.look(2)
    assert await house.states(pool) == ["ready", "ready"]
    await house.plan(pool, {(*HERE, "SS"): 1, ("here", "two", "SS"): 1})
    await house.look(2)
    assert [(row["mode"], row["state"]) for row in await house.rows(pool)] == [
        *[("two", "ready"), ("one", "ready")],  # the largest are made first
        ("one", "starting"),
    ]
    await house.serving(pool)
    (old,) = await house.rows(pool, "draining")
    assert (old["mode"], old["reason"]) == ("one", "terms_changed")


async def test_a_version_that_never_comes_up_takes_down_no_more_than_it_would_replace(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 3}, modes=TWO_MODES)
    await house.serving(pool)
    await house.change(pool, modes=[{**TWO_MODES[0], "command": ["broken"]}, TWO_MODES[1]])
    await house.plan(pool, {(*HERE, "SS"): 2})
    await house.look(2)
    assert await house.states(pool) == ["ready"] * 3 + ["starting"] * 2, "two of them are on their way"
    for row in await house.rows(pool, "starting"):
        await house.ends(row["job_id"])
    await house.look()
    for row in await house.rows(pool, "ended"):
        await house.date_back(row["id"], "ended_at", -60)  # the wait must not be over before it is looked at
    await house.look()
    assert sorted(await house.states(pool)) == ["draining", "ready", "ready"], "two are owed"
    for row in await house.rows(pool, "ended"):
        await house.date_back(row["id"], "ended_at", 65)
    await house.look(3)
    assert sorted(await house.states(pool)) == ["draining", "ready", "ready", "starting", "starting"]
    await house.serving(pool)
    assert sorted(await house.states(pool)) == ["draining"] * 3 + ["ready"] * 2


async def test_no_plan_starts_nothing_and_a_plan_without_an_answer_keeps_what_there_is(house: Controlled) -> None:
    pool = await house.pool()
    await house.look(2)
    assert await house.rows(pool) == []
    await house.plan(pool, {(*HERE, "SS"): 1})
    await house.serving(pool)
    await house.database.execute(
        "UPDATE pool_plans SET result = jsonb_set(result, '{plan,partition}', 'null') WHERE pool = $1", pool
    )
    house.controller = house.another()
    await house.look(2)
    assert await house.states(pool) == ["ready"]


async def test_a_job_that_no_node_could_run_is_refused(house: Controlled) -> None:
    impossible = [{"name": "one", "gpu_model": "B200", "gpus": 1, "command": ["serve"]}]
    pool = await house.pool({(*HERE, "SS"): 1}, modes=impossible)
    await house.look(3)
    (row,) = await house.rows(pool, "ended")
    assert (row["reason"], "B200" in row["detail"]) == ("refused", True)
    assert await house.states(pool) == []


async def test_while_admission_is_away_instances_wait_and_get_one_job_each(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 2})
    await house.look()
    house.admission.kill()
    await house.look()
    assert {(row["state"], row["reason"]) for row in await house.rows(pool)} == {("wanted", "admission_unavailable")}
    house.admission.start()
    await house.look()
    assert {(row["state"], row["reason"]) for row in await house.rows(pool)} == {("starting", None)}
    assert len(await house.jobs_of(pool)) == 2


async def test_a_job_whose_submitter_was_killed_is_found_again(
    house: Controlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await house.pool({(*HERE, "SS"): 1})
    await house.look()

    async def killed(*_: Any) -> None:
        raise ConnectionError("killed between the submission and the writing")

    monkeypatch.setattr(house.controller, "_control", killed)
    with pytest.raises(ConnectionError):
        await house.look()
    monkeypatch.undo()
    ((job,), (row,)) = (await house.jobs_of(pool), await house.rows(pool))
    assert (row["state"], row["job_id"]) == ("wanted", None)
    house.controller = house.another()
    await house.look(2)
    assert [(row["state"], row["job_id"]) for row in await house.rows(pool)] == [("starting", job["id"])]
    assert len(await house.jobs_of(pool)) == 1


async def test_several_controllers_make_nothing_twice(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 3, (*THERE, "LL"): 2})
    controllers = [house.another() for _ in range(4)]
    for _ in range(6):
        await asyncio.gather(*(controller.look() for controller in controllers))
    assert await house.states(pool) == ["starting"] * 5
    assert len(await house.jobs_of(pool)) == 5


async def test_a_deleted_pool_is_drained_and_then_gone(house: Controlled) -> None:
    pool = await house.pool({(*HERE, "SS"): 1, (*THERE, "SS"): 1})
    servers = await house.serving(pool)
    await house.plan(pool, {(*HERE, "SS"): 2, (*THERE, "SS"): 1})
    await house.look()
    await house.database.execute("INSERT INTO pool_traffic VALUES ($1, now(), 'r1', '{}')", pool)
    await house.database.execute("UPDATE pools SET deleted_at = now() WHERE name = $1", pool)
    await house.look()
    assert sorted(await house.states(pool)) == ["draining", "draining", "stopping"]
    for instance in servers:
        await house.date_back(instance, "draining_at", 10)
    await house.look(3)
    assert await house.states(pool) == ["stopping"] * 2, "the one that waited for its GPUs is called off"
    for row in await house.rows(pool):
        await house.ends(row["job_id"], "cancelled", "cancelled")
    await house.look()
    for table, column in (("pools", "name"), ("pool_traffic", "pool")):
        assert await house.database.fetchval(f"SELECT count(*) FROM {table} WHERE {column} = $1", pool) == 0
    reasons = {row["reason"] for row in await house.rows(pool, "ended")}
    assert reasons == {"pool_deleted"}


async def test_a_pool_that_cannot_be_read_costs_only_itself(house: Controlled) -> None:
    odd = await house.pool({(*HERE, "SS"): 1})
    await house.look(2)
    good = await house.pool({(*HERE, "SS"): 1})
    spec = await house.database.fetchval("SELECT spec FROM pools WHERE name = $1", odd)
    terms = await house.database.fetchval("SELECT terms FROM pool_instances WHERE pool = $1", odd)
    await house.database.execute("UPDATE pools SET spec = $2 WHERE name = $1", odd, {**spec, "objective": "water"})
    await house.look(2)
    assert (await house.states(odd), await house.states(good)) == (["starting"], ["starting"])

    await house.database.execute("UPDATE pools SET spec = $2 WHERE name = $1", odd, spec)
    await house.database.execute("UPDATE pool_instances SET terms = '{}' WHERE pool = $1", odd)
    other = await house.pool({(*HERE, "SS"): 1})
    for _ in range(2):
        with pytest.raises(ValueError, match="InstanceTerms"):
            await house.look()
    assert await house.states(odd) == ["starting"], "no other is started in place of one that cannot be read"
    assert await house.states(other) == ["starting"]
    await house.database.execute("UPDATE pool_instances SET terms = $2 WHERE pool = $1", odd, terms)
