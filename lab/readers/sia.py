"""The workloads of Sia (and, of 160 jobs, of Pollux): what each job trains, how wide, and at which batch size.

Times are seconds since the trace began. Durations are not stated: they follow from the measured models, so a recipe
works them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.simulator.raw import Collector, RawJob
from services.simulator.readers.text import header_of, number, table, whole

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


class Sia:
    """Sia's and Pollux's workloads."""

    name = "sia"

    def matches(self, head: Sequence[str]) -> bool:
        """Whether the header has this format's columns."""
        return set(COLUMNS) <= set(header_of(head))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job, its duration left open."""
        jobs.needs_duration = False
        for line, row in table(lines, COLUMNS, jobs.report, named=True):
            try:
                gpus = whole(row["num_replicas"], "num_replicas")
                batch = whole(row["batch_size"], "batch_size")
                submitted_s = number(row["time"], "time")
            except ValueError as error:
                jobs.drop(line, str(error))
                continue
            if gpus < 1 or batch < 1:
                jobs.drop(line, "no replica, or an empty batch")
                continue
            name, application = row["name"], row["application"]
            jobs.add(line, RawJob(name, submitted_s, gpus=gpus, application=application, batch_size=batch))
