"""How full a disk is, by its bytes and by its files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.kit.disk import DiskWatch

MIB = 1 << 20
Fill = Callable[..., None]


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Fill:
    """Say how many MiB of 1,000 are free, and how many of 8,000 files."""

    def set_free(mib: int, files: int, all_files: int = 8_000) -> None:
        found = SimpleNamespace(f_frsize=MIB, f_blocks=1_000, f_bavail=mib, f_files=all_files, f_favail=files)
        monkeypatch.setattr(os, "statvfs", lambda _: found)

    return set_free


def test_a_disk_without_files_left_is_full_until_there_is_clearly_room(fill: Fill) -> None:
    watch = DiskWatch(Path(), 50 * MIB)
    fill(500, 800)
    assert watch.problem() == ""
    fill(500, 799)
    says = "is nearly full: 799 files (inodes) can still be made, and 800 are to stay free."
    assert watch.problem() == says
    fill(500, 999)
    assert watch.problem() == says.replace("799", "999")
    fill(500, 1_000)
    assert watch.problem() == ""
    fill(49, 7_000)
    assert watch.problem() == "is nearly full: 49 MiB are free, and 50 MiB are to stay free."


def test_files_count_only_where_the_file_system_counts_them_and_somebody_watches(fill: Fill) -> None:
    fill(500, 0)
    assert DiskWatch(Path(), 0).problem() == ""
    fill(500, 0, 0)
    assert DiskWatch(Path(), 50 * MIB).problem() == ""
