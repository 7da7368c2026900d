"""The job lists of Tiresias' simulator (``60_job.csv`` and its kind); times are seconds since the trace began."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.simulator.raw import Collector, RawJob
from services.simulator.readers.text import header_of, number, table, whole

COLUMNS = ("job_id", "num_gpu", "submit_time", "model_name", "duration")


class Tiresias:
    """Tiresias' job lists."""

    name = "tiresias"

    def matches(self, head: Sequence[str]) -> bool:
        """Whether the header has this format's columns."""
        return set(COLUMNS) <= set(header_of(head))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job."""
        for line, row in table(lines, COLUMNS, jobs.report, named=True):
            try:
                gpus = whole(row["num_gpu"], "num_gpu")
                times = number(row["submit_time"], "submit_time"), number(row["duration"], "duration")
            except ValueError as error:
                jobs.drop(line, str(error))
                continue
            if gpus < 1:
                jobs.drop(line, "no GPU")
                continue
            jobs.add(line, RawJob(row["job_id"], *times, gpus=gpus, application=row["model_name"]))
