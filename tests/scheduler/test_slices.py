"""Jobs on slices as rows: placed on what nodes registered, held by identity, and queued again when it is gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from services.contracts.commands import StartGang, command_document
from services.core.domain.mig import placed, slice_index
from services.db.gpu_partitions import want
from services.scheduler import loop
from services.scheduler.ingest.gangs import EndReason
from tests.scheduler.test_dry_run import estimate, set_grid
from tests.scheduler.test_explanations import explain
from tests.scheduler.world import World


def devices_of(gpus: int, cuts: dict[int, Sequence[int]], made: str = "a") -> list[dict[str, Any]]:
    """Return a node's devices with some GPUs cut, as its agent registers them."""
    found: list[dict[str, Any]] = []
    for gpu in range(gpus):
        whole = {"index": gpu, "uuid": f"GPU-{gpu}", "model": "A100", "memory_gib": 40.0}
        found.append(whole | ({"mig_enabled": True} if gpu in cuts else {}))
    for gpu, sizes in cuts.items():
        found += [
            {
                "index": slice_index(gpu, place.start),
                "uuid": f"MIG-{gpu}-{place.start}-{made}",
                "model": "A100",
                "memory_gib": 5.0 * place.sevenths,
                "parent": gpu,
                "profile": f"{place.sevenths}g",
                "sevenths": place.sevenths,
                "start": place.start,
            }
            for place in placed(sizes)
        ]
    return found


async def register(world: World, node: str, gpus: int, cuts: dict[int, Sequence[int]], made: str = "a") -> None:
    query = "UPDATE nodes SET devices = $2, registered_at = now() WHERE id = $1 RETURNING 1"
    await world.fetch(query, node, devices_of(gpus, cuts, made))


async def a_node(world: World, gpus: int = 2, made: str = "a", **cuts: Sequence[int]) -> str:
    """Return a node with GPUs cut as ``gpu0=[3, 3]`` says."""
    name = await world.node("n0", gpus)
    await register(world, name, gpus, {int(gpu.removeprefix("gpu")): sizes for gpu, sizes in cuts.items()}, made)
    return name


async def wants(world: World, gpu: int, sizes: list[int], owner: str | None = None, state: str = "pending") -> None:
    async with world.database.transaction() as connection:
        assert await want(connection, "n0", gpu, sizes, owner)
        await connection.execute("UPDATE gpu_partitions SET state = $1 WHERE gpu = $2", state, gpu)


async def on_slice(world: World, size: str, **spec: Any) -> str:
    job = await world.job(**spec)
    await world.fetch("UPDATE jobs SET spec = jsonb_set(spec, '{gpus,slice}', $2) WHERE id = $1 RETURNING 1", job, size)
    return job


async def where(world: World, job: str) -> list[int] | str:
    """Return the job's devices, or why it waits."""
    (row,) = await world.fetch(
        "SELECT j.reason, a.shares FROM jobs j LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended' "
        "WHERE j.id = $1",
        job,
    )
    return row["shares"][0]["devices"] if row["shares"] else row["reason"]


async def test_a_job_gets_a_slice_by_its_identity_and_others_the_whole_gpus(world: World) -> None:
    await a_node(world, gpu0=[3, 3])
    small, train, large = await on_slice(world, "3g"), await world.job(1), await world.job(2)

    await world.scheduler.turn()

    assert [await where(world, each) for each in (small, train, large)] == [[1_024], [1], "not_enough_free_gpus"]
    claims = await world.fetch("SELECT device, uuid, parent, profile FROM device_claims ORDER BY device")
    assert [tuple(row) for row in claims] == [(1, "GPU-1", None, None), (1_024, "MIG-0-0-a", 0, "3g")]
    starts = {command.job_id: command for _, command in await world.outbox() if isinstance(command, StartGang)}
    assert (starts[small].devices, starts[small].uuids) == ([1_024], ["MIG-0-0-a"])
    assert "uuids" not in command_document(starts[train]), "agents of the previous release refuse it"


async def test_a_command_that_was_lost_is_repeated_with_the_same_identity(world: World) -> None:
    await a_node(world, gpu0=[7])
    job = await on_slice(world, "7g")
    await world.scheduler.turn()
    await world.fetch("DELETE FROM outbox RETURNING 1")
    await world.fetch("UPDATE allocations SET started_at = now() - interval '1 hour' RETURNING 1")
    await world.fetch("UPDATE nodes SET lease_until = now() + interval '1 hour' RETURNING 1")

    world.scheduler._ingest._settings = world.settings.model_copy(update={"start_timeout_s": 1e6})
    await world.scheduler.turn()

    (repeated,) = [command for _, command in await world.outbox() if isinstance(command, StartGang)]
    assert (repeated.job_id, repeated.uuids) == (job, ["MIG-0-0-a"])


@pytest.mark.parametrize(
    ("wanted", "registered", "state", "slice_on", "gpu_on"),
    [
        ([3, 3], [3, 3], "applied", [1_024], [1]),
        ([3, 3], [3, 3], "pending", "no_such_slice", [1]),
        ([3, 3], [3, 3], "busy", "no_such_slice", [1]),
        ([3, 3], [3], "applied", "no_such_slice", [1]),
        ([7], [3, 3], "failed", [1_024], [1]),
        ([3, 3], None, "pending", "no_such_slice", [1]),
        ([3, 3], None, "applied", "no_such_slice", [1]),
        ([], None, "pending", "no_such_slice", [1]),
        ([], None, "applied", "no_such_slice", [0]),
        ([3, 3], None, "failed", "no_such_slice", [0]),
        ([], [3, 3], "applied", "no_such_slice", [1]),
    ],
)
async def test_nothing_is_placed_on_a_gpu_until_it_is_cut_as_it_is_wanted(
    world: World, wanted, registered, state, slice_on, gpu_on
) -> None:
    await a_node(world, **({} if registered is None else {"gpu0": registered}))
    await wants(world, 0, wanted, state=state)
    on_it, train = await on_slice(world, "3g"), await world.job(1)

    await world.scheduler.turn()

    assert [await where(world, on_it), await where(world, train)] == [slice_on, gpu_on]


async def test_a_gang_on_a_gpu_that_is_to_be_cut_runs_on_and_nothing_follows_it(world: World) -> None:
    await a_node(world, gpus=1)
    job = await world.running(1)
    await wants(world, 0, [3, 3])
    follower = await world.job(1)
    await world.scheduler.turn()
    assert (await world.state(job), await where(world, follower)) == ("running", "not_enough_free_gpus")

    await world.exits(job)

    await world.scheduler.turn()
    assert isinstance(await where(world, follower), str)
    assert await world.claims() == 0


async def test_a_fleets_gpus_are_for_its_instances_alone(world: World) -> None:
    await a_node(world, gpus=3, gpu0=[3, 3])
    await wants(world, 0, [3, 3], "vision", "applied")
    await wants(world, 1, [], "vision", "applied")
    theirs = [await on_slice(world, size, service={"fleet": "vision"}) for size in ("3g", "7g")]
    stranger, another = await on_slice(world, "3g"), await on_slice(world, "3g", service={"fleet": "speech"})
    whole = await on_slice(world, "7g")
    train = [await world.job(1), await world.job(1)]

    await world.scheduler.turn()

    assert [await where(world, each) for each in theirs] == [[1_024], [1]]
    assert {await where(world, each) for each in (stranger, another, whole)} == {"no_such_slice"}
    assert [await where(world, each) for each in train] == [[2], "not_enough_free_gpus"]


@pytest.mark.parametrize("ended", [{"exit_code": 1, "ended_by": "itself"}, {"ended_by": "refused"}])
async def test_a_job_whose_slice_is_gone_is_queued_again_without_a_failure(world: World, ended: dict[str, Any]) -> None:
    await a_node(world, gpu0=[3, 3])
    job = await on_slice(world, "3g")
    await world.scheduler.turn()
    first = await world.allocation(job)
    await world.report(first, "running")
    await world.scheduler.turn()

    await register(world, "n0", 2, {0: [3, 3]}, made="b")
    await world.scheduler.turn()
    assert await world.state(job) == "preempting"
    await world.report(first, "exited", **ended)
    await world.scheduler.turn()

    (row,) = await world.fetch("SELECT state, restarts, preemptions FROM jobs WHERE id = $1", job)
    assert tuple(row) == ("starting", 0, 0)
    (gone,) = await world.fetch("SELECT end_reason FROM allocations WHERE id = $1", first)
    assert gone["end_reason"] == EndReason.SLICE_LOST
    (claim,) = await world.fetch("SELECT uuid FROM device_claims")
    assert claim["uuid"] == "MIG-0-0-b"


async def test_an_agent_that_refuses_because_the_slice_is_gone_counts_no_failed_start(world: World) -> None:
    await a_node(world, gpu0=[3, 3])
    job = await on_slice(world, "3g")
    for _ in range(world.settings.start_attempts + 1):
        await world.scheduler.turn()
        allocation = await world.allocation(job)
        await world.report(allocation, "exited", ended_by="refused")
        await world.fetch("UPDATE rank_statuses SET detail = 'Its MIG slice is gone: device 1024 is another one now.' "
                          "WHERE allocation_id = $1 RETURNING 1", allocation)  # fmt: skip
        await world.scheduler.turn()

    assert await world.state(job) == "starting"


async def test_a_plan_for_a_slice_that_became_another_one_is_not_applied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a_node(world, gpu0=[3, 3])
    job = await on_slice(world, "3g")
    decide, cuts = world.scheduler._decide, iter("bcdefghijk")
    remade: list[str] = []

    def decide_late(*arguments: Any) -> Any:
        remade.append(next(cuts))
        return decide(*arguments)

    monkeypatch.setattr(world.scheduler, "_decide", decide_late)
    original = loop.apply

    async def apply_late(*arguments: Any, **options: Any) -> Any:
        if len(remade) == 1:
            await register(world, "n0", 2, {0: [3, 3]}, made=remade[0])
        return await original(*arguments, **options)

    monkeypatch.setattr(loop, "apply", apply_late)
    await world.scheduler.turn()

    assert len(remade) == 2, "the first plan was stale"
    (claim,) = await world.fetch("SELECT uuid FROM device_claims")
    assert (claim["uuid"], await where(world, job)) == ("MIG-0-0-b", [1_024])


async def test_a_claim_on_a_gpu_whose_slice_is_held_is_refused_by_the_database(world: World) -> None:
    await a_node(world, gpu0=[3, 3])
    job = await on_slice(world, "3g")
    await world.scheduler.turn()
    with pytest.raises(asyncpg.UniqueViolationError, match="GPU 0 of node n0"):
        await world.fetch(
            "INSERT INTO device_claims (node_id, device, allocation_id) VALUES ('n0', 0, $1) RETURNING 1",
            await world.allocation(job),
        )


async def test_a_slice_of_a_drained_node_and_one_too_small_are_not_given(world: World) -> None:
    await a_node(world, gpu0=[3, 3])
    needs_more = await on_slice(world, "3g")
    await world.fetch("UPDATE jobs SET spec = jsonb_set(spec, '{gpus,memory_gib}', '20') WHERE id = $1 RETURNING 1",
                      needs_more)  # fmt: skip
    await world.fetch("UPDATE nodes SET draining = true RETURNING 1")
    job = await on_slice(world, "3g")
    await world.scheduler.turn()
    assert (await where(world, job), await where(world, needs_more)) == ("node_closed", "no_such_slice")

    await world.fetch("UPDATE nodes SET draining = false RETURNING 1")
    await world.scheduler.turn()
    assert (await where(world, job), await where(world, needs_more)) == ([1_024], "no_such_slice")


async def test_it_is_explained_by_slices_and_by_the_jobs_before_it(world: World) -> None:
    await a_node(world, gpu0=[3, 3])
    running = [await on_slice(world, "3g") for _ in range(2)]
    await world.scheduler.turn()
    first, second = await on_slice(world, "3g"), await on_slice(world, "3g")
    await world.scheduler.turn()

    found = await explain(world, second)

    assert found.waiting is not None
    assert found.waiting.place is not None
    asked = found.waiting.gpus
    assert (asked.slice, asked.suitable, asked.free) == ("3g", 2, 0)
    assert (found.reason, found.waiting.place.ahead) == ("not_enough_free_slices", 1)
    assert found.under_policies is not None, "simulations have slices, too"
    whole = (await explain(world, await world.job(1))).waiting
    assert whole is not None
    assert found.waiting.power_w == pytest.approx((whole.power_w or 0) * 3 / 7)
    assert {await world.state(job) for job in running} == {"starting"}
    assert await world.state(first) == "queued"


async def test_a_draft_is_estimated_on_slices(world: World) -> None:
    await a_node(world, gpu0=[3, 3])
    await world.scheduler.turn()

    found = await estimate(world, gpus={"slice": "3g"})

    assert (found.starts_now, found.slice, found.free_gpus, found.suitable_gpus) == (True, "3g", 2, 2)
    assert found.placement[0].devices == [1_024]


async def test_a_job_that_runs_on_a_slice_is_explained_by_its_end_and_that_nothing_stops_it(world: World) -> None:
    await a_node(world, gpu0=[3, 3])
    job = await on_slice(world, "3g", work={"total": 100, "unit": "steps"})
    await world.scheduler.turn()
    await world.report(await world.allocation(job), "running")
    await world.scheduler.turn()
    await world.fetch("UPDATE allocations SET started_at = now() - interval '10 min' RETURNING 1")
    await world.fetch("INSERT INTO job_progress (job_id, done) VALUES ($1, 25) RETURNING 1", job)

    found = await explain(world, job)

    assert found.summary.startswith("It runs on a 3g slice of n0. It keeps its slice")
    assert found.running is not None
    assert found.running.why[0] == "A 3g slice: the one size that it asks for."
    assert found.running.next is not None
    assert found.running.next.action == "keep"
    assert found.running.length.source == "progress"
    assert found.running.length.seconds == pytest.approx(1_800, rel=0.05)


async def test_emissions_are_estimated_where_all_gpus_are_cut(world: World) -> None:
    await a_node(world, gpus=1, gpu0=[3, 3])
    for _ in range(2):
        await on_slice(world, "3g")
    await world.scheduler.turn()
    waits = await on_slice(world, "3g", time_limit_s=3_600)
    set_grid(world)

    explained = await explain(world, waits)
    drafted = await estimate(world, gpus={"min": 1, "slice": "3g"}, time_limit_s=3_600)

    assert explained.waiting is not None
    assert explained.waiting.now is not None
    assert explained.waiting.now.carbon_gco2 == pytest.approx(explained.waiting.power_w / 1_000 * 400, rel=0.01)
    assert drafted.now is not None
    assert drafted.now.carbon_gco2 == pytest.approx(explained.waiting.now.carbon_gco2, rel=0.01)


@pytest.mark.parametrize(("before", "after"), [({}, {0: [3, 3]}), ({0: [3, 3]}, {})])
async def test_a_gpu_that_is_cut_otherwise_under_a_gang_is_given_to_nobody_and_stops_no_round(
    world: World, before: dict[int, Sequence[int]], after: dict[int, Sequence[int]]
) -> None:
    """The database refuses both at once, so every plan that took it for free was stale."""
    await world.node("n0", 1)
    await register(world, "n0", 1, before)
    await world.running(gpus={"slice": "3g"} if before else {})
    await register(world, "n0", 1, after)
    jobs = [await world.job(gpus={"slice": "3g"} if after else {}), await world.job()]
    await world.node("n1", 1)

    await world.scheduler.turn()

    assert sorted([await world.state(each) for each in jobs]) == ["queued", "starting"]
    assert [row["node_id"] for row in await world.fetch("SELECT node_id FROM device_claims ORDER BY 1")] == ["n0", "n1"]
