"""Microsoft's Philly trace as Pollux and ElasticFlow preprocessed it: one row per job of a virtual cluster.

``timestamp`` is the submission (no zone stated: assumed to be UTC) and not in order; ``duration`` is seconds;
``gpu_time`` is duration x GPUs and only checks the row. Rows that are the same in every cell are one job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.simulator.raw import Collector, RawJob
from services.simulator.readers.text import date_s, header_of, number, table, whole

COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")


class Philly:
    """Philly, preprocessed."""

    name = "philly"

    def matches(self, head: Sequence[str]) -> bool:
        """Whether the header has this format's columns."""
        return set(COLUMNS) <= set(header_of(head))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job; ids are line numbers, tenants the virtual clusters."""
        jobs.absolute = True
        for line, row in table(lines, COLUMNS, jobs.report, named=True):
            try:
                job = RawJob(
                    id=f"philly-{line}",
                    submitted_s=date_s(row["timestamp"], "timestamp"),
                    duration_s=number(row["duration"], "duration"),
                    gpus=whole(row["num_gpus"], "num_gpus"),
                    tenant=row["cluster"],
                )
            except ValueError as error:
                jobs.drop(line, str(error))
                continue
            if job.gpus < 1:
                jobs.drop(line, "no GPU")
                continue
            jobs.add(line, job)
