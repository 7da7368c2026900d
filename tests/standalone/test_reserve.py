"""The blocks that are kept for PostgreSQL."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.standalone import reserve

MIB = 1 << 20


def test_the_reserve_is_given_up_on_a_full_disk_and_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_blocks=400, f_bavail=300, f_frsize=MIB)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    file = tmp_path / "reserve"
    for free, held in ((300, 20), (50, 20), (9, 20), (7, 0), (27, 0), (55, 0), (61, 20)):
        disk.f_bavail = free
        reserve.look(tmp_path)
        assert file.stat().st_size == held * MIB
        assert file.stat().st_blocks * 512 >= held * MIB
