"""Alibaba's 2023 GPU trace (``openb``): one row per pod.

Times are seconds since the trace began. A pod ran from ``scheduled_time`` to ``deletion_time``; pods that were never
scheduled have no duration, and those without a GPU are not ours. A share of one GPU (``gpu_milli`` below 1000) counts
as a whole one, because gangs here hold whole devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.simulator.raw import Collector, RawJob
from services.simulator.readers.text import header_of, number, table, whole

COLUMNS = ("name", "num_gpu", "gpu_milli", "pod_phase", "creation_time", "deletion_time", "scheduled_time")


class Openb:
    """Alibaba 2023 pods."""

    name = "openb"

    def matches(self, head: Sequence[str]) -> bool:
        """Whether the header has this format's columns."""
        return set(COLUMNS) <= set(header_of(head))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every pod with a GPU that ran; tenants are the quality-of-service classes."""
        shares = 0
        for line, row in table(lines, COLUMNS, jobs.report, named=True):
            try:
                gpus = whole(row["num_gpu"], "num_gpu")
                created_s = number(row["creation_time"], "creation_time")
                scheduled_s = number(row["scheduled_time"], "scheduled_time")
                deleted_s = number(row["deletion_time"], "deletion_time")
                shares += gpus == 1 and number(row["gpu_milli"], "gpu_milli") < 1000
            except ValueError as error:
                jobs.drop(line, str(error))
                continue
            if gpus < 1:
                jobs.drop(line, "no GPU")
            elif scheduled_s != scheduled_s:
                jobs.drop(line, f"never scheduled (phase {row['pod_phase']})")
            else:
                jobs.add(line, RawJob(row["name"], created_s, deleted_s - scheduled_s, gpus, row.get("qos", "")))
        if shares:
            jobs.report.note(f"{shares} pods held a share of one GPU: counted as one whole GPU")
