"""GAIA's two samples of Alibaba's 2020 PAI trace: arrivals and lengths.

Their columns are the same and their units are not: the sample of 100,000 jobs counts HOURS, the one of 1,000 SECONDS.
``pai`` distinguishes them by their values: seconds are whole numbers in every row, hours are not; ``pai-hours`` and
``pai-seconds`` say it outright. ``cpus`` counts processors, so the number of GPUs stays unknown. Rows have no ids, so
that equal ones are jobs that came together, and each counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.core.domain.units import S_PER_HOUR
from services.simulator.raw import Collector, RawJob
from services.simulator.readers.text import header_of, number, table

COLUMNS = ("arrival_time", "length", "cpus")


class Pai:
    """GAIA's samples of PAI; the name says the unit or leaves it to the values."""

    def __init__(self, name: str) -> None:
        self.name = name

    def matches(self, head: Sequence[str]) -> bool:
        """Whether the header has this format's columns."""
        return self.name == "pai" and set(COLUMNS) <= set(header_of(head))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job; ids are line numbers."""
        rows: list[tuple[int, float, float]] = []
        for line, row in table(lines, COLUMNS, jobs.report):
            try:
                rows.append((line, number(row["arrival_time"], "arrival_time"), number(row["length"], "length")))
            except ValueError as error:
                jobs.drop(line, str(error))
        if equal := len(rows) - len({row[1:] for row in rows}):
            jobs.report.note(f"{equal} rows are equal to earlier ones: without ids, each is a job")
        fractions = any(not (arrival.is_integer() and length.is_integer()) for _, arrival, length in rows)
        hours = self.name == "pai-hours" or (self.name == "pai" and fractions)
        jobs.report.note(
            f"times are assumed to be in {'hours' if hours else 'seconds'}; the file counts CPUs, not GPUs"
        )
        unit_s = S_PER_HOUR if hours else 1.0
        for line, arrival, length in rows:
            jobs.add(line, RawJob(f"pai-{line}", arrival * unit_s, length * unit_s))
