"""When a rank's output was written, and where it is read from a time on."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_agent import shim
from gpu_agent.logs import offset_since
from gpu_agent.shim import TIMES, TIMES_RECORD, TIMES_RECORDS, Order, Times
from tests.agent.conftest import Node, eventually


class Clock:
    """The time, in seconds, both of day and since boot."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shim, "clock", clock.time)
    monkeypatch.setattr(shim.time, "time", clock.time)
    return clock


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """The order of two streams in the test's folder, which is the shim's working directory."""
    monkeypatch.chdir(tmp_path)
    made = Order()
    yield made
    for descriptor in (*made._files, made._file, made._events):
        if descriptor >= 0:
            os.close(descriptor)


def grown(stream: str, text: str = "line\n") -> None:
    with open(stream, "a", encoding="ascii") as file:
        file.write(text)


def recorded(folder: Path) -> list[tuple[float, int, int, int]]:
    return list(TIMES_RECORD.iter_unpack((folder / TIMES).read_bytes()))


def test_output_begins_where_it_had_got_to_at_a_time(order: Order, at: Clock, tmp_path: Path) -> None:
    times = Times(order)
    times.look()
    for stream, text in (("stdout", "0123456789"), ("stderr", "abc"), ("stdout", "x")):
        at.now += 100
        grown(stream, text)
        order.look()
        times.look()

    def since(time_s: float) -> list[int | None]:
        return [offset_since(tmp_path, stream, time_s) for stream in ("stdout", "stderr", "both")]

    assert since(0) == since(1_000) == since(1_099.9) == [0, 0, 0]
    assert since(1_100) == since(1_199) == [10, 0, 10]
    assert since(1_200) == [10, 3, 13]
    assert since(1_300) == since(9_999) == [11, 3, 14]
    assert offset_since(tmp_path / "none", "stdout", 0) is None, "of a shim of an earlier release"


def test_there_is_a_record_a_second_at_most_and_the_last_is_never_left_out(
    order: Order, at: Clock, tmp_path: Path
) -> None:
    times = Times(order)
    for _ in range(50):
        grown("stdout")
        at.now += 0.1
        times.look()
    times.look(is_last=True)

    found = recorded(tmp_path)
    assert len(found) <= 7
    assert found[-1][:2] == (at.now, 250)
    for _ in range(10):
        at.now += 60
        times.look()
    assert recorded(tmp_path) == found, "nothing was printed"


def test_a_long_run_keeps_its_whole_course_in_a_small_file(
    order: Order, at: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, began = 0, at.now
    monkeypatch.setattr(order, "_sizes", lambda: [size, 0])
    times = Times(order)
    for _ in range(5 * TIMES_RECORDS):
        at.now += 1
        size += 7
        times.look()
        assert len(times._records) < TIMES_RECORDS * TIMES_RECORD.size
    times.look(is_last=True)

    assert (tmp_path / TIMES).stat().st_size < TIMES_RECORDS * TIMES_RECORD.size
    for age_s in (0, 60, 3_600, 5 * TIMES_RECORDS - 100):
        offset = offset_since(tmp_path, "stdout", at.now - age_s)
        assert offset is not None
        exact = 7 * (at.now - age_s - began)
        assert exact - 7 * 16 <= offset <= exact, "never later than asked for"


def test_a_full_disk_costs_no_more_than_a_record_and_only_until_it_is_free(
    order: Order, at: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    times = Times(order)
    for call in ("open", "pwrite", "ftruncate"):
        grown("stdout")
        at.now += 10
        with monkeypatch.context() as full:
            full.setattr(os, call, refuse)
            times.look()
    at.now += 10
    times.look()

    assert [record[:2] for record in recorded(tmp_path)] == [(1_010, 5), (1_020, 10), (1_030, 15)]


def test_records_of_which_some_are_newer_or_torn_are_read(tmp_path: Path) -> None:
    records = [(30.0, 3, 0, 3), (40.0, 4, 0, 4), (10.0, 1, 0, 1), (20.0, 2, 0, 2)]
    data = b"".join(TIMES_RECORD.pack(*record) for record in records)
    (tmp_path / TIMES).write_bytes(data + b"torn")

    assert [offset_since(tmp_path, "stdout", time_s) for time_s in (5, 15, 25, 35, 45)] == [0, 1, 2, 3, 4]
    (tmp_path / TIMES).write_bytes(b"torn")
    assert offset_since(tmp_path, "stdout", 5) is None


async def test_the_agent_begins_with_the_line_that_was_being_written(node: Node) -> None:
    await node.start()
    go = node.folder / "go"
    script = f"echo one; printf two; while [ ! -e {go} ]; do sleep 0.05; done; echo ' and more'; echo three >&2"
    gang = await node.run("sh", "-c", script)
    folder = node.rank_dir(gang)
    await eventually(lambda: offset_since(folder, "both", time.time()) == 7)
    middle = time.time()
    go.touch()
    await eventually(lambda: node.plane.state(gang) == "exited")

    async def read(query: str) -> tuple[bytes, str | None]:
        status, headers, body = await node.get(f"/v1/allocations/{gang}/logs?{query}")
        assert status == 200
        return body, headers.get("x-wattshift-log-since")

    assert await read(f"stream=both&since_s={middle}") == (b"two and more\nthree\n", "7")
    assert await read(f"since_s={middle}") == (b"two and more\n", "7")
    assert await read(f"since_s={middle}&offset=8") == (b"and more\n", "7")
    assert await read("since_s=0&limit=3") == (b"one", "0")
    assert await read(f"stream=both&since_s={time.time() + 60}") == (b"", "23")
    assert (await node.get(f"/v1/allocations/{gang}/logs?since_s=nan"))[0] == 422
    (folder / TIMES).unlink()
    assert await read(f"since_s={middle}") == (b"one\ntwo and more\n", None), "the caller sees that it does not know"
