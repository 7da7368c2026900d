"""Which gangs a node starts and when: devices, generations, and what is left of the lease."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from gpu_agent import shim
from gpu_agent.gangs import Gang, Gangs
from gpu_agent.secrets import InputError
from services.contracts.commands import StartGang, StopGang
from services.contracts.jobs import JobSpec
from services.contracts.nodes import EndedBy, RankState
from services.core.profiles.sharing import SHARING_COST
from services.kit import traces
from tests.agent.conftest import a_launcher, no_inputs

LEASE_S = 30.0


def a_start(job: str, generation: int, devices: list[int]) -> StartGang:
    return StartGang(
        allocation_id=f"{job}.{generation}",
        job_id=job,
        generation=generation,
        tenant_id="default",
        spec=JobSpec.model_validate({"name": "a", "command": ["true"], "gpus": {"min": len(devices)}}),
        devices=devices,
        node_rank=0,
        nnodes=1,
        world_size=len(devices),
        rank_offset=0,
        master_addr="10.0.0.1",
        master_port=29_500,
    )


class Clock:
    """The clock of leases, at a time that the test says."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shim, "clock", clock)
    return clock


@pytest.fixture
def gangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gangs:
    """The gangs of a node of four devices; those that would start only hold their devices."""
    launcher = a_launcher(tmp_path, 4)
    gangs = Gangs(tmp_path, launcher, fetch=no_inputs)

    async def nothing(gang: Gang) -> None:
        pass

    monkeypatch.setattr(gangs, "_launch", nothing)
    gangs.load()
    return gangs


async def owners_after(gangs: Gangs, clock: Clock, after_s: float) -> dict[int, str]:
    """Return who holds which device when the node looks so long after it sent a heartbeat that named all its gangs."""
    states = {gang.allocation_id: gang.state for gang in gangs}
    gangs.answer(states, set(states), clock.now_s, LEASE_S)
    clock.now_s += after_s

    async def ignored(*_: object) -> None:
        pass

    await gangs.tick(ignored)
    return gangs.owners()


@pytest.mark.parametrize(("after_s", "starts"), [(0.0, True), (0.8 * LEASE_S, True), (0.8 * LEASE_S + 0.01, False)])
async def test_a_gang_does_not_start_in_the_last_fifth_of_a_lease(
    gangs: Gangs, clock: Clock, after_s: float, starts: bool
) -> None:
    gangs.accept(a_start("job_1", 1, [0, 1]))

    assert await owners_after(gangs, clock, after_s) == ({0: "job_1.1", 1: "job_1.1"} if starts else {})
    assert set((await owners_after(gangs, clock, 0.0)).values()) == {"job_1.1"}, "the next answer renews the lease"


async def test_a_start_of_an_older_generation_is_late_and_does_nothing(gangs: Gangs, clock: Clock) -> None:
    gangs.accept(a_start("job_1", 2, [0]))
    gangs.accept(a_start("job_1", 1, [1]))

    assert await owners_after(gangs, clock, 0.0) == {0: "job_1.2"}
    assert gangs.get("job_1.1") is None


async def test_a_gang_starts_beside_one_other_if_its_command_says_so(gangs: Gangs, clock: Clock) -> None:
    for number, shares in enumerate((False, False, True, True), start=1):
        gangs.accept(a_start(f"job_{number}", 1, [0]).model_copy(update={"shares": shares}))

    assert await owners_after(gangs, clock, 0.0) == {0: "job_1.1"}
    assert gangs.guests() == {0: "job_3.1"}
    assert gangs.load_of(0) == pytest.approx(1 - SHARING_COST)
    assert gangs.pace_on(0) == pytest.approx((1 - SHARING_COST) / 1.8)


async def test_a_newer_generation_ends_the_older_one(gangs: Gangs, clock: Clock) -> None:
    gangs.accept(a_start("job_1", 1, [0]))
    gangs.accept(a_start("job_1", 2, [1]))

    await owners_after(gangs, clock, 0.0)
    older = gangs.get("job_1.1")
    assert older is not None
    assert older.state is RankState.EXITED
    assert gangs.owners() == {1: "job_1.2"}


async def test_a_device_has_one_holder(gangs: Gangs, clock: Clock) -> None:
    gangs.accept(a_start("job_1", 1, [0, 1]))
    gangs.accept(a_start("job_2", 1, [1, 2]))
    gangs.accept(a_start("job_3", 1, [3]))

    assert await owners_after(gangs, clock, 0.0) == {0: "job_1.1", 1: "job_1.1", 3: "job_3.1"}


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_gang_that_got_its_devices_in_a_tick_that_broke_off_is_seen_to_by_the_next(
    gangs: Gangs, clock: Clock, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    launched: list[str] = []

    async def launch(gang: Gang) -> None:
        launched.append(gang.allocation_id)

    async def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(gangs, "_launch", launch)
    gangs.accept(a_start("job_1", 1, [0]))
    gangs.answer({"job_1.1": RankState.STARTING}, {"job_1.1"}, clock.now_s, LEASE_S)
    with pytest.raises(RuntimeError):
        await gangs.tick(fail)
    if is_stopped:
        gangs.stop(StopGang(allocation_id="job_1.1", grace_s=0.0, reason="asked"))

    assert await owners_after(gangs, clock, 0.1) == {0: "job_1.1"}
    await asyncio.sleep(0)
    assert launched == ["job_1.1"], "it would hold its device for ever, and neither run nor end"


async def test_a_gang_is_not_forgotten_before_the_control_plane_has_heard_of_its_end(
    gangs: Gangs, clock: Clock
) -> None:
    async def ignored(*_: object) -> None:
        pass

    gangs.refuse("job_1.1", EndedBy.STOP, -15, "")
    gangs.answer({"job_1.1": RankState.STOPPING}, set(), clock.now_s, LEASE_S)  # it ended after this was said
    await gangs.tick(ignored)
    assert [gang.allocation_id for gang in gangs] == ["job_1.1"]
    gangs.answer({"job_1.1": RankState.EXITED}, set(), clock.now_s, LEASE_S)
    await gangs.tick(ignored)
    assert not list(gangs)


async def test_the_trace_of_a_start_outlives_the_agent(tmp_path: Path, gangs: Gangs) -> None:
    given = f"00-{'4' * 32}-{'5' * 16}-01"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traces, "current", lambda: given)
        gangs.accept(a_start("job_1", 1, [0]))
    gangs.accept(a_start("job_2", 1, [1]))

    later = Gangs(tmp_path, gangs._launcher, fetch=no_inputs)  # pyright: ignore[reportPrivateUsage]
    later.load()
    assert {gang.allocation_id: gang.traceparent for gang in later} == {"job_1.1": given, "job_2.1": None}


@pytest.mark.parametrize("cause", [EndedBy.AGENT, EndedBy.STOP])
async def test_a_gang_that_never_began_ends_for_the_reason_for_which_it_was_to_end(
    tmp_path: Path, gangs: Gangs, cause: EndedBy
) -> None:
    gangs.accept(a_start("job_1", 1, [0]))
    gang = gangs.get("job_1.1")
    assert gang is not None
    gang.folder.request_stop(cause, 1.0)  # and the agent is killed before it has written the end

    async def ignored(*_: object) -> None:
        pass

    later = Gangs(tmp_path, gangs._launcher, fetch=no_inputs)  # pyright: ignore[reportPrivateUsage]
    later.load()
    await later.tick(ignored)
    assert [(each.state, each.ended_by) for each in later] == [(RankState.EXITED, cause)]


async def test_a_gang_whose_end_cannot_be_written_down_keeps_no_other_from_its_own(gangs: Gangs, clock: Clock) -> None:
    for number, job in enumerate(("job_1", "job_2", "job_3")):
        gangs.accept(a_start(job, 1, [number]))
    await owners_after(gangs, clock, 0.0)
    stuck, other = gangs.get("job_1.1"), gangs.get("job_2.1")
    assert stuck is not None
    assert other is not None
    for gang in (stuck, other):
        assert gang.launching is not None
        await gang.launching  # whose shim did not begin
    (stuck.folder.path / "exited.tmp").mkdir()  # as if the disk were full for this one alone

    assert set((await owners_after(gangs, clock, 0.0)).values()) == {"job_1.1"}
    assert (stuck.is_over, other.is_over) == (False, True)
    (stuck.folder.path / "exited.tmp").rmdir()
    assert await owners_after(gangs, clock, 0.0) == {}
    assert (stuck.is_over, stuck.ended_by) == (True, EndedBy.HOST)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyError("of no kind that was foreseen")])
async def test_a_gang_whose_folder_cannot_be_read_keeps_no_other_from_its_devices(
    gangs: Gangs, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    gangs.accept(a_start("job_1", 1, [0]))
    gangs.accept(a_start("job_2", 1, [1]))
    broken = gangs.get("job_1.1")
    assert broken is not None

    def unreadable() -> None:
        raise error

    monkeypatch.setattr(broken.folder, "exit", unreadable)
    assert (await owners_after(gangs, clock, 0.0))[1] == "job_2.1"
    assert broken.trouble


def later_of(tmp_path: Path, gangs: Gangs) -> Gangs:
    """The gangs as the next agent of this node finds them."""
    later = Gangs(tmp_path, gangs._launcher, fetch=no_inputs)  # pyright: ignore[reportPrivateUsage]
    later.load()
    return later


async def test_a_folder_that_cannot_be_read_keeps_no_other_gang_from_being_loaded(
    tmp_path: Path, gangs: Gangs, clock: Clock
) -> None:
    for number in range(4):
        gangs.accept(a_start(f"job_{number}", 1, [number]))
    folder = gangs.folder
    (folder / "job_0.1" / "exited").write_text("code=?\n")
    (folder / "job_1.1" / "leaves").write_text("grace_s=1\n")
    (folder / "job_2.1" / "posted.json").mkdir()
    (folder / "job_2.1" / "started").mkdir()
    (folder / "a file").write_text("")
    (folder / "a_file").write_text("")
    (folder / "lost+found").mkdir()

    later = later_of(tmp_path, gangs)
    assert sorted(gang.allocation_id for gang in later) == [f"job_{number}.1" for number in range(4)]
    leaving = later.get("job_1.1")
    assert leaving is not None
    assert leaving.leaving is not None, "it was to end, and does so as soon as it may"
    assert (await owners_after(later, clock, 0.0))[3] == "job_3.1"


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_start_that_is_said_again_ends_what_it_left(
    tmp_path: Path, gangs: Gangs, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    gangs.accept(a_start("job_1", 1, [0]))

    def killed(_: StartGang) -> None:
        raise OSError(errno.ENOSPC, "as if the agent were killed here, or the disk full")

    with monkeypatch.context() as patched:
        patched.setattr(gangs._launcher, "check", killed)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(OSError, match="killed"):
            gangs.accept(a_start("job_1", 2, [1]))
    later = later_of(tmp_path, gangs) if is_loaded else gangs
    assert [gang.state for gang in later] == [RankState.STARTING, RankState.STARTING]
    with monkeypatch.context() as patched:
        refused = InputError("it has no such image")

        def check(_: StartGang) -> None:
            raise refused

        patched.setattr(later._launcher, "check", check)  # pyright: ignore[reportPrivateUsage]
        later.accept(a_start("job_1", 2, [1]))
    assert [(gang.allocation_id, gang.state, gang.ended_by) for gang in later] == [
        ("job_1.1", RankState.EXITED, EndedBy.STOP),
        ("job_1.2", RankState.EXITED, EndedBy.REFUSED),
    ]


async def test_a_refusal_that_is_said_again_ends_what_a_killed_agent_left(tmp_path: Path, gangs: Gangs) -> None:
    (gangs.folder / "job_1.1").mkdir()
    (gangs.folder / "job_1.1" / "gang.json").write_text('{"command":null,"token":""}')
    later = later_of(tmp_path, gangs)
    later.refuse("job_1.1", EndedBy.REFUSED, 126, "this agent cannot read the command")
    assert [(gang.state, gang.ended_by, gang.exit_code) for gang in later] == [(RankState.EXITED, EndedBy.REFUSED, 126)]
    later.refuse("job_1.1", EndedBy.STOP, -15, "again")
    assert [gang.ended_by for gang in later] == [EndedBy.REFUSED]
