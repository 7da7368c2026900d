"""Wattshift's own history, for replaying what a live cluster did: CSV or JSON Lines, one job per line.

============== =============================================================== =========
column         meaning                                                         needed
============== =============================================================== =========
job_id         unique                                                          yes
submitted_at   ISO 8601 with zone, or seconds or milliseconds since 1970       yes
started_at     first time it held GPUs, ISO 8601; empty if it never did        yes
ended_at       ISO 8601; empty if it has not ended                             yes
gpus           GPUs it held, the last gang if it was resized                   yes
project        owner
state          its end state
run_s          seconds it held GPUs, if preemption made that less than
               ``ended_at - started_at``
gpu_s          seconds times GPUs over all its gangs; if it was resized, a replay
               runs this GPU time on ``gpus``
energy_j       measured energy of its GPUs and its share of the hosts, joules; or
               ``energy_kj``, ``_mj`` (10^6), ``_wh``, ``_kwh``, ``_mwh``, or its mean
               ``power_w`` or ``power_kw``
array          the array it was a task of
max_running    how many tasks of that array could hold GPUs at once
after          ids of jobs and arrays that it waited for, separated by spaces; a
               replay starts it once those have ended
slice          the MIG slice that it asks for instead of GPUs, such as ``2g``
ran_on         the slice that ``run_s`` and ``energy_j`` refer to, if it is a
               different one; ``7g`` or ``whole`` is a whole GPU
============== =============================================================== =========
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, cast

from services.core.domain.mig import WHOLE, sevenths_of
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.simulator.raw import Collector, RawJob, TraceFormatError
from services.simulator.readers.text import (
    NO_ZONE,
    Row,
    counted,
    date_s,
    has_zone,
    header_of,
    in_unit,
    number,
    numbered,
    table,
    whole,
)

COLUMNS = ("job_id", "submitted_at", "started_at", "ended_at", "gpus")
JOULES = {"j": 1.0, "kj": 1e3, "mj": 1e6, "wh": S_PER_HOUR, "kwh": J_PER_KWH, "mwh": 1e3 * J_PER_KWH}
WATTS = {"w": 1.0, "kw": 1e3}
KNOWN = {*(f"energy_{unit}" for unit in JOULES), *(f"power_{unit}" for unit in WATTS)}


class History:
    """Wattshift's own history."""

    name = "wattshift"

    def matches(self, head: Sequence[str]) -> bool:
        first = next((line for line in head if line.strip()), "")
        if first.lstrip().startswith("{"):
            return set(COLUMNS) <= set(_object(first) or {})
        return set(COLUMNS) <= set(header_of(head))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job that held GPUs and ended."""
        jobs.absolute = True
        for line, row in _rows(lines, jobs):
            for name in row.keys() - KNOWN:
                if name.lower().startswith(("energy", "power")):
                    units = ", ".join((*JOULES, *WATTS))
                    jobs.report.note(f"the column {name!r} is not read: it ends with none of the units {units}")
            if not all(has_zone(row[name]) for name in COLUMNS[1:4] if row[name]):
                jobs.report.note(NO_ZONE)
            try:
                self._row(line, row, jobs)
            except ValueError as error:
                jobs.drop(line, str(error))

    def _row(self, line: int, row: Row, jobs: Collector) -> None:
        if not row["started_at"]:
            jobs.drop(line, "never started")
            return
        if not row["ended_at"]:
            jobs.drop(line, "not ended")
            return
        if jobs.again(line, row["job_id"], row["submitted_at"], row["started_at"], row["ended_at"]):
            return
        gpus = whole(row["gpus"], "gpus")
        if gpus < 1:
            jobs.drop(line, "no GPU")
            return
        run_s = number(row.get("run_s", ""), "run_s")
        if math.isnan(run_s):
            run_s = date_s(row["ended_at"], "ended_at") - date_s(row["started_at"], "started_at")
        held_s, gpu_s = run_s, number(row.get("gpu_s", ""), "gpu_s")
        if not math.isnan(gpu_s):
            if not math.isclose(gpu_s, run_s * gpus, rel_tol=0.01):
                jobs.report.note("jobs that were resized run all their GPU time on their last gang")
            run_s = gpu_s / gpus
        submitted_s = date_s(row["submitted_at"], "submitted_at")
        energy_j = in_unit(row, "energy", JOULES)
        if math.isnan(energy_j):
            energy_j = in_unit(row, "power", WATTS) * held_s
        limit = row.get("max_running", "")
        asked, ran_on = _slices(row, gpus)
        jobs.add(
            line,
            RawJob(
                row["job_id"],
                submitted_s,
                run_s,
                gpus,
                row.get("project", ""),
                energy_j=energy_j,
                array=row.get("array", ""),
                max_running=whole(limit, "max_running") if limit else 0,
                after=tuple(row.get("after", "").split()),
                slice_sevenths=asked,
                ran_sevenths=ran_on,
            ),
        )


def _slices(row: Row, gpus: int) -> tuple[int, int]:
    """Return the slice that a job asks for and the one that it ran on, in sevenths; 0 for GPUs."""
    asked, ran_on = row.get("slice", ""), row.get("ran_on", "")
    if not asked:
        if ran_on:
            raise ValueError("ran_on without a slice")
        return 0, 0
    if gpus != 1:
        raise ValueError("a slice and several GPUs")
    sevenths = sevenths_of(asked)
    return sevenths, WHOLE if ran_on == "whole" else sevenths_of(ran_on) if ran_on else sevenths


def _rows(lines: Iterable[str], jobs: Collector) -> Iterator[tuple[int, Row]]:
    stream = iter(lines)
    begun: list[str] = []
    while not "".join(begun).strip() and (line := next(stream, "")):
        begun.append(line)
    if not (begun and begun[-1].lstrip().startswith("{")):
        yield from table(chain(begun, stream), COLUMNS, jobs.report, named=True)
        return
    for line, text in counted(numbered(chain(begun, stream)), jobs.report, named=True):
        row = _object(text)
        if row is None:
            jobs.drop(line, "not a JSON object")
        elif missing := [column for column in COLUMNS if column not in row]:
            if jobs.report.rows == 1:
                raise TraceFormatError(f"{jobs.report.source} is not of format wattshift: no {missing[0]!r}")
            jobs.drop(line, f"no {missing[0]}")
        else:
            yield line, row


def _object(text: str) -> Row | None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):  # the latter: brackets within brackets, a thousand deep
        return None
    if not isinstance(value, dict):
        return None
    return {str(key): "" if cell is None else str(cell) for key, cell in cast("dict[str, Any]", value).items()}
