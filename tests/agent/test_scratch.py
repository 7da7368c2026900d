"""What jobs take of the node's disk is measured, and a job that takes too much is ended and told why."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from gpu_agent import scratch, shim, trees
from gpu_agent.gangs import Gang
from gpu_agent.ranks import SCRATCH, Launch, RankFolder
from gpu_agent.scratch import Holding, Scratch, measured, to_end
from services.contracts.nodes import EndedBy
from tests.agent.conftest import Node, eventually
from tests.agent.test_small_parts import a_start

GIB, MIB = 1 << 30, 1 << 20
HOME, OTHERS_HOME = Path("/homes/1"), Path("/homes/2")


def _holding(name: str, tenant: str = "a", home: Path = HOME) -> Holding:
    return Holding(tenant, (Path("/ranks", name, "scratch"), Path("/ranks", name, "source")), (home,))


def test_a_job_ends_that_takes_more_than_one_may() -> None:
    taken = {
        Path("/ranks/one/scratch"): 3 * GIB,
        Path("/ranks/one/source"): 2 * GIB,
        Path("/ranks/two/scratch"): 4 * GIB,
    }
    found = to_end({name: _holding(name) for name in ("one", "two", "gone")}, taken, 4 * GIB, 100 * GIB)
    assert found == {"one": "Its files took 5.0 GiB of the node's disk; a job may take 4.0 GiB."}


def test_of_a_tenant_that_takes_too_much_the_largest_job_ends() -> None:
    jobs = {name: _holding(name) for name in ("one", "two")} | {"other": _holding("other", "b", OTHERS_HOME)}
    taken = {Path("/ranks/one/scratch"): GIB, Path("/ranks/two/source"): 2 * GIB, HOME: 3 * GIB}
    taken |= {Path("/ranks/other/scratch"): 6 * GIB, OTHERS_HOME: GIB // 2}
    assert to_end(jobs, taken, 6 * GIB, 7 * GIB) == {}, "a home counts once, and a limit may be reached"
    found = to_end(jobs, taken | {HOME: 4 * GIB + MIB}, 6 * GIB, 7 * GIB)
    said = "Its tenant's files took 7.0 GiB of the node's disk, this job's the most; a tenant may take 7.0 GiB."
    assert found == {"two": said}
    found = to_end(jobs, taken | {HOME: 4 * GIB + MIB}, GIB, 7 * GIB)
    assert set(found) == {"two", "other"}, "who takes too much alone ends first, and then it is looked again"


async def test_what_folders_take_is_measured_whatever_is_in_them(tmp_path: Path) -> None:
    big, deep, outside = tmp_path / "big\nline", tmp_path / "deep", tmp_path / "outside"
    for folder in (big, deep, outside):
        folder.mkdir()
    (outside / "file").write_bytes(b"x" * 4 * MIB)
    (big / "file").write_bytes(b"x" * MIB)
    (big / "link").symlink_to(outside)
    with (big / "holes").open("wb") as file:
        file.truncate(GIB)
    start = os.getcwd()
    try:
        os.chdir(deep)
        for _ in range(1_500):
            os.mkdir("d" * 10)
            os.chdir("d" * 10)
        Path("file").write_bytes(b"x" * MIB)
    finally:
        os.chdir(start)
    found = await measured([big, deep, tmp_path / "missing"])
    trees.remove(deep)
    assert set(found) == {big, deep}
    assert MIB <= found[big] < 2 * MIB
    assert found[deep] >= MIB


async def test_accounts_and_disks_that_do_not_answer_hold_up_nothing_else(tmp_path: Path) -> None:
    main, asked = threading.get_ident(), list[bool]()
    watched = Scratch(
        [Gang("rank", RankFolder(tmp_path), a_start(image=None, command=["true"]), holding=True)],
        lambda _: asked.append(threading.get_ident() == main),
        GIB,
        GIB,
    )
    await watched.look()
    assert asked == [False]


async def test_pauses_grow_with_what_there_is_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    times, pauses = iter([0.0, 0.01, 10.0, 14.0]), list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(scratch, "clock", lambda: next(times))
    monkeypatch.setattr(scratch.asyncio, "sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await Scratch([], lambda _: None, GIB, GIB).watch()
    assert pauses == [5.0, pytest.approx(76.0)]


@pytest.mark.parametrize("trap", ["exit 0", ""], ids=["ends well", "does not end"])
async def test_a_job_that_is_ended_has_failed_and_says_why(tmp_path: Path, trap: str) -> None:
    rank = RankFolder(tmp_path / "rank")
    rank.path.mkdir()
    write = f"trap '{trap}' TERM; head -c {3 * MIB} /dev/zero > file; echo wrote; while :; do sleep 0.05; done"
    launch = Launch(["sh", "-c", write], {"PATH": "/usr/bin:/bin"}, str(rank.path / SCRATCH), 1.0)
    process = rank.launch(launch, shim.clock() + 60, 60)
    await eventually(lambda: (rank.path / "stdout").exists() and "wrote" in (rank.path / "stdout").read_text())
    gang = Gang("rank", rank, a_start(image=None, command=["true"], grace_s=0.5), holding=True)

    await Scratch([gang], lambda _: None, 4 * MIB, GIB).look()
    assert not rank.stop_requested()
    await Scratch([gang], lambda _: None, 2 * MIB, GIB).look()
    await asyncio.to_thread(process.wait)

    ended = rank.exit()
    assert ended is not None
    assert (ended.code, ended.ended_by) == (-25, EndedBy.ITSELF)
    assert ended.detail == "Its files took 0.0 GiB of the node's disk; a job may take 0.0 GiB."


@pytest.mark.parametrize("by", [("no-such-program",), ("false",)])
async def test_a_host_that_cannot_measure_ends_no_job_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: tuple[str, ...]
) -> None:
    rank = RankFolder(tmp_path / "rank")
    (rank.path / SCRATCH).mkdir(parents=True)
    gang = Gang("rank", rank, a_start(image=None, command=["true"]), holding=True)
    watched = Scratch([gang], lambda _: None, 0, 0)
    monkeypatch.setattr(scratch, "_MEASURE", by)
    for _ in range(2):
        await watched.look()
    assert not rank.stop_requested()
    assert [record.getMessage() for record in caplog.records] == ["scratch.measured"]


async def test_an_agent_looks_after_its_disk(node: Node) -> None:
    await node.start(GPU_AGENT_TENANT_SCRATCH_GIB=str(2**-7))
    beside = await node.run("sh", "-c", "head -c 1000000 /dev/zero > file; exec sleep 600", devices=[0])
    write = "head -c 4000000 /dev/zero > file; [ $(id -u) = 0 ] || cp file ~; cp file again; exec sleep 600"
    gang = await node.run("sh", "-c", write, devices=[1])
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.exit_code == -25
    assert (rank.detail or "").startswith("Its tenant's files took 0.0 GiB of the node's disk, this job's the most;")
    assert node.plane.state(beside) == "running"
