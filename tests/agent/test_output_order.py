"""Both streams of a rank together, in the order in which they were written."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent.logs import read_both, trim
from gpu_agent.shim import Order, clock
from tests.agent.conftest import Node, eventually
from tests.agent.test_logs import _read as read

STREAMS = ("stdout", "stderr")


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """The order of two streams in the test's folder, which is the shim's working directory."""
    monkeypatch.chdir(tmp_path)
    made = Order()
    yield made
    for descriptor in (*made._files, made._file, made._events):
        if descriptor >= 0:
            os.close(descriptor)


def write(stream: int, text: str) -> None:
    with open(STREAMS[stream], "a", encoding="ascii") as file:
        file.write(text)


def shown(folder: Path, *, limit: int = 1 << 20, is_over: bool = False) -> str:
    """Everything, read in pieces of ``limit`` bytes."""
    text, offset = b"", 0
    while (piece := read_both(folder, offset, limit, is_over=is_over)).data:
        text, offset = text + piece.data, piece.next_offset
    assert offset == piece.size
    return text.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_the_writes(order: Order, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    written = ""
    for number in range(200):
        first = chance.randrange(2)
        many = chance.random() < 0.3
        for stream in (first, 1 - first) * (5 if many else 1):  # with several changes at once, a line for each of them
            lines = "".join(f"{stream} {number} {line}\n" for line in range(1 if many else chance.randrange(4)))
            write(stream, lines)
            written += lines
        order.look()
    order.look()
    for limit in (1 << 20, 1_000, 7):
        assert shown(tmp_path, limit=limit) == written
    middle = len(written) // 2
    assert read_both(tmp_path, middle, 1 << 20, is_over=False).data.decode() == written[middle:]
    assert read_both(tmp_path, -10, 1 << 20, is_over=True).data.decode() == written[-10:]
    assert read_both(tmp_path, 1 << 40, 10, is_over=True).offset == len(written)


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_many_changes_at_once_keep_lines_whole_and_in_turn(order: Order, tmp_path: Path) -> None:
    written = ""
    for number in range(300):
        write(number % 2, f"line {number}\n")
        written += f"line {number}\n"
    order.look()
    assert shown(tmp_path) == written
    write(0, "a1\na2\na3\n")
    write(1, "b1\n")
    write(0, "a4\n")
    order.look()
    lines = shown(tmp_path)[len(written) :].splitlines()
    assert sorted(lines) == ["a1", "a2", "a3", "a4", "b1"]
    assert [line for line in lines if line[0] == "a"] == ["a1", "a2", "a3", "a4"]
    assert lines.index("b1") not in (0, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_what_is_written_between_the_looks_at_both_files_keeps_its_turn(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(1, "err 1\n")
    size_of = os.fstat
    files = iter(["out 2\n", "err 2\n"])

    def size_and_then_a_write(descriptor: int) -> os.stat_result:
        size = size_of(descriptor)
        for stream, text in enumerate(files):
            write(stream, text)
        return size

    monkeypatch.setattr(os, "fstat", size_and_then_a_write)
    order.look()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    order.look()
    assert shown(tmp_path) == "err 1\nout 2\nerr 2\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify")
def test_what_is_written_during_a_look_is_taken_in_without_a_further_write(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events_of = order._runs

    writes = iter(["last\n"])

    def a_write_and_events() -> list[int]:
        for text in writes:
            write(0, text)
        return events_of()

    write(0, "first\n")
    monkeypatch.setattr(order, "_runs", a_write_and_events)
    order.look()
    assert shown(tmp_path) == "first\n"
    wake, other = os.pipe()
    order.wait(wake, clock() + 1.5)
    os.close(wake)
    os.close(other)
    assert shown(tmp_path) == "first\nlast\n"


def test_what_is_not_in_order_yet_is_shown_at_the_end_only(order: Order, tmp_path: Path) -> None:
    write(1, "first\n")
    order.look()
    write(1, "error\n")
    write(0, "output\n")
    assert shown(tmp_path) == "first\n"
    assert shown(tmp_path, is_over=True) == "first\noutput\nerror\n"


def test_output_of_a_shim_of_an_earlier_release_is_shown(tmp_path: Path) -> None:
    assert shown(tmp_path) == ""
    (tmp_path / "stdout").write_text("out\n")
    (tmp_path / "stderr").write_text("err\n")
    assert shown(tmp_path) == "out\n"
    assert shown(tmp_path, is_over=True) == "out\nerr\n"


def test_a_stream_that_grows_beyond_all_bounds_does_not_end_the_shim(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems let a file without content have the largest size that there is, time and again."""
    write(0, "first\n")
    order.look()
    for _ in range(4):
        for size in (2**63 - 1, 0):
            monkeypatch.setattr(order, "_sizes", lambda size=size: [size, 0])
            order.look()
    assert read_both(tmp_path, 0, 100, is_over=True).data == b"first\n"


def test_a_stream_that_the_job_truncates_goes_on(order: Order, tmp_path: Path) -> None:
    write(0, "one\n")
    write(1, "an error that will be overwritten\n")
    order.look()
    (tmp_path / "stderr").write_text("two\n")
    order.look()
    write(0, "three\n")
    order.look()
    assert shown(tmp_path).endswith("two\nthree\n")
    assert shown(tmp_path, is_over=True) == shown(tmp_path)


def test_discarded_output_is_left_out_and_the_rest_stays_in_order(order: Order, tmp_path: Path) -> None:
    write(0, "".join(f"{number:07d}\n" for number in range(500_000)))
    order.look()
    write(1, "warning\n")
    order.look()
    write(0, "last\n")
    order.look()
    if not trim(tmp_path / "stdout", 1 << 20):
        pytest.skip("this file system does not punch holes")
    piece = read_both(tmp_path, 0, 100, is_over=True)
    assert piece.offset > 8 * 300_000
    assert piece.data[:8].decode() == f"{piece.offset // 8:07d}\n"
    assert shown(tmp_path).endswith("0499999\nwarning\nlast\n")


async def test_a_job_is_shown_as_it_writes(node: Node) -> None:
    await node.start()
    script = "for i in $(seq 40); do echo out $i; echo err $i >&2; done; read line < go; echo end >&2"
    os.mkfifo(node.folder / "go")
    gang = await node.run("sh", "-c", script, working_dir=str(node.folder))
    lines = "".join(f"out {number}\nerr {number}\n" for number in range(1, 41))
    await eventually(lambda: (node.rank_dir(gang) / "stdout").exists())
    seen = await read(node, gang, "stream=both")
    async with asyncio.timeout(60):
        while seen[0].decode() != lines:
            assert lines.startswith(seen[0].decode())
            seen = await read(node, gang, "stream=both")
    assert seen[1:] == (0, len(lines), len(lines), False)
    (node.folder / "go").write_text("\n")
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert await read(node, gang, f"stream=both&offset={len(lines)}") == (
        b"end\n",
        len(lines),
        *[len(lines) + 4] * 2,
        True,
    )


async def test_nothing_is_lost_when_the_shim_is_killed(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", "echo out; echo err >&2; exec sleep 600")
    await eventually(lambda: (node.rank_dir(gang) / "stderr").exists() and (node.rank_dir(gang) / "stderr").read_text())
    for process in node.processes("shim"):
        process.send_signal(signal.SIGKILL)
    await eventually(lambda: node.plane.state(gang) == "exited")
    assert (await read(node, gang, "stream=both"))[0] == b"out\nerr\n"
