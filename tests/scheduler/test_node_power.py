"""Nodes powered down and woken: every state, on the real database, with commands that really run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.contracts.commands import StartGang
from services.contracts.identity import Identity, Role
from services.contracts.streams import command_stream
from services.scheduler.power.hooks import build_hook
from services.scheduler.power.nodes import PowerStep, next_step
from services.scheduler.repository.node_power import ChangingNode
from services.scheduler.service import PowerRefusedError, SchedulerService
from services.scheduler.settings import SchedulerSettings
from tests.scheduler.test_api import client
from tests.scheduler.world import World, a_world
from tests.support.control_plane import eventually
from tests.support.servers import fresh_database

OPERATOR = Identity(tenant_id="default", role=Role.OPERATOR, key_id="key-1")
AT_ONCE = {"node_min_on_s": 0, "node_min_off_s": 0, "node_power_backoff_s": 0.01, "lease_margin_s": 0}


def calls(log: Path) -> list[str]:
    """Return what the hooks were asked, in order."""
    return log.read_text().split("\n")[:-1] if log.exists() else []


def commands(log: Path, *, on: str = "true", off: str = "true") -> dict[str, Any]:
    """Return settings whose hooks write down what they are asked, and then run a line of shell."""
    script = 'echo "$1" >> "$0"; '
    return {
        "node_power": "command",
        "node_power_on_command": ["/bin/sh", "-c", script + on, str(log), "on {node} {address}"],
        "node_power_off_command": ["/bin/sh", "-c", script + off, str(log), "off {node} {address}"],
    }


@pytest.fixture
def make(postgres_url: str, redis_url: str, tmp_path: Path) -> Callable[..., Any]:
    """Worlds whose hooks run in the background."""

    @asynccontextmanager
    async def made(*, on: str = "true", off: str = "true", **options: Any) -> AsyncIterator[World]:
        options = AT_ONCE | commands(tmp_path / "calls", on=on, off=off) | options
        async with a_world(fresh_database(postgres_url), redis_url, **options) as world:
            hooks = asyncio.create_task(world.scheduler._nodes.run())
            yield world
            hooks.cancel()
            await asyncio.wait([hooks])

    return made


async def power(world: World, node: str) -> str:
    rows = await world.fetch("SELECT state FROM node_power WHERE node_id = $1", node)
    return rows[0]["state"] if rows else "on"


async def becomes(world: World, node: str, state: str) -> None:
    """Turn the scheduler until a node's power is so."""

    async def is_so() -> bool:
        await world.scheduler.turn()
        return await power(world, node) == state

    await eventually(is_so)


async def silent(world: World, node: str) -> None:
    await world.fetch(
        "UPDATE nodes SET heartbeat_at = now() - interval '1 s', lease_until = now() - interval '1 s' WHERE id = $1",
        node,
    )


async def heard(world: World, node: str) -> None:
    await world.fetch(
        "UPDATE nodes SET heartbeat_at = clock_timestamp(), lease_until = now() + interval '60 s', state = 'up' "
        "WHERE id = $1",
        node,
    )


async def asleep(world: World, node: str) -> None:
    """Power a node down as an operator would."""
    await SchedulerService(world.database).sleep(node, OPERATOR)
    await silent(world, node)
    await becomes(world, node, "off")


async def test_a_standing_service_wakes_a_node_rather_than_stop_a_job_and_keeps_it_awake(make: Any) -> None:
    async with make(policy="powerflow") as world:
        await world.scheduler.turn()
        await world.fetch("""UPDATE scheduler_state SET parameters = '{"spare_nodes": 0}' RETURNING 1""")
        await world.node("n1", 2)
        job = await world.running(2)
        await world.node("n2", 2)
        await asleep(world, "n2")
        standing = await world.job(1, service={})
        await becomes(world, "n2", "waking")
        await heard(world, "n2")
        await becomes(world, "n2", "on")
        await world.report(await world.allocation(standing), "running")
        await world.exits(job)
        await becomes(world, "n1", "going_down")

        assert await world.state(standing) == "running"
        assert await power(world, "n2") == "on"


async def test_a_gang_wakes_its_node_waits_for_it_and_runs(make: Any, tmp_path: Path) -> None:
    async with make(node_boot_w=100, node_standby_w=5) as world:
        await world.node("n1", 2)
        await asleep(world, "n1")
        job = await world.job(2)
        await becomes(world, "n1", "waking")

        (row,) = await world.fetch("SELECT state, reason FROM jobs")
        assert tuple(row) == ("starting", "waiting_for_node")
        await eventually(lambda: _is(calls(tmp_path / "calls"), ["off n1 10.0.0.2", "on n1 10.0.0.2"]))
        await heard(world, "n1")
        await becomes(world, "n1", "on")
        await world.report(await world.allocation(job), "running")
        await world.scheduler.turn()

        assert await world.state(job) == "running"
        periods = await world.fetch("SELECT state, power_w FROM node_power_periods ORDER BY id")
        assert [tuple(row) for row in periods] == [("off", 5), ("waking", 100)]


async def test_no_rank_starts_before_the_node_that_boots(make: Any) -> None:
    async with make(republish_after_s=3_600.0) as world:
        for name in ("n1", "n2"):
            await world.node(name, 2)
        await asleep(world, "n2")
        await world.job(4)
        await becomes(world, "n2", "waking")
        await heard(world, "n1")
        await world.scheduler.turn()
        assert not await starts(world), "n1 is awake, and has to wait"

        await heard(world, "n2")
        await becomes(world, "n2", "on")
        assert await starts(world) == [command_stream("n1"), command_stream("n2")]
        await world.scheduler.turn()
        assert len(await starts(world)) == 2, "each was sent once"


async def starts(world: Any) -> list[str]:
    return sorted(stream for stream, command in await world.outbox() if isinstance(command, StartGang))


async def _is(found: object, wanted: object) -> bool:
    return found == wanted


async def test_powerflow_powers_down_what_nobody_uses_as_it_does_in_simulations(make: Any) -> None:
    async with make(policy="powerflow") as world:
        for name in ("n1", "n2", "n3"):
            await world.node(name)
        await world.scheduler.turn()
        states = [await power(world, name) for name in ("n1", "n2", "n3")]
        (plan,) = await world.fetch("SELECT actions FROM plans")
        assert states == ["on", "going_down", "going_down"]
        assert [(action["action"], action["node_id"], action["reason"]) for action in plan["actions"]] == [
            ("power_down", "n2", "unused"),
            ("power_down", "n3", "unused"),
        ]


async def test_a_node_that_goes_down_gets_no_starts_and_is_woken_once_it_is_off(make: Any) -> None:
    async with make(off="sleep 0.3") as world:
        await world.node("n1")
        await SchedulerService(world.database).sleep("n1", OPERATOR)
        job = await world.job()
        await world.scheduler.turn()
        assert (await world.state(job), await world.claims()) == ("queued", 0)
        await silent(world, "n1")
        await becomes(world, "n1", "waking")
        assert await world.state(job) == "starting"


async def test_a_silent_node_that_was_powered_down_is_not_lost(make: Any) -> None:
    async with make() as world:
        await world.node("n1")
        await asleep(world, "n1")
        await world.fetch("UPDATE nodes SET lease_until = now() - interval '1 day'")
        await world.scheduler.turn()
        (row,) = await world.fetch("SELECT state FROM nodes")
        assert (row["state"], await power(world, "n1")) == ("up", "off")


async def test_a_wake_that_never_arrives_fails_the_node_and_the_gang_goes_elsewhere(make: Any, tmp_path: Path) -> None:
    async with make(node_wake_timeout_s=0.05, node_power_attempts=2) as world:
        await world.node("n1")
        await asleep(world, "n1")
        job = await world.job()
        await becomes(world, "n1", "waking")
        first = await world.allocation(job)
        await world.node("n2")
        await becomes(world, "n1", "failed")
        await eventually(lambda: _turned_to(world, job, first))

        (row,) = await world.fetch("SELECT shares FROM allocations WHERE state <> 'ended'")
        assert [share["node_id"] for share in row["shares"]] == ["n2"]
        assert calls(tmp_path / "calls").count("on n1 10.0.0.4") == 2
        (said,) = await world.fetch("SELECT detail FROM node_power WHERE node_id = 'n1'")
        assert "2 times" in said["detail"]
        (counted,) = await world.fetch("SELECT restarts, preemptions FROM jobs")
        assert tuple(counted) == (0, 0)

        await heard(world, "n1")
        await becomes(world, "n1", "on")


async def _turned_to(world: World, job: str, before: str) -> bool:
    await world.scheduler.turn()
    return await world.allocation(job) != before


async def test_a_hook_that_fails_is_run_again_with_pauses_and_a_node_that_speaks_stays_on(
    make: Any, tmp_path: Path
) -> None:
    async with make(off="echo no key for the rack >&2; exit 3", node_power_attempts=3) as world:
        await world.node("n1")
        await SchedulerService(world.database).sleep("n1", OPERATOR)
        await becomes(world, "n1", "on")
        (row,) = await world.fetch("SELECT detail, stays_on_until > now() AS stays FROM node_power")
        assert tuple(row) == ("no key for the rack", True)
        assert calls(tmp_path / "calls") == ["off n1 10.0.0.4"] * 3


async def test_no_more_nodes_boot_at_once_than_the_supply_bears(make: Any, tmp_path: Path) -> None:
    async with make(node_max_wakes=1) as world:
        for name in ("n1", "n2"):
            await world.node(name)
            await asleep(world, name)
        await world.job(8)
        await becomes(world, "n1", "waking")
        await eventually(lambda: _said(tmp_path, "on"))
        await world.scheduler.turn()
        assert [line for line in calls(tmp_path / "calls") if line.startswith("on")] == ["on n1 10.0.0.4"]
        await heard(world, "n1")
        await becomes(world, "n1", "on")
        await eventually(lambda: _said(tmp_path, "on n2"))


async def _said(folder: Path, word: str) -> bool:
    return any(line.startswith(word) for line in calls(folder / "calls"))


async def test_a_node_stays_off_and_on_for_its_least_times(make: Any, tmp_path: Path) -> None:
    async with make(policy="powerflow", node_min_off_s=3_600, node_min_on_s=3_600) as world:
        await world.node("n1")
        await asleep(world, "n1")
        await world.job()
        await becomes(world, "n1", "waking")
        await world.scheduler._nodes._begin_due()
        assert not await _said(tmp_path, "on")
        await world.fetch("UPDATE node_power SET off_at = now() - interval '2 hours'")
        world.scheduler._nodes.act()
        await eventually(lambda: _said(tmp_path, "on"))

        await world.node("n2")
        await world.node("n3")
        await heard(world, "n1")
        await becomes(world, "n1", "on")
        await world.fetch("UPDATE jobs SET cancel_requested = true")
        await world.exits((await world.fetch("SELECT id FROM jobs"))[0]["id"])
        await world.scheduler.turn()
        assert await power(world, "n1") == "on"


async def test_a_cancelled_job_does_not_wait_for_its_node(make: Any) -> None:
    async with make() as world:
        await world.node("n1")
        await asleep(world, "n1")
        job = await world.job()
        await becomes(world, "n1", "waking")
        await world.ask(job, "cancel")
        await world.scheduler.turn()
        assert (await world.state(job), await world.claims()) == ("cancelled", 0)


async def test_a_pinned_node_is_woken_and_never_powered_down(make: Any) -> None:
    async with make(policy="powerflow") as world:
        await world.node("n1")
        await asleep(world, "n1")
        await SchedulerService(world.database).pin("n1", True, OPERATOR)
        await becomes(world, "n1", "waking")
        await heard(world, "n1")
        await becomes(world, "n1", "on")
        with pytest.raises(PowerRefusedError, match="pinned"):
            await SchedulerService(world.database).sleep("n1", OPERATOR)
        await world.node("n0")
        await world.scheduler.turn()
        assert await power(world, "n1") == "on"


async def test_what_was_decided_is_done_by_the_scheduler_that_comes_next(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    options = AT_ONCE | commands(tmp_path / "calls")
    async with a_world(fresh_database(postgres_url), redis_url, **options) as world:
        await world.node("n1")
        await SchedulerService(world.database).sleep("n1", OPERATOR)  # committed; this scheduler runs no hooks any more
        await world.scheduler.turn()
        assert calls(tmp_path / "calls") == []

        again = type(world.scheduler._nodes)(world.database, build_hook(world.settings), world.settings)
        hooks = asyncio.create_task(again.run())
        await eventually(lambda: _said(tmp_path, "off n1"))
        hooks.cancel()
        await asyncio.wait([hooks])


async def test_operators_power_nodes_over_http_and_are_noted(make: Any) -> None:
    async with make() as world:
        await world.node("n1")
        job = await world.running()
        async with client(world) as api:
            refused = await api.post("/v1/nodes/n1/sleep")
            await world.exits(job)
            slept = await api.post("/v1/nodes/n1/sleep")
            too_soon = await api.post("/v1/nodes/n1/wake")
            pinned = await api.post("/v1/nodes/n1/pin-awake")
            freed = await api.post("/v1/nodes/n1/unpin")
            unknown = await api.post("/v1/nodes/n9/wake")
        async with client(world, Role.USER) as api:
            forbidden = await api.post("/v1/nodes/n1/sleep")

        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
        assert (slept.status_code, slept.json()["state"]) == (200, "going_down")
        assert too_soon.status_code == 409
        assert (pinned.json()["pinned_awake"], freed.json()["pinned_awake"]) == (True, False)
        assert (unknown.status_code, forbidden.status_code) == (404, 403)
        rows = await world.fetch("SELECT action FROM audit_log ORDER BY sequence")
        assert [row["action"] for row in rows] == ["node.sleep", "node.pin_awake", "node.unpin"]


async def test_an_operator_wakes_a_node_that_is_off_and_who_is_awake_is_left_so(make: Any) -> None:
    async with make() as world:
        await world.node("n1")
        await asleep(world, "n1")
        async with client(world) as api:
            woken = await api.post("/v1/nodes/n1/wake")
            twice = await api.post("/v1/nodes/n1/wake")
        assert (woken.status_code, woken.json()["state"]) == (200, "waking")
        assert twice.json()["state"] == "waking"
        await heard(world, "n1")
        await becomes(world, "n1", "on")
        rows = await world.fetch("SELECT action FROM audit_log ORDER BY sequence")
        assert [row["action"] for row in rows] == ["node.sleep", "node.wake"]


async def test_without_a_hook_nobody_can_be_powered(world: World) -> None:
    await world.node("n1")
    async with client(world) as api:
        for command in ("sleep", "wake"):
            answer: httpx.Response = await api.post(f"/v1/nodes/n1/{command}")
            assert (answer.status_code, answer.json()["code"]) == (409, "capability_missing")
    assert await world.fetch("SELECT FROM node_power") == []


PATIENCE = SchedulerSettings.model_construct(node_down_timeout_s=10, node_wake_timeout_s=20, node_power_attempts=2)
AT = datetime(2026, 1, 1, tzinfo=UTC)
NODE = ChangingNode(
    node_id="n1",
    state="off",
    pinned=False,
    attempts=1,
    acted_at=None,
    off_at=None,
    heartbeat_at=None,
    registered_at=AT,
    at=AT,
    leased=False,
    heard=False,
    done_for_s=None,
)


@pytest.mark.parametrize(
    ("state", "facts", "step"),
    [
        ("going_down", {}, None),
        ("going_down", {"pinned": True}, PowerStep.STAY),
        ("going_down", {"pinned": True, "acted_at": AT}, None),
        ("going_down", {"done_for_s": 1, "leased": True}, None),
        ("going_down", {"done_for_s": 11, "leased": True}, PowerStep.STAY),
        ("going_down", {"done_for_s": 1}, PowerStep.DOWN),
        ("off", {}, None),
        ("off", {"heard": True}, PowerStep.AWAKE),
        ("off", {"pinned": True}, PowerStep.WAKE),
        ("waking", {"done_for_s": 19}, None),
        ("waking", {"done_for_s": 21}, PowerStep.RETRY),
        ("waking", {"done_for_s": 21, "attempts": 2}, PowerStep.FAIL),
        ("waking", {"done_for_s": 21, "attempts": 2, "heard": True}, PowerStep.AWAKE),
        ("failed", {}, None),
        ("failed", {"heard": True}, PowerStep.AWAKE),
    ],
)
def test_what_becomes_of_a_node(state: str, facts: dict[str, Any], step: PowerStep | None) -> None:
    assert next_step(NODE._replace(state=state, **facts), PATIENCE) is step
