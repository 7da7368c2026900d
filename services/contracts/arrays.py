"""Arrays of jobs, and dependencies between jobs."""

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from services.contracts.invalid import JOB_NUMBER
from services.contracts.schema import Int, Message, Name, maybe
from services.core.domain.dependencies import Condition

MAX_ARRAY_TASKS = 10_000
MAX_ARRAY_INDEX = 999_999
MAX_DEPENDENCIES = 1_000
ARRAY_VARIABLES = 5
"""Variables that a task has in addition: ``WATTSHIFT_ARRAY_ID``, ``_INDEX``, ``_COUNT``, ``_FIRST`` and ``_LAST``."""
ARRAY_FORM = "write 0-99, 0-99:10 (every tenth), 1,3,5-9, or 0-99%8 (at most 8 at once)"

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?")


@dataclass(frozen=True, slots=True)
class ArrayTasks:
    """The tasks of an array."""

    indices: tuple[int, ...]  #: (n_tasks,) ascending, without repetition
    max_running: int | None = None  #: The most tasks that may hold GPUs at once; None for no limit


def read_array(text: str) -> ArrayTasks:
    """Return the tasks of a text such as ``0-99:2%8``; ``ValueError`` for another form, a repetition, or too many."""
    ranges, percent, limit = text.partition("%")
    if percent and not (re.fullmatch(r"\d{1,6}", limit) and int(limit)):
        raise ValueError(f"{text!r}: what follows % is the number of tasks that may run at once, at least 1")
    indices: set[int] = set()
    count = 0
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r} is no array; {ARRAY_FORM}")
        first = int(found[1])
        each = range(first, int(found[2] or first) + 1, int(found[3] or 1) or MAX_ARRAY_INDEX + 1)
        if not each or (found[3] and not int(found[3])):
            raise ValueError(f"{part.strip()!r} is empty; {ARRAY_FORM}")
        count += len(each)
        if count > MAX_ARRAY_TASKS:
            raise ValueError(f"{text!r} has more than {MAX_ARRAY_TASKS:,} tasks, which is the most of an array")
        indices.update(each)
    if len(indices) < count:
        raise ValueError(f"{text!r} names an index twice")
    return ArrayTasks(tuple(sorted(indices)), int(limit) if percent else None)


def _checked_array(text: str) -> str:
    read_array(text)
    return text


ArrayText = Annotated[str, StringConstraints(max_length=10_000), AfterValidator(_checked_array)]
"""Indices of tasks as ranges, and after ``%`` how many may run at once: ``0-99:2%8``."""

Number = Annotated[str, StringConstraints(pattern=rf"^#{JOB_NUMBER}$")]
Position = Annotated[Int, Field(ge=0, lt=1_000)]
JobReference = Name | Number | Position
"""A job or an array: its id, name or number, or the beginning of its id; in a batch also its position, from 0."""
References = JobReference | Annotated[list[JobReference], Field(min_length=1, max_length=MAX_DEPENDENCIES)]


class After(Message):
    """Other jobs that must have ended before a job may start, and how.

    Each is named by its id, by its name, by its number as a string (`#12`, or `12` if no job has that name), by the
    beginning of its id or, in a batch, by its position from 0. An array stands for all of its tasks.
    """

    ok: References | None = maybe("These must have succeeded; of an array, every task.")
    any: References | None = maybe("These must have ended, in whatever way.")
    not_ok: References | None = maybe("These must have failed or been cancelled; of an array, at least one task.")

    def references(self) -> list[tuple[Condition, str | int]]:
        """Return every job that is named, with its condition, in order."""
        named: list[tuple[Condition, str | int]] = []
        for condition in Condition:
            found: str | int | list[str | int] | None = getattr(self, condition.value)
            jobs = found if isinstance(found, list) else [] if found is None else [found]
            named += [(condition, job) for job in jobs]
        return named


class TaskCounts(Message):
    """How many tasks of an array are in each state."""

    held: int = 0
    queued: int = 0
    starting: int = 0
    running: int = 0
    preempting: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
