"""Forecasts as they were issued: rows of target hour and value, one issue after the other.

The order of the rows matters: each issue is a block of consecutive hours, and a target hour appears in several. A new
issue begins wherever the hour goes back. An issue is assumed to be known from its first hour on.
"""

from pathlib import Path

import numpy as np

from services.core.domain.signal import Signal, impossible
from services.simulator.raw import ReadReport, TraceFormatError
from services.simulator.readers.text import date_s, number, open_text, table
from services.simulator.workload import IssuedForecasts

COLUMNS = ("Datetime (UTC)", "Carbon Intensity Forecast")


def read_forecasts(path: Path) -> tuple[IssuedForecasts, ReadReport]:
    """Return the issues of a file; those that are cut short or have a gap are dropped and reported.

    Raises:
        TraceFormatError: There is no such file, it has another format, or no issue in it is complete.
    """
    report = ReadReport(path.name, "issued forecasts")
    blocks: list[tuple[list[int], list[float], list[float]]] = []
    with open_text(path) as lines:
        for line, row in table(lines, COLUMNS, report):
            try:
                time_s, value = date_s(row[COLUMNS[0]]), number(row[COLUMNS[1]], COLUMNS[1])
            except ValueError as error:
                report.drop(line, str(error))
                continue  # a gap, which costs the issue
            if not blocks or time_s <= blocks[-1][1][-1]:
                blocks.append(([], [], []))
            rows, times, issue = blocks[-1]
            rows.append(line)
            times.append(time_s)
            issue.append(value)
    if not blocks:
        raise TraceFormatError(f"{path.name} holds no forecast")
    lengths = [len(times) for _, times, _ in blocks]
    steps = max(set(lengths), key=lengths.count)
    usual = next(times for _, times, _ in blocks if len(times) == steps)
    step_s = float(np.median(np.diff(usual))) if steps > 1 else 3600.0
    starts: list[float] = []
    values: list[list[float]] = []
    for rows, times, issue in blocks:
        whole = len(times) == steps and np.isfinite(issue).all() and np.allclose(np.diff(times), step_s)
        if not whole or any(impossible(each, 1.0, Signal.AVERAGE_DIRECT) for each in issue):
            for line in rows:
                report.drop(line, f"an issue without its {steps} values, hour after hour")
            continue
        starts.append(times[0])
        values.append(issue)
    if not values:
        raise TraceFormatError("no whole issue; " + "; ".join(report.sentences()))
    report.kept = steps * len(values)
    begins = np.array(starts)
    return IssuedForecasts(begins, begins, step_s, np.array(values)), report
