"""The Standard Workload Format of the Parallel Workloads Archive: 18 numbers per line, comments after a semicolon.

Fields used: 1 job number, 2 submission (s since ``UnixStartTime``), 4 run time (s), 5 allocated and 8 requested
processors, 11 status, 12 user. -1 means unknown. Processors count as GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from services.simulator.raw import Collector, RawJob, TraceFormatError
from services.simulator.readers.text import counted, number, numbered

FIELDS = 18


class Swf:
    """Standard Workload Format."""

    name = "swf"

    def matches(self, head: Sequence[str]) -> bool:
        """Return whether the first line that is not a comment has 18 numbers."""
        rows = [line.split() for line in head if line.strip() and not line.lstrip().startswith(";")]
        if not rows:
            return any(re.match(r"\s*;\s*(Version|UnixStartTime|MaxProcs)\s*:", line) for line in head)
        return len(rows[0]) == FIELDS and all(re.fullmatch(r"-?\d+(\.\d+)?", cell) for cell in rows[0])

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job that ran on at least one processor."""
        origin_s = 0.0
        rows: list[tuple[int, str]] = []
        for line, text in numbered(lines):
            if not text.lstrip().startswith(";"):
                rows.append((line, text))
            elif (start := re.match(r"\s*;\s*UnixStartTime:\s*(\d+)", text)) is not None and int(start[1]) > 0:
                origin_s, jobs.absolute = float(start[1]), True
        for line, text in counted(rows, jobs.report, named=True):
            cells = text.split()
            if len(cells) != FIELDS:
                if jobs.report.rows == 1:
                    raise TraceFormatError(
                        f"{jobs.report.source} is not of format swf: line {line} does not have 18 fields"
                    )
                jobs.drop(line, f"{len(cells)} fields instead of {FIELDS}")
                continue
            self._row(line, cells, origin_s, jobs)
        jobs.report.note("processors of the trace count as GPUs")

    def _row(self, line: int, cells: list[str], origin_s: float, jobs: Collector) -> None:
        try:
            submitted_s, run_s, allocated, requested = (
                number(cells[at], name)
                for at, name in ((1, "submission"), (3, "run time"), (4, "processors"), (7, "requested processors"))
            )
        except ValueError as error:
            jobs.drop(line, str(error))
            return
        processors = allocated if allocated > 0 else requested
        if not (processors > 0 and processors.is_integer()):
            jobs.drop(line, "number of processors unknown")
        elif not run_s > 0:
            jobs.drop(line, "cancelled before it ran" if cells[10] == "5" else "no run time above 0 s")
        else:
            tenant = "" if cells[11] == "-1" else f"user-{cells[11]}"
            submitted_s = submitted_s + origin_s if submitted_s >= 0 else math.nan
            jobs.add(line, RawJob(cells[0], submitted_s, run_s, int(processors), tenant))
