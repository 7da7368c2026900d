"""A job's progress: from its progress file, from its log, or posted. Reading is cheap, whatever a job writes."""

import math
import os
import re
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import thread_time
from types import FrameType
from typing import cast

import orjson

from gpu_agent.logs import open_regular
from gpu_agent.shim import clock
from services.contracts.jobs import Progress

_TAIL_BYTES = 64 * 1024
_LINES = 200
_SCAN_BYTES_PER_S = 256 * 1024
_LINE_BYTES = 4_096
_SEARCH_S = 0.02
"""CPU time for all lines of one read: the agent has one thread for all jobs of its node."""
_LEAST_SEARCH_S = 0.0001
_STRIKES = 3
LONGEST_SAVE_S = 1e9
LARGEST_NOISE = 1e15  #: Samples; a greater noise scale says the same: that no batch is too large


@dataclass(frozen=True, slots=True)
class Report:
    """A job's last report.

    ``gpu_load`` is the load of its devices where they are simulated, ``local_batch`` its samples per GPU and step, and
    ``noise_scale`` its gradient noise scale in samples. ``saved_at`` is when it last saved its work, UTC seconds, and
    ``save_s`` how long that took; ``saves_when_asked``: whether SIGTERM has it do so.
    """

    done: float | None
    total: float | None = None
    gpu_load: float | None = None
    local_batch: float | None = None
    noise_scale: float | None = None
    saved_at: float | None = None
    save_s: float | None = None
    saves_when_asked: bool = False

    def to_line(self) -> bytes:
        return orjson.dumps(asdict(self))


def parse_report(line: bytes) -> Report | None:
    """Return the report in one JSON line; None if nothing in it is usable."""
    try:
        parsed: object = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict):
        return None
    said = cast("dict[str, object]", parsed)
    names = ("done", "total", "gpu_load", "local_batch", "noise_scale", "saved_at", "save_s")
    done, total, load, batch, noise, saved_at, save_s = (_number(said.get(name)) for name in names)
    if done is None and load is None and saved_at is None:
        return None
    noise = min(noise, LARGEST_NOISE) if noise else None
    save_s = min(save_s, LONGEST_SAVE_S) if save_s is not None else None
    load, heeds = None if load is None else min(load, 1.0), said.get("saves_when_asked") is True
    return Report(done, total, load, batch or None, noise, saved_at, save_s, heeds)


def _number(value: object) -> float | None:
    """Return a finite number >= 0; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | bytes):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and 0 <= number <= 1e18 else None


class FileReader:
    """Reads the last usable line of a progress file that may grow, be replaced, or be nonsense."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self.written_s = 0.0  #: When the last report was written, UTC seconds

    def read(self) -> Report | None:
        """Return the newest report if the file has changed since the last call."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        if (status.st_mtime_ns, status.st_size) == self._seen:
            return None
        descriptor = open_regular(self._path)
        if descriptor is None:
            return None
        try:
            tail = os.pread(descriptor, _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
        finally:
            os.close(descriptor)
        self._seen = (status.st_mtime_ns, status.st_size)
        self.written_s = status.st_mtime
        lines = tail[: tail.rfind(b"\n") + 1].splitlines()[: -_LINES - 1 : -1]
        report = next((found for line in lines if (found := parse_report(line)) is not None), None)
        saves = (parse_report(line) for line in lines if b'"saved_at"' in line)
        saved = next((each for each in saves if each is not None and each.saved_at is not None), None)
        if report is not None and saved is not None:
            report = replace(report, saved_at=saved.saved_at, save_s=saved.save_s)
        return report


class LogReader:
    """Searches new output for the job's pattern, with limits on bytes per second, line length and CPU time."""

    def __init__(self, path: Path, pattern: str) -> None:
        self._path = path
        self._offset = 0
        self._read_at = clock()
        self._skipping = False
        self._strikes = 0
        self.written_s = 0.0  #: When the output was last written, UTC seconds
        self.problem = ""  #: Why the pattern is no longer searched for
        try:
            self._pattern = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            self.problem = f"the progress pattern is not a regular expression: {error}"

    def read(self) -> Report | None:
        """Return the newest match in the output since the last call, within the time for the search."""
        if self.problem:
            return None
        end_s = thread_time() + _SEARCH_S
        for line in reversed(self._new_lines()):
            try:
                match = search_within(self._pattern, line.decode(errors="replace"), end_s - thread_time())
            except TimeoutError:
                self._strikes += 1
                if self._strikes == _STRIKES:
                    self.problem = "the progress pattern takes too long to search for"
                return None
            if match is not None and (done := _number(match.groupdict().get("done"))) is not None:
                return Report(done, _number(match.groupdict().get("total")))
        return None

    def _new_lines(self) -> list[bytes]:
        descriptor = open_regular(self._path)
        if descriptor is None:
            return []
        now = clock()
        budget = int(min(max(now - self._read_at, 0.1), 1.0) * _SCAN_BYTES_PER_S)
        self._read_at = now
        try:
            status = os.fstat(descriptor)
            size, self.written_s = status.st_size, status.st_mtime
            self._offset = min(self._offset, size)
            if size - self._offset > 4 * _SCAN_BYTES_PER_S:
                self._offset, self._skipping = size - budget, True  # only the newest counts: leave out the rest
            chunk = os.pread(descriptor, budget, self._offset)
        finally:
            os.close(descriptor)
        end = chunk.rfind(b"\n") + 1
        if end == 0:
            if len(chunk) < _LINE_BYTES:
                return []  # a line is being written
            self._offset += len(chunk)
            lines, self._skipping = ([] if self._skipping else [chunk[:_LINE_BYTES]]), True
            return lines
        self._offset += end
        lines = [line[:_LINE_BYTES] for line in chunk[:end].splitlines()]
        if self._skipping:
            lines = lines[1:]
        self._skipping = False
        return lines[-_LINES:]


def search_within(pattern: re.Pattern[str], line: str, seconds: float) -> re.Match[str] | None:
    """Search a line, but give up after some seconds of CPU time: some patterns would take longer than anybody can wait.

    The search runs Python's signal handlers, so a timer interrupts it. Timers count the time of all threads, such as
    those that copy checkpoints, so it is set again until this thread has used up its own. Main thread only.

    Raises:
        TimeoutError: The search did not end in time, or had hardly any: a timer of 0 never goes off.
    """
    if seconds < _LEAST_SEARCH_S:
        raise TimeoutError
    end_s = thread_time() + seconds
    searching = True

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if searching:
            if (left_s := end_s - thread_time()) <= 0:
                raise TimeoutError
            signal.setitimer(signal.ITIMER_VIRTUAL, max(left_s, _LEAST_SEARCH_S))

    earlier = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        return pattern.search(line)
    finally:
        searching = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)


class ProgressReader:
    """A job's progress, from the source in its spec; the load of simulated devices always comes from its file."""

    def __init__(self, spec: Progress, progress_file: Path, stdout: Path) -> None:
        self._source = spec.source
        self._file = FileReader(progress_file)
        self._log = LogReader(stdout, spec.pattern or "") if spec.source == "log" else None
        self.last: Report | None = None
        self.last_at = self._polled_at = clock()
        """When the report was made, by the agent's clock: between two reads, according to the file's own time."""
        self.gpu_load: float | None = None
        self.saved: Report | None = None  #: The last report that told when the work was saved
        self.saves_when_asked = False

    @property
    def problem(self) -> str:
        """Why progress is unknown; empty if it is known."""
        return self._log.problem if self._log else ""

    def poll(self) -> bool:
        """Read file and log; return True if the job has made progress."""
        written = self._file.read()
        self._note(written)
        took = self._take(self._log.read() if self._log else written if self._source == "file" else None)
        now = clock()
        if took:
            age_s = time.time() - (self._log or self._file).written_s
            self.last_at = min(max(now - age_s, self._polled_at), now)
        self._polled_at = now
        return took

    def post(self, report: Report) -> bool:
        """Store what the job has posted; return True if the job reports in this way."""
        self._note(report)
        if self._source != "http":
            return False
        if self._take(report):
            self.last_at = clock()
        return True

    def _note(self, report: Report | None) -> None:
        """Note what counts wherever it was reported."""
        if report is not None:
            self.gpu_load = self.gpu_load if report.gpu_load is None else report.gpu_load
            self.saves_when_asked |= report.saves_when_asked
            if report.saved_at is not None and report.saved_at <= time.time():
                self.saved = report

    def _take(self, report: Report | None) -> bool:
        if report is None or report.done is None:
            return False
        report = replace(report, saved_at=None, save_s=None, saves_when_asked=False)  # of which nothing is progress
        if report == self.last:
            return False
        self.last = report
        return True
