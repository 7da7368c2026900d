"""From a trace file, or the name of a bundled trace, to a workload."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.core.domain.counted import counted
from services.core.domain.errors import DomainError
from services.simulator.bundles import bundled_jobs
from services.simulator.catalogue import catalogue, unknown
from services.simulator.raw import Collector, RawJobs, ReadReport, TraceFormatError
from services.simulator.readers.formats import JobFormat
from services.simulator.readers.text import first_lines, open_text, utc_s
from services.simulator.workload import Workload

DAY_S = 86_400.0


def detect(path: Path) -> JobFormat:
    """Detect the format of a file from its first lines; ``TraceFormatError`` if the format is unknown."""
    head = first_lines(path)
    found = next((each for each in catalogue().formats if each.matches(head)), None)
    if found is None:
        begins = next((line for line in head if line.strip()), "")[:80]
        names = ", ".join(each.name for each in catalogue().formats)
        papers = "" if "philly" in names else "; the package wattshift-lab, which is not installed here, reads more"
        raise TraceFormatError(f"{path} is not a known job trace (it begins {begins!r}); known: {names}{papers}")
    return found


def read_raw(source: str | Path, format: str | None = None) -> RawJobs:
    """Return all jobs of a trace as it states them.

    Args:
        source: A file, gzipped or not.
        format: The name of a known format; by default detected from the header.

    Raises:
        TraceFormatError: There is no such file or format, the file has another format, or no job in it is usable.
    """
    path = Path(source)
    readers = {each.name: each for each in catalogue().formats}
    if format is not None and format not in readers:
        raise TraceFormatError(unknown("trace format", format, ", ".join(readers)))
    reader = readers[format] if format is not None else detect(path)
    jobs = Collector(ReadReport(path.name, reader.name))
    with open_text(path) as lines:
        reader.read(lines, jobs)
    return jobs.finish()


def read_jobs(
    source: str | Path,
    *,
    format: str | None = None,
    recipe: str | None = None,
    start: str | float | None = None,
    days: float | None = None,
    seed: int = 0,
    undated_s: float = 0.0,
) -> Workload:
    """Return the workload of a trace.

    Args:
        source: A bundled name or a file.
        format: The file's format; by default detected from its header.
        recipe: The name of a recipe, which says how jobs behave; by default the bundle's own or that of the format.
        start: Where the simulated time begins, ISO 8601 (UTC) or UTC seconds. A trace whose own dates overlap
            the ``days`` from it keeps them; any other is shifted so that the midnight before its first job falls on
            ``start`` (dated traces keep the time of day). By default, dated traces stay.
        days: Only jobs submitted within this many days of the start.
        seed: Seed of everything the recipe draws.
        undated_s: Where a trace without dates begins by default, UTC seconds.

    Raises:
        TraceFormatError: The file cannot be read, or no job is left.
    """
    bundle = catalogue().jobs.get(str(source))
    if bundle is not None:
        raw, default = bundled_jobs(str(source), bundle, days), bundle.recipe
    else:
        raw = read_raw(source, format)
        default = catalogue().recipe_of[raw.report.format]
    name = recipe or default
    recipes = {each.name: each for each in catalogue().recipes}
    if name not in recipes:
        raise TraceFormatError(unknown("recipe", name, ", ".join(recipes)))
    start_s = utc_s(start, "start") if isinstance(start, str) else start
    placed = place(raw, start_s, days, undated_s)
    made = recipes[name].make(placed, seed)
    return replace(made, name=str(Path(source).name), notes=(*placed.report.sentences(), *made.notes))


def place(raw: RawJobs, start_s: float | None, days: float | None, undated_s: float = 0.0) -> RawJobs:
    """Return the jobs shifted into simulated time, without those outside it (see ``read_jobs``)."""
    if days is not None and not (math.isfinite(days) and days > 0):
        raise DomainError("days must be a number above 0")
    times = raw.submitted_s
    length_s = math.inf if days is None else days * DAY_S
    first_s = float(times[0])
    if start_s is None:
        times = times if raw.absolute else times + undated_s
        begin_s = first_s if raw.absolute else undated_s
    else:
        own = raw.absolute and first_s < start_s + length_s and float(times[-1]) >= start_s
        begin_s = start_s
        if not own:
            origin_s = math.floor(first_s / DAY_S) * DAY_S if raw.absolute else 0.0
            times = times - origin_s + start_s
            if raw.absolute:
                raw.report.note(f"moved by {(start_s - origin_s) / DAY_S:.2f} days to the requested start")
    inside = np.flatnonzero((times >= begin_s) & (times < begin_s + length_s))
    if not inside.size:
        raise TraceFormatError("no job is submitted in the requested days")
    if inside.size < len(raw):
        raw.report.note(f"outside the requested days: {counted(len(raw) - inside.size, 'job')}")
    return replace(raw, submitted_s=times).take(inside)
