"""The spool: what is written is there after a crash, once, and in order."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import spool
from gpu_agent.spool import Spool
from services.contracts.nodes import EnergyInterval, EnergySource, Usage

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def an_interval(sequence: int, allocation: str | None = None) -> EnergyInterval:
    usage = Usage(
        allocation_id=allocation,
        devices=[0],
        gpu_energy_j=1,
        cpu_energy_j=0,
        static_energy_j=0,
        source=EnergySource.COUNTER,
    )
    start_at = NOON + timedelta(seconds=sequence)
    end_at = start_at + timedelta(seconds=1)
    return EnergyInterval(
        boot_id="b", sequence=sequence, start_at=start_at, end_at=end_at, metered_gpu_energy_j=1, usages=[usage]
    )


async def filled(folder: Path, count: int = 5) -> Spool:
    made = Spool(folder)
    for sequence in range(count):
        await made.append(an_interval(sequence, "a" if sequence == 1 else None), {"after": sequence})
    return made


def sequences(of: Spool) -> list[int]:
    return [interval.sequence for interval in of.batch(100)]


async def test_what_was_acknowledged_does_not_come_again(tmp_path: Path) -> None:
    made = await filled(tmp_path)
    assert made.batch(2) == [an_interval(0), an_interval(1, "a")]
    assert made.mentions("a")
    made.acknowledge(made.batch(2))
    assert not made.mentions("a")
    again = Spool(tmp_path)
    assert sequences(again) == [2, 3, 4]
    assert again.state == {"after": 4}
    (tmp_path / "energy.acknowledged").unlink()
    assert sequences(Spool(tmp_path)) == [0, 1, 2, 3, 4], "sent twice is better than lost"


async def test_an_overflow_during_a_delivery_loses_no_more_than_what_overflowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_MOST_PENDING", 5)
    made = await filled(tmp_path)
    delivered, refused = made.batch(2), made.batch(3)[2]
    for sequence in range(5, 9):
        await made.append(an_interval(sequence), {"after": sequence})
    made.acknowledge(delivered)
    made.reject(refused)
    assert sequences(made) == [4, 5, 6, 7, 8]
    assert (tmp_path / "energy.rejected.jsonl").read_text() == refused.model_dump_json() + "\n"


@pytest.mark.parametrize("cut", range(1, 60, 7))
async def test_a_line_torn_by_a_crash_was_never_there(tmp_path: Path, cut: int) -> None:
    await filled(tmp_path)
    content = (tmp_path / "energy.jsonl").read_bytes()
    (tmp_path / "energy.jsonl").write_bytes(content[:-cut])
    again = Spool(tmp_path)
    assert sequences(again) == [0, 1, 2, 3]
    assert again.state == {"after": 3}
    await again.append(an_interval(9), {"after": 9})
    assert sequences(Spool(tmp_path)) == [0, 1, 2, 3, 9]


async def test_the_state_outlives_everything_that_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_COMPACT_BYTES", 1_000)
    made = await filled(tmp_path, 20)
    made.acknowledge(made.batch(20))
    assert (tmp_path / "energy.jsonl").stat().st_size < 1_000
    again = Spool(tmp_path)
    assert (len(again), again.state) == (0, {"after": 19})
    await again.append(an_interval(20), {"after": 20})
    assert sequences(Spool(tmp_path)) == [20]


async def test_a_full_disk_delays_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await filled(tmp_path, 1)
    real: Any = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if offset + len(data) > 600:
            if offset < 600:
                real(descriptor, data[: 600 - offset], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    for sequence in range(1, 4):
        await made.append(an_interval(sequence, "a"), {"after": sequence})
    assert "No space left" in made.problem
    assert made.mentions("a")
    assert sequences(made) == sequences(Spool(tmp_path)), "nothing is sent before it is on disk"
    monkeypatch.setattr(os, "pwrite", real)
    await made.append(an_interval(4), {"after": 4})
    assert made.problem == ""
    assert sequences(made) == sequences(Spool(tmp_path)) == [0, 1, 2, 3, 4]


async def test_a_spool_of_nonsense_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "energy.jsonl").write_bytes(b"nonsense\n")
    made = Spool(tmp_path)
    assert (len(made), made.state) == (0, None)
    await made.append(an_interval(0), {})
    assert sequences(Spool(tmp_path)) == [0]
    assert (tmp_path / "energy.unreadable").read_bytes() == b"nonsense\n"


async def test_a_writer_that_is_cancelled_lets_the_disk_finish_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = Spool._write

    def slow(made: Spool, raw: bytes) -> None:
        begun.set()
        go_on.wait(10)
        write(made, raw)

    monkeypatch.setattr(Spool, "_write", slow)
    made = Spool(tmp_path)
    first = asyncio.create_task(made.append(an_interval(0), {"after": 0}))
    await asyncio.to_thread(begun.wait, 10)
    first.cancel()
    second = asyncio.create_task(made.append(an_interval(1), {"after": 1}))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([first, second])

    assert first.cancelled()
    assert sequences(made) == sequences(Spool(tmp_path)) == [0, 1]
    assert Spool(tmp_path).state == {"after": 1}


async def test_the_file_stays_small_also_where_something_always_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's node delivers late, so that its newest intervals are always pending."""
    monkeypatch.setattr(spool, "_COMPACT_BYTES", 1_000)
    made = await filled(tmp_path, 5)
    largest = 0
    for sequence in range(5, 100):
        await made.append(an_interval(sequence), {"after": sequence})
        made.acknowledge(made.batch(1))
        largest = max(largest, (tmp_path / "energy.jsonl").stat().st_size)
        if sequence % 10 == 0:
            again = Spool(tmp_path)
            assert (sequences(again), again.state) == (sequences(made), {"after": sequence})
    assert sequences(made) == [95, 96, 97, 98, 99]
    assert largest < 20 * len((tmp_path / "energy.jsonl").read_bytes().splitlines()[-1])
