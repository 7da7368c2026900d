"""Bringing GPUs to the cut that is wanted: busy drivers, failures, and an agent that is killed at any point of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import partitions
from gpu_agent.devices.driver import Cut, cut_of
from gpu_agent.devices.simulated import SimulatedDriver
from gpu_agent.partitions import Partitions
from services.contracts.nodes import PartitionState, PartitionStatus, WantedPartition
from services.core.domain.mig import placed, slice_index

PENDING, BUSY, APPLIED, FAILED = PartitionState
CHANGES: list[tuple[list[int], list[int]]] = [([], [2, 2, 3]), ([4, 3], [1] * 7), ([3, 3], []), ([2, 2, 3], [7])]


class KilledError(BaseException):
    """The agent is gone."""


class Host:
    """A node of two GPUs, and its agent's partitions."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now_s = 1_000.0
        self.holders: dict[int, list[str]] = {}
        self.told: list[Cut] = []
        self.events = 0
        self.dies_at: int | None = None
        monkeypatch.setattr(partitions, "clock", lambda: self.now_s)
        self._replace = partitions.files.replace
        monkeypatch.setattr(partitions.files, "replace", self._write)
        self.open()

    def open(self) -> None:
        """Start the agent, again as after a kill."""
        self.dies_at, self.events = None, 0
        self.driver = SimulatedDriver("A100", 2, lambda _: 0.0, self.folder / "simulated.json", "n")
        self.partitions = Partitions(
            self.driver,
            self.folder / "partitions.json",
            asyncio.Lock(),
            held_by=lambda gpu: self.holders.get(gpu, []),
            on_cut=self._on_cut,
            retry_s=5.0,
        )

    async def _on_cut(self) -> None:
        self.told.append(self.cut())
        self._event()

    def _write(self, path: Path, content: bytes, **options: Any) -> None:
        self._replace(path, content, **options)
        self._event()

    def _event(self) -> None:
        """Count a point at which an agent can be killed: after a write, after a step of the driver."""
        self.events += 1
        if self.events == self.dies_at:
            raise KilledError

    def fail(self, step: str, outcome: str, **options: int) -> None:
        entries = [{"step": step, "outcome": outcome, **options}]
        (self.folder / "simulated_faults.json").write_text(json.dumps(entries))

    def heal(self) -> None:
        (self.folder / "simulated_faults.json").unlink(missing_ok=True)

    def cut(self, gpu: int = 0) -> Cut:
        return cut_of(self.driver.devices(), gpu)

    def sizes(self, gpu: int = 0) -> list[int]:
        return [place.sevenths for place in self.cut(gpu) or ()]

    def want(self, revision: int, sizes: Sequence[int], gpu: int = 0) -> None:
        self.partitions.want([WantedPartition(gpu=gpu, revision=revision, sizes=list(sizes))])

    def status(self, gpu: int = 0) -> PartitionStatus:
        return (self.partitions.statuses() or [])[gpu]

    async def settle(self, gpu: int = 0) -> PartitionState:
        """Let the agent go on until there is nothing more to do now; return what it reports then."""
        for _ in range(4):
            self.partitions.step()
            await self.partitions.finish(60)
        return self.status(gpu).state


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Two whole GPUs."""
    return Host(tmp_path, monkeypatch)


async def test_gpus_are_cut_as_wanted_one_at_a_time(host: Host) -> None:
    assert host.status() == PartitionStatus(gpu=0, revision=0, state=APPLIED, sizes=[])
    both = [WantedPartition(gpu=gpu, revision=3 + gpu, sizes=[3, 2, 2]) for gpu in (0, 1)]
    host.partitions.want(both)
    host.partitions.step()
    assert (host.partitions.is_open([0]), host.partitions.is_open([1])) == (True, False)
    host.partitions.step()
    await host.partitions.finish(60)
    assert (host.sizes(0), host.sizes(1)) == ([2, 2, 3], [])
    assert await host.settle(1) is APPLIED
    assert host.status(1) == PartitionStatus(gpu=1, revision=4, state=APPLIED, sizes=[2, 2, 3])
    assert not host.partitions.is_open([0, 1, slice_index(0, 0)])
    host.partitions.want(both)
    cuts = len(host.told)
    await host.settle()
    assert len(host.told) == cuts, "what is done is not done again"


async def test_nothing_is_cut_under_a_job(host: Host) -> None:
    host.holders = {0: ["job_1.2"]}
    host.want(1, [7])
    assert await host.settle() is PENDING
    assert (host.status().detail, host.sizes()) == ("still used by job_1.2", [])
    host.holders = {}
    assert await host.settle() is APPLIED
    assert host.sizes() == [7]


async def test_what_an_operator_has_cut_stays_until_a_cut_is_wanted(host: Host) -> None:
    host.driver.cut(0, placed([4]))
    host.open()
    await host.settle()
    assert (host.sizes(), host.status().state) == ([4], APPLIED)
    host.want(1, [4])
    assert await host.settle() is APPLIED
    host.partitions.want([])
    await host.settle()
    assert (host.sizes(), host.status().revision) == ([4], 0)


async def test_a_driver_that_says_busy_is_asked_again_later(host: Host) -> None:
    host.want(1, [4, 3])
    await host.settle()
    host.fail("destroy", "busy", skip=1)
    host.want(2, [7])
    assert await host.settle() is BUSY
    assert (host.sizes(), host.status().detail) == ([4, 3], "In use by another client")
    assert not host.partitions.is_open([0]), "jobs may use it as it is"
    host.heal()
    assert await host.settle() is BUSY, "not at once"
    host.now_s += 5
    assert await host.settle() is APPLIED
    assert host.sizes() == [7]


@pytest.mark.parametrize("outcome", ["failed", "refused", "unsupported"])
async def test_after_a_failure_the_gpu_is_as_before(host: Host, outcome: str) -> None:
    host.want(1, [4, 3])
    await host.settle()
    host.fail("create", outcome, skip=1, times=1)
    host.want(2, [2, 2, 3])
    assert await host.settle() is FAILED
    assert (host.sizes(), host.status().revision) == ([4, 3], 2)
    host.now_s += 60
    host.want(2, [2, 2, 3])
    assert await host.settle() is FAILED, "the same is not tried again"
    host.want(3, [2, 2, 3])
    assert await host.settle() is APPLIED


async def test_a_gpu_that_cannot_be_restored_takes_no_work_until_it_is(host: Host) -> None:
    host.want(1, [4, 3])
    await host.settle()
    host.fail("create", "failed")
    host.want(2, [7])
    assert await host.settle() is BUSY
    assert host.status().detail == "Unknown Error; and it could not be cut as before: Unknown Error"
    assert (host.sizes(), host.partitions.is_open([0])) == ([], True)
    host.open()
    assert host.partitions.is_open([slice_index(0, 3)]), "the next agent knows it"
    host.now_s += 5
    await host.settle()
    assert (host.sizes(), host.partitions.is_open([0])) == ([], True)
    host.heal()
    host.now_s += 5
    assert await host.settle() is FAILED
    assert (host.sizes(), host.partitions.is_open([0])) == ([4, 3], False)


async def test_another_wish_during_a_cut_comes_after_it(host: Host) -> None:
    host.want(1, [7])
    host.partitions.step()
    host.want(2, [3, 3])
    assert await host.settle() is APPLIED
    assert (host.sizes(), host.status().revision) == ([3, 3], 2)


async def test_a_restart_of_the_host_that_lost_the_slices_makes_them_again(host: Host) -> None:
    host.want(1, [4, 3])
    await host.settle()
    host.driver.cut(0, ())
    host.open()
    host.want(1, [4, 3])
    assert host.status().state is PENDING
    assert await host.settle() is APPLIED
    assert host.sizes() == [4, 3]


async def test_a_gpu_that_is_not_there_is_a_failure(host: Host) -> None:
    host.want(1, [7], gpu=5)
    await host.settle()
    assert host.status(2) == PartitionStatus(
        gpu=5, revision=1, state=FAILED, detail="this node has no such GPU", sizes=[]
    )


async def test_what_cannot_be_written_down_is_not_done(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    written = partitions.files.replace
    monkeypatch.setattr(partitions.files, "replace", full)
    host.want(1, [7])
    assert await host.settle() is PENDING
    assert (host.sizes(), host.partitions.problem) == (
        [],
        "the state folder cannot be written: No space left on device",
    )
    monkeypatch.setattr(partitions.files, "replace", written)
    host.now_s += 5
    assert await host.settle() is APPLIED
    assert host.partitions.problem == ""


@pytest.mark.parametrize("content", ["", "{", "[1]", '[{"gpu": 0}]'])
async def test_an_unreadable_state_is_a_new_start(host: Host, content: str) -> None:
    (host.folder / "partitions.json").write_text(content)
    host.open()
    host.want(1, [7])
    assert await host.settle() is APPLIED


@pytest.mark.parametrize("fault", [None, "failed", "busy"])
@pytest.mark.parametrize(("before", "wanted"), CHANGES)
async def test_an_agent_killed_at_any_point_ends_in_the_wanted_or_the_former_cut(
    host: Host, before: list[int], wanted: list[int], fault: str | None
) -> None:
    points = 0
    while True:
        host.open()
        host.heal()
        host.want(2 * points + 1, before)
        assert await host.settle() is APPLIED
        if fault and wanted:
            host.fail("create", fault, skip=len(wanted) - 1, times=1)
        host.events, host.dies_at = 0, points + 1
        host.now_s += 60
        try:
            host.want(2 * points + 2, wanted)
            for _ in range(2):
                host.partitions.step()
                task = host.partitions._task
                await host.partitions.finish(60)
                if task is not None and isinstance(task.exception(), KilledError):
                    raise task.exception()
        except KilledError:
            pass
        else:
            break  # there was no such point any more
        points += 1
        host.open()
        await host.settle()
        assert host.sizes() in (before, wanted)
        assert not host.partitions.is_open([0])
        host.heal()
        host.now_s += 60
        host.want(2 * points + 2, wanted)
        await host.settle()
        assert host.sizes() == (wanted if host.status().state is APPLIED else before)
    assert points > len(before) + len(wanted), "at least every step of the driver was one"
