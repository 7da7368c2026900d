"""Clocks that follow latency: what is decided, and what a running agent sets and restores."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_agent.controls import Order
from gpu_agent.devices.simulated import Response
from gpu_agent.gangs import Gang
from gpu_agent.latency_clocks import PACE_S, Following, LatencyClocks, Measured
from gpu_agent.learned_clocks import LearnedClocks
from gpu_agent.ranks import RankFolder
from lab.serving.model_server import ModelServer
from services.contracts.clocks import ClockPolicy, ServerClocks
from services.contracts.commands import StartGang
from services.contracts.jobs import JobSpec
from services.contracts.nodes import DeviceControls, DeviceInfo
from services.contracts.routing import LatencyReport, ServerLatency
from services.contracts.streams import LATENCY_FIELD, latency_stream
from services.core.domain.gpus import gpu_model
from tests.agent.conftest import Node, eventually
from tests.agent.test_ranks import SLEEP

A100 = gpu_model("A100-SXM4-40GB")
CLOCKS = Response(A100).clocks_mhz
TERMS = ServerClocks(policy=ClockPolicy.MIAD, max_ttft_ms=300, max_tbt_ms=150, max_e2e_s=7)
SERVER = ModelServer(64, 0.05, 0.0, 0.03, 0.0003, lowest_clock_mhz=210.0, busy_w=400.0)


def devices(*clocks: Sequence[int], settable: bool = True) -> list[DeviceInfo]:
    return [
        DeviceInfo(
            index=index,
            uuid=f"GPU-{index}",
            model=A100.name,
            memory_gib=40,
            power_limit_w=400,
            can_set_clock=settable,
            clocks_mhz=list(each),
        )
        for index, each in enumerate(clocks)
    ]


def a_gang(job: str = "job_1", held: tuple[int, ...] = (0, 1), settings: DeviceControls | None = None) -> Gang:
    start = StartGang(
        allocation_id=f"{job}.1",
        job_id=job,
        generation=1,
        tenant_id="t",
        spec=JobSpec(name="server", command=["serve"]),
        devices=list(held),
        node_rank=0,
        nnodes=1,
        world_size=len(held),
        rank_offset=0,
        master_addr="127.0.0.1",
        master_port=29_500,
    )
    folder = RankFolder(Path("/nowhere"))
    return Gang(start.allocation_id, folder, start, holding=True, devices=held, settings=settings)


def a_report(
    tbt_ms: float | None = 50.0,
    *,
    job: str = "job_1",
    router: str = "r1",
    tokens: int = 100,
    terms: ServerClocks | None = TERMS,
    **seen: Any,
) -> LatencyReport:
    fields: dict[str, Any] = {
        "first_tokens": 0,
        "mean_ttft_ms": None,
        "max_ttft_ms": None,
        "ended": 0,
        "held": 3,
        **seen,
    }
    row = ServerLatency(
        server="i1",
        job_id=job,
        request_class="SS",
        waiting=0,
        tokens=tokens if tbt_ms else 0,
        mean_tbt_ms=tbt_ms,
        max_tbt_ms=tbt_ms,
        max_e2e_s=seen.get("mean_e2e_s"),
        clocks=terms,
        **fields,
    )
    return LatencyReport(router=router, at=datetime.now(UTC), servers=[row])


class Run:
    """A node's decisions, second by second."""

    def __init__(
        self,
        *gangs: Gang,
        following: Following = "on",
        infos: list[DeviceInfo] | None = None,
        learned: LearnedClocks | None = None,
    ) -> None:
        infos = infos or devices(CLOCKS, CLOCKS, CLOCKS, CLOCKS)
        self.clocks = LatencyClocks(infos, "nvml", learned or LearnedClocks(Path("/nowhere")), following, stale_s=5.0)
        self.gangs = list(gangs or [a_gang()])
        self.now_s = 100.0
        self.measured = Measured(math.nan)

    def second(self, *reports: LatencyReport) -> list[float | None]:
        """Let a second pass with these reports; return the clocks ordered for the gangs that have orders."""
        self.now_s += 1.0
        for report in reports:
            self.clocks.take(report, self.now_s)
        self.clocks.decide(self.gangs, lambda _: self.measured, self.now_s, self.now_s)
        return [order.settings.clock_mhz for order in self.orders()]

    def orders(self) -> list[Order]:
        return self.clocks.orders(self.gangs)


def test_a_clock_falls_by_100_mhz_a_second_and_doubles_when_a_limit_is_exceeded() -> None:
    run = Run()

    fallen = [run.second(a_report()) for _ in range(9)]

    assert fallen == [[1305], [1200], [1095], [990], [885], [780], [675], [570], [465]]
    assert run.second(a_report(151.0)) == [930]
    assert run.second(a_report(ended=2, mean_e2e_s=7.1)) == [1410]
    assert run.second(a_report(None, first_tokens=1, mean_ttft_ms=301)) == [1410]
    assert run.second(a_report(None)) == [1410], "of three requests nothing is seen"
    assert run.second(a_report(None, held=0)) == [1305], "without requests it falls too"


def test_all_devices_of_a_tensor_parallel_server_get_one_clock_that_all_support() -> None:
    run = Run(a_gang(held=(0, 1, 2)), infos=devices(CLOCKS, [300, 705, 1200, 1410], [300, 1200, 1305, 1410]))

    assert run.second(a_report()) == [1200]
    assert [order.devices for order in run.orders()] == [(0, 1, 2)]
    assert run.second(a_report()) == [300], "705 MHz is not a clock of the third"
    assert run.second(a_report(200.0)) == [1200]


def test_a_clock_changes_once_a_second_however_many_routers_report() -> None:
    run = Run()
    run.second(a_report())
    run.now_s -= 1.0 - PACE_S / 2
    assert run.second(a_report(router="r2")) == [1305], "too early"
    assert run.second(a_report(router="r1"), a_report(router="r3")) == [1200]


def test_the_means_of_several_routers_are_weighted_by_what_they_saw() -> None:
    one, other = a_report(160.0, tokens=10), a_report(20.0, tokens=90, router="r2")

    assert Run().second(one) == [1410]
    assert Run().second(one, other) == [1305]
    assert Run().second(one, a_report(149.0, tokens=5, router="r2")) == [1410]


def test_without_reports_the_default_returns_after_five_seconds() -> None:
    run = Run()
    run.second(a_report())

    assert [run.second() for _ in range(6)] == [[1305]] * 5 + [[]]
    assert run.second(a_report()) == [1305], "it begins at the highest again"


def test_a_pool_that_stops_following_gets_its_default_at_once() -> None:
    run = Run()
    run.second(a_report())

    assert run.second(a_report(terms=None)) == []
    assert run.second(a_report(terms=ServerClocks(policy=ClockPolicy.DEFAULT))) == []


@pytest.mark.parametrize("where", ["pool", "node"])
def test_a_dry_run_says_the_next_clock_and_orders_none(where: str) -> None:
    run = Run(following="on" if where == "pool" else "dry_run")
    terms = TERMS.model_copy(update={"dry_run": where == "pool"})

    assert [run.second(a_report(terms=terms)) for _ in range(3)] == [[], [], []]
    assert run.clocks.wanted_mhz(1) == 1305
    assert run.clocks.wanted_mhz(2) is None
    said = run.clocks.describe(run.now_s)[0]
    assert (said["dry_run"], said["clock_mhz"], said["devices"]) == (True, 1305, (0, 1))


def test_a_node_that_does_not_follow_decides_nothing() -> None:
    run = Run(following="off")

    assert run.second(a_report()) == []
    assert run.clocks.describe(run.now_s) == []


def test_a_clock_that_the_scheduler_orders_comes_first_and_its_power_limit_stays() -> None:
    ordered = a_gang("job_1", (0,), DeviceControls(revision=4, clock_mhz=900))
    limited = a_gang("job_2", (1,), DeviceControls(revision=7, power_limit_w=250))
    run = Run(ordered, limited)

    assert run.second(a_report(job="job_1"), a_report(job="job_2")) == [900, 1305]
    assert run.clocks.wanted_mhz(0) is None
    assert [(each.settings.revision, each.settings.power_limit_w) for each in run.orders()] == [(4, None), (7, 250)]


def test_a_server_that_is_measured_keeps_its_default_clock() -> None:
    run = Run(a_gang(settings=DeviceControls(revision=1, power_limit_w=250, measure=True)))

    assert run.second(a_report()) == [None]


def test_a_report_that_comes_too_early_for_a_decision_wakes_nobody() -> None:
    run = Run()
    assert run.clocks.take(a_report(), run.now_s)
    run.second(a_report())
    assert not run.clocks.take(a_report(router="r2"), run.now_s + PACE_S / 2)
    assert run.clocks.take(a_report(), run.now_s + PACE_S)
    assert not run.clocks.take(a_report(terms=None), run.now_s + 5)


def test_the_clocks_of_two_minutes_are_kept_for_the_control_plane() -> None:
    run = Run()
    run.now_s = 117.0
    for tbt_ms in (50.0, 50.0, 151.0, 50.0):
        run.second(a_report(tbt_ms))

    before, now = run.clocks.minutes("job_1", run.now_s)
    assert (before.start_at.timestamp(), now.start_at.timestamp()) == (60, 120)
    assert (before.decisions, before.exceeded, before.mean_mhz) == (2, 0, 1252.5)
    assert (now.decisions, now.exceeded) == (2, 1)
    assert (now.lowest_mhz, now.highest_mhz, now.last_mhz) == (1305, 1410, 1305)
    assert (now.policy, now.dry_run, now.model_error, now.unused) == (ClockPolicy.MIAD, False, None, None)

    assert run.clocks.minutes("job_2", run.now_s) == []
    assert run.clocks.minutes("job_1", 185.0) == [now]
    assert run.clocks.minutes("job_1", 245.0) == []
    run.gangs = []
    run.second()
    assert run.clocks.minutes("job_1", run.now_s) == []


def test_devices_whose_clocks_cannot_be_set_are_left_alone() -> None:
    run = Run(infos=devices(CLOCKS, CLOCKS, settable=False))
    assert run.second(a_report()) == []
    assert run.second(a_report(terms=TERMS.model_copy(update={"dry_run": True}))) == []
    assert run.clocks.wanted_mhz(0) == 1305, "a dry run needs no permission"
    assert Run(infos=devices([300, 600], [900, 1200])).second(a_report()) == []


def test_reports_of_servers_that_do_not_run_here_are_ignored() -> None:
    run = Run()

    assert run.second(a_report(job="job_9")) == []
    run.second(a_report())
    run.gangs = [replace(run.gangs[0], holding=False)]
    assert run.second(a_report()) == []
    assert run.clocks.describe(run.now_s) == []


@given(st.lists(st.tuples(st.sampled_from([None, 10.0, 149.0, 151.0, 5e5]), st.booleans(), st.integers(0, 3))))
def test_whatever_is_reported_the_clock_is_one_that_the_devices_support(
    seconds: list[tuple[float | None, bool, int]],
) -> None:
    run = Run()
    run.measured = Measured(300.0)
    for tbt_ms, learned, pause in seconds:
        terms = TERMS.model_copy(update={"policy": ClockPolicy.LEARNED if learned else ClockPolicy.MIAD})
        ordered = run.second(a_report(tbt_ms, terms=terms))
        assert len(ordered) == 1
        assert ordered[0] in CLOCKS
        run.now_s += pause


def step_under_load_s(clock_mhz: float) -> float:
    """Return the time between tokens where 200 arrive a second: the batch is 200 times as long (Little's law)."""
    slowdown = SERVER.slowdown(clock_mhz)
    return SERVER.decode_base_s * slowdown / (1.0 - 200 * SERVER.decode_s_per_request * slowdown)


def test_the_learned_clock_settles_where_miad_goes_up_and_down() -> None:
    """200 tokens a second arrive; the time between tokens passes 75 ms below about 612 MHz."""
    ends: dict[ClockPolicy, list[float]] = {}
    for policy in (ClockPolicy.MIAD, ClockPolicy.LEARNED):
        terms = TERMS.model_copy(update={"policy": policy, "max_tbt_ms": 75.0})
        run, clock, ends[policy] = Run(), float(CLOCKS[-1]), []
        for _ in range(120):
            tbt_s = step_under_load_s(clock)
            run.measured = Measured(SERVER.power_w(clock, is_busy=True))
            ttft = {"first_tokens": 2, "mean_ttft_ms": 1e3 * SERVER.prefill_s(0.0, clock), "mean_wait_ms": 0.0}
            [found] = run.second(a_report(1e3 * tbt_s, tokens=200, terms=terms, **ttft))
            assert found is not None
            clock = found
            ends[policy].append(clock)

    model = run.clocks.describe(run.now_s)[0]["model"]
    assert (model["samples"], model["unused"]) == (120, None)
    assert model["error"] < 0.01
    steady = {policy: clocks[-30:] for policy, clocks in ends.items()}
    assert max(step_under_load_s(clock) for clock in steady[ClockPolicy.LEARNED]) < 0.075
    assert max(step_under_load_s(clock) for clock in steady[ClockPolicy.MIAD]) > 0.075
    assert len(set(steady[ClockPolicy.LEARNED])) <= 2
    assert sum(steady[ClockPolicy.LEARNED]) < sum(steady[ClockPolicy.MIAD])


# --- on a running agent


def clocks_of(node: Node) -> list[int]:
    """Return the clock of each simulated device, as the driver keeps it."""
    return [each[1] for each in json.loads((node.state_dir / "simulated.json").read_text())["devices"]]


def remembered(node: Node) -> list[int]:
    """Return the devices whose clocks the agent would restore after a crash."""
    return json.loads((node.state_dir / "controls.json").read_text())["clocks"]


@asynccontextmanager
async def reporting(node: Node, job: str, said: dict[str, Any]) -> AsyncIterator[None]:
    """Put a report into the node's stream ten times a second, as ``said`` has it at the moment."""

    is_over = asyncio.Event()

    async def report() -> None:
        while not is_over.is_set():
            document = a_report(job=job, **said).model_dump_json()
            await node.redis.xadd(latency_stream(node.id), {LATENCY_FIELD: document}, maxlen=120)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await is_over.wait()

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        is_over.set()  # a command to Redis is not cancelled half-way
        await task


async def serving(node: Node) -> str:
    """Run a server on the first two devices; return its job."""
    gang = await node.run(*SLEEP, devices=[0, 1])
    await eventually(lambda: node.plane.state(gang) == "running")
    return gang.rpartition(".")[0]


async def test_the_clocks_of_a_running_server_follow_reports_and_return_without_them(node: Node) -> None:
    await node.start(GPU_AGENT_LATENCY_STALE_S="1")
    job = await serving(node)
    said: dict[str, Any] = {}
    async with reporting(node, job, said):
        await eventually(lambda: clocks_of(node)[:2] == [1305, 1305])
        await eventually(lambda: clocks_of(node)[:2] == [1200, 1200])
        await eventually(lambda: node.plane.heartbeats[-1].devices[1].latency_clock_mhz == 1095)
        await eventually(lambda: node.plane.heartbeats[-1].devices[1].locked_clock_mhz == 1095)
        assert clocks_of(node)[2:] == [1410, 1410]
        assert node.plane.heartbeats[-1].devices[2].latency_clock_mhz is None
        [rank] = node.plane.heartbeats[-1].ranks
        assert rank.clocks[-1].last_mhz == 1095
        said["tbt_ms"] = 151.0
        await eventually(lambda: clocks_of(node)[:2] == [1410, 1410])
        said["tbt_ms"] = 50.0
        await eventually(lambda: clocks_of(node)[0] < 1410)
    await eventually(lambda: clocks_of(node) == [1410] * 4)
    await eventually(lambda: remembered(node) == [])


async def test_a_killed_agent_s_clocks_are_restored_by_the_next(node: Node) -> None:
    await node.start()
    job = await serving(node)
    async with reporting(node, job, {}):
        await eventually(lambda: max(clocks_of(node)[:2]) < 1400)
        node.kill()
    assert max(clocks_of(node)[:2]) < 1400
    assert remembered(node) == [0, 1]
    await node.start()
    await eventually(lambda: clocks_of(node) == [1410] * 4)
    assert node.plane.state(f"{job}.1") == "running"
    async with reporting(node, job, {}):
        await eventually(lambda: clocks_of(node)[:2] == [1305, 1305])


async def test_the_end_of_a_server_restores_its_clocks(node: Node) -> None:
    await node.start()
    job = await serving(node)
    async with reporting(node, job, {}):
        await eventually(lambda: clocks_of(node)[0] < 1400)
        node.plane.named.discard(f"{job}.1")
        await eventually(lambda: clocks_of(node) == [1410] * 4)


async def test_reports_that_cannot_be_read_change_nothing(node: Node) -> None:
    await node.start()
    job = await serving(node)
    for text in ("", "{", "[]", '{"router": "r"}'):
        await node.redis.xadd(latency_stream(node.id), {LATENCY_FIELD: text})
    await node.redis.xadd(latency_stream(node.id), {"other": "field"})
    async with reporting(node, job, {}):
        await eventually(lambda: clocks_of(node)[:2] == [1305, 1305])


async def test_a_node_in_a_dry_run_shows_clocks_and_sets_none(node: Node) -> None:
    await node.start(GPU_AGENT_LATENCY_CLOCKS="dry_run")
    job = await serving(node)
    async with reporting(node, job, {}):
        await eventually(lambda: node.plane.heartbeats[-1].devices[0].latency_clock_mhz == 1305)
    assert node.plane.heartbeats[-1].devices[0].locked_clock_mhz is None
    assert clocks_of(node) == [1410] * 4
    status, _, body = await node.get("/v1/state")
    assert status == 200
    assert json.loads(body)["latency_clocks"][0]["dry_run"] is True
