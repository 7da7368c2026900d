"""What a rank's output may take of a disk."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gpu_agent.shim import _OutputLimit

MIB = 1 << 20


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how many MiB are free."""

    def set_free(mib: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=mib, f_frsize=MIB))

    return set_free


def test_a_rank_that_fills_the_disk_ends_at_half_of_what_there_was(disk: Callable[[int], None]) -> None:
    taken = 0
    limit = _OutputLimit(0, 40 * MIB, lambda: taken * MIB)
    while True:
        disk(400 - taken)
        if limit.excess():
            break
        taken += 1
    assert taken == 180 + 16 + 1
    limit.ends()
    assert not limit.goes_on()
    taken += 17
    assert limit.goes_on(), "the grace period is for ranks that stop writing"


def test_a_rank_that_hardly_writes_goes_on_when_others_fill_the_disk(disk: Callable[[int], None]) -> None:
    taken = 100
    limit = _OutputLimit(0, 40 * MIB, lambda: taken * MIB)
    disk(1_000)
    assert not limit.excess()
    disk(10)
    taken = 116
    assert not limit.excess()
    taken = 20  # the agent has discarded older output
    assert not limit.excess()
    taken = 117
    assert "117 MiB of a disk on which 0 MiB were left" in limit.excess()


def test_the_limit_holds_on_any_disk(disk: Callable[[int], None]) -> None:
    disk(1_000_000)
    limit = _OutputLimit(2 * MIB, MIB, lambda: 3 * MIB)
    assert limit.excess() == "Its output took more than 2 MiB of the disk at once."
