"""Files that are written completely or not at all."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_agent import shim
from services.kit import files


@contextmanager
def little_room() -> Iterator[None]:
    """Let no file grow beyond 100 bytes: as on a full disk, what still fits is written and only the rest is refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_does_not_fit_is_not_replaced_by_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "command"
    files.replace(file, b"as it was")
    with little_room(), pytest.raises(OSError, match="too large"):
        files.replace(file, bytes(150))
    assert file.read_bytes() == b"as it was"


def test_facts_that_do_not_fit_are_not_replaced_by_their_beginning(tmp_path: Path) -> None:
    path = str(tmp_path / "stop")
    shim.write_facts(path, {"cause": "stop"})
    with little_room(), pytest.raises(OSError, match="No space"):
        shim.write_facts(path, {"cause": "stop", "detail": "x" * 150})
    assert shim.read_facts(path) == {"cause": "stop"}


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with files.locked(tmp_path), pytest.raises(BlockingIOError), files.locked(tmp_path):
        raise AssertionError("both hold it")
    with files.locked(tmp_path):
        pass


def test_what_is_no_file_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    """`report --csv /dev/full`, by root, left a file in the place of the device for every program of the machine."""
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        with files.whole(path) as part:
            part.write_text("all")
    assert (link.is_symlink(), file.read_text(), pipe.is_fifo(), os.read(reader, 9)) == (True, "all", True, b"all")
    os.close(reader)
