"""What jobs leave in folders does not stop whoever clears up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent import trees
from gpu_agent.checkpoint_folders import MOST_LEVELS, UnfitError, listed
from gpu_agent.ranks import RELEASED
from gpu_agent.retention import Retention

DEEP = 3_000
"""Deeper than Python calls itself, and than a path is long."""


def nest(folder: Path, levels: int) -> None:
    """Nest folders, with a file in the innermost."""
    folder.mkdir(parents=True)
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a", dir_fd=inner)
        above, inner = inner, os.open("a", os.O_RDONLY, dir_fd=inner)
        os.close(above)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=inner))
    os.close(inner)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "of-a-job"
    trees.remove(tmp_path / "of-a-job")  # pytest's own clearing up would stop at it


def test_a_deep_folder_goes_and_what_its_links_name_stays(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    nest(folder / "deep", DEEP)
    (folder / "deep" / "link").symlink_to(tmp_path / "precious")
    (folder / "link").symlink_to("deep")
    os.mkfifo(folder / "pipe")
    trees.remove(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("what", ["missing", "file", "link"])
def test_what_is_no_folder_is_left_alone(tmp_path: Path, what: str) -> None:
    path = tmp_path / "path"
    (tmp_path / "inner").mkdir()
    if what == "file":
        path.touch()
    elif what == "link":
        path.symlink_to(tmp_path / "inner")
    before = sorted(tmp_path.iterdir())
    trees.remove(path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_job_with_deep_folders_does_not_stop_retention_for_the_others(folder: Path) -> None:
    for name in ("hostile.1", "other.1"):
        nest(folder / name / "scratch", DEEP if name == "hostile.1" else 1)
        (folder / name / "stdout").write_bytes(b"x" * 10_000)
        (folder / name / RELEASED).touch()
    assert trees.disk_bytes(folder / "other.1") >= 10_000 + 8_192
    assert Retention(folder, folder / "generations").clean(age_s=-1, total_bytes=0) == 2
    assert list(folder.iterdir()) == []


def test_a_checkpoint_that_is_too_deep_is_not_copied_and_says_so(folder: Path) -> None:
    nest(folder / "fits", MOST_LEVELS - 1)
    assert len(listed(folder / "fits", None)) == MOST_LEVELS
    nest(folder / "deep", DEEP)
    with pytest.raises(UnfitError, match=f"nested more than {MOST_LEVELS} deep"):
        listed(folder / "deep", None)
