"""Energy intervals on disk until the control plane has them.

One file of JSON lines. A line holds an interval and what the meter needs to continue after it, so that both are stored
or neither is: an agent killed at any moment counts no joule twice and loses none. Acknowledgements are stored beside
it; losing them only causes intervals to be sent again, which is harmless.
"""

import asyncio
import itertools
import os
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from gpu_agent import files
from gpu_agent.shim import sync_folder
from services.contracts.nodes import EnergyInterval
from services.kit.logging import Log
from services.kit.tasks import to_the_end

log = Log(__name__)

_COMPACT_BYTES = 1 << 20
_MOST_PENDING = 200_000
_MOST_COPIED = 10_000  #: More intervals than this are not written anew: that would take too long


class Spool:
    """The intervals that the control plane has not acknowledged, oldest first."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / "energy.jsonl"
        self._acknowledged_path = folder / "energy.acknowledged"
        self._rejected_path = folder / "energy.rejected.jsonl"
        self._pending: deque[EnergyInterval] = deque()
        self._unsaved: deque[tuple[EnergyInterval, bytes]] = deque()
        self._mentions: Counter[str] = Counter()
        self._saving = asyncio.Lock()
        self._size, self._compact_at = 0, _COMPACT_BYTES
        self._last_line = b""
        self.state: dict[str, Any] | None = None  #: The meter's state after the last interval
        self.problem = ""  #: Why intervals cannot be stored now; empty if they can
        self._load()

    def __len__(self) -> int:
        return len(self._pending) + len(self._unsaved)

    def mentions(self, allocation_id: str) -> bool:
        """Return whether an interval with energy of this allocation is still to be delivered."""
        return self._mentions[allocation_id] > 0

    async def append(self, interval: EnergyInterval, state: dict[str, Any]) -> None:
        """Store an interval. One that cannot be written waits in memory, and is not sent until it is on disk."""
        raw = orjson.dumps({"interval": interval.model_dump(mode="json"), "state": state}) + b"\n"
        self._count(interval, 1)
        self._unsaved.append((interval, raw))
        self.state = state
        async with self._saving:
            await to_the_end(self._save())

    async def _save(self) -> None:
        """Write the intervals that are not on disk yet, including those that could not be written before."""
        try:
            while self._unsaved:
                await asyncio.to_thread(self._write, self._unsaved[0][1])
                self._pending.append(self._unsaved.popleft()[0])
            self.problem = ""
        except OSError as error:
            if not self.problem:
                log.error("spool.not_written", error=str(error))
            self.problem = f"energy readings cannot be stored: {error}"
        while len(self._pending) > _MOST_PENDING:
            lost = self._pending.popleft()
            self._count(lost, -1)
            log.error("spool.overflow", lost_from=lost.start_at, lost_to=lost.end_at)

    def batch(self, limit: int) -> list[EnergyInterval]:
        return list(itertools.islice(self._pending, limit))

    def acknowledge(self, intervals: Sequence[EnergyInterval]) -> None:
        """Forget intervals, of a batch or its first ones: the control plane has them. Some may have been lost since."""
        last = intervals[-1]
        for interval in intervals:
            if self._pending and self._pending[0] is interval:
                self._count(self._pending.popleft(), -1)
        try:
            mark = f"{last.boot_id} {last.sequence}".encode()
            files.replace(self._acknowledged_path, mark, durable=False)
            if self._size > self._compact_at and not self._unsaved and len(self._pending) <= _MOST_COPIED:
                self._compact()
        except OSError as error:
            log.warning("spool.acknowledgement_not_written", error=str(error))

    def reject(self, interval: EnergyInterval) -> None:
        """Set an interval aside: the control plane rejects it, and others are waiting behind it."""
        try:
            with self._rejected_path.open("ab") as file:
                file.write(interval.model_dump_json().encode() + b"\n")
        except OSError as error:
            log.warning("spool.rejected_not_written", error=str(error))
        self.acknowledge([interval])

    def _write(self, raw: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            written = os.pwrite(descriptor, raw, self._size)
            os.ftruncate(descriptor, self._size + written)
            if written < len(raw):
                raise OSError(f"{written} of {len(raw)} bytes written")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._size += len(raw)
        self._last_line = raw

    def _compact(self) -> None:
        """Restart the file with what is pending and its last line, whose state is still needed.

        Some may always be pending: an engine's node delivers late. The file then grows to twice what they take.
        """
        waiting = list(self._pending)[:-1]
        lines = [orjson.dumps({"interval": each.model_dump(mode="json"), "state": None}) + b"\n" for each in waiting]
        content = b"".join([*lines, self._last_line])
        files.replace(self._path, content)
        self._size, self._compact_at = len(content), max(_COMPACT_BYTES, 2 * len(content))

    def _load(self) -> None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        lines: list[EnergyInterval] = []
        for raw in content.splitlines(keepends=True):
            try:
                read = orjson.loads(raw)
                lines.append(EnergyInterval.model_validate(read["interval"]))
                state = read["state"]
            except (orjson.JSONDecodeError, ValidationError, KeyError, TypeError) as error:
                log.warning("spool.torn_line", at=self._size, error=str(error))
                break
            if not raw.endswith(b"\n"):
                lines.pop()
                break
            self.state = state
            self._size += len(raw)
            self._last_line = raw
        for interval in lines[self._acknowledged(lines) :]:
            self._pending.append(interval)
            self._count(interval, 1)
        if self._size == 0 and content:
            self._path.rename(self._path.with_suffix(".unreadable"))
            sync_folder(str(self._path.parent))

    def _acknowledged(self, lines: list[EnergyInterval]) -> int:
        """Return how many of the lines in the file are acknowledged."""
        try:
            boot_id, sequence = self._acknowledged_path.read_text().split()
            last = (boot_id, int(sequence))
        except (FileNotFoundError, ValueError):
            return 0
        counts = (count for count, each in enumerate(lines, start=1) if (each.boot_id, each.sequence) == last)
        return max(counts, default=0)

    def _count(self, interval: EnergyInterval, step: int) -> None:
        for usage in interval.usages:
            if usage.allocation_id is not None:
                self._mentions[usage.allocation_id] += step
                if not self._mentions[usage.allocation_id]:
                    del self._mentions[usage.allocation_id]
