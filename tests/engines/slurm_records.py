"""A stand-in for Slurm's records of jobs: arrays whose waiting tasks share one, and are split off when changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from services.engines.slurm.reading import Rows, SlurmJob, SlurmNode, range_of, read_jobs, read_nodes
from services.engines.slurm.steering import Changes
from tests.engines.test_slurm_lies import JOB, NODE

Json = dict[str, Any]


class Records:
    """Slurm as far as records go; it starts what a test says.

    Attributes:
        splits: How many tasks were split off because they were changed, not because they started.
    """

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.rows: list[Json] = []
        self.splits = 0
        self._next = 1

    def submit(self, tasks: str = "", **fields: Any) -> str:
        """Take a job, or an array of such ``tasks`` as ``0-9%2``; return its number."""
        number, self._next = self._next, self._next + 1
        listed, _, limit = tasks.partition("%")
        array = {"array_job_id": number, "array_task_string": listed, "array_max_tasks": int(limit or 0)}
        begun = {"submit_time": int(self.now_s), "eligible_time": int(self.now_s)}
        self.rows.append(JOB | begun | {"job_id": number} | (array if tasks else {}) | fields)
        return str(number)

    def waiting(self, array: str) -> set[int]:
        """Return the tasks of an array that wait in its record."""
        row = next(row for row in self.rows if row["job_id"] == int(array))
        return set(range_of(row["array_task_string"])) if row.get("array_task_string") else set()

    def of(self, array: str, task: int) -> Json:
        """Return the record that a task is in."""
        own = [row for row in self.rows if row.get("array_job_id") == int(array) and row.get("array_task_id") == task]
        return own[0] if own else next(row for row in self.rows if row["job_id"] == int(array))

    def start(self, array: str, task: int, *gpus: int) -> None:
        """Run a task on these GPUs of the node."""
        row = self._own(array, task)
        row |= {"job_state": "RUNNING", "nodes": "gpu1", "start_time": int(self.now_s)}
        row["gres_detail"] = [f"gpu:h200:{len(gpus)}(IDX:{','.join(map(str, gpus))})"]

    def _own(self, array: str, task: int) -> Json:
        """Return the record of a task alone, which is made if there is none."""
        row = self.of(array, task)
        if row.get("array_task_id") is not None:
            return row
        left = sorted(self.waiting(array) - {task})
        if not left:
            row |= {"array_task_id": task, "array_task_string": ""}
            return row
        own = row | {"job_id": self._next, "array_task_id": task, "array_task_string": ""}
        self._next += 1
        row["array_task_string"] = ",".join(map(str, left))
        self.rows.append(own)
        return own

    async def jobs(self) -> tuple[Rows[SlurmJob], str]:
        return read_jobs({"jobs": [dict(row) for row in self.rows]}), "22.05.8"

    async def nodes(self) -> Rows[SlurmNode]:
        return read_nodes({"nodes": [NODE]})

    async def ended(self, numbers: Sequence[str]) -> dict[tuple[str, int], tuple[str, int | None]]:
        return {}

    async def change(self, changes: Changes) -> dict[str, str]:
        """Carry out what concerns waiting jobs, as scontrol does."""
        for numbers, fields in changes.updates:
            for number in numbers:
                for row in self._named(number):
                    self._set(row, dict(fields))
        return {}

    def _named(self, number: str) -> list[Json]:
        found = re.fullmatch(r"(\d+)_\[?([\d,-]+)\]?", number)
        if not found:
            return [row for row in self.rows if row["job_id"] == int(number)]
        array, tasks = found[1], set(range_of(found[2]))
        together = self.waiting(array)
        if together and together <= tasks:
            return [self.of(array, min(together)), *(self._own(array, task) for task in tasks - together)]
        self.splits += len(tasks & together)
        return [self._own(array, task) for task in sorted(tasks)]

    def _set(self, row: Json, fields: dict[str, str]) -> None:
        for name, value in fields.items():
            match name:
                case "starttime":
                    begin_s = self.now_s if value == "now" else datetime.fromisoformat(value + "+00:00").timestamp()
                    row["eligible_time"] = int(begin_s)
                case "admincomment":
                    row["admin_comment"] = value
                case _:
                    row[name] = value
