"""Check a report of a grid's order against an export of the ledger, by arithmetic of its own.

    wattshift grid report ORDER --json > report.json
    wattshift report --start ... --end ... --lines lines.csv
    python -m lab.grid_report report.json lines.csv

The export covers the ten minutes before the baseline and the hour after the order. Only the standard library is used,
and nothing of the product; ``docs/grid.md`` says how each figure is defined. The exit code is 0 if all of them agree.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

BEFORE_S, BUCKET_S, SHORTEST_S, RECOVERY_S, LOST_S = 600, 300, 60, 3_600, 120
NO_LIMIT_W = 1e12
TOLERANCE = 1e-6  #: Of sums of the same numbers in another order

Line = tuple[str, str, float, float, float]  #: Node, job, begin, end, joules


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def lines_of(path: Path) -> list[Line]:
    """Return the lines of an export, without what follows them as comments."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        parts = ("gpu_energy_j", "cpu_energy_j", "static_energy_j")
        return [
            (
                row["node_id"],
                row["job_id"],
                seconds(row["start_at"]),
                seconds(row["end_at"]),
                sum(float(row[each]) for each in parts),
            )
            for row in rows
        ]


def joules(lines: list[Line], begin: float, end: float) -> dict[str, float]:
    """Return what each job used in a time; a line's energy counts evenly over its interval."""
    used: dict[str, float] = defaultdict(float)
    for _, job, since, until, energy in lines:
        if (overlap := min(until, end) - max(since, begin)) > 0:
            used[job] += energy * overlap / (until - since)
    return used


def watts_before(lines: list[Line], at: float) -> dict[str, float]:
    """Return the mean draw of each job, over each node's time from its first whole line to its last in ten minutes."""
    of_node: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line[2] >= at - BEFORE_S and line[3] <= at:
            of_node[line[0]].append(line)
    watts: dict[str, float] = defaultdict(float)
    for found in of_node.values():
        span = max(each[3] for each in found) - min(each[2] for each in found)
        for _, job, _, _, energy in found:
            watts[job] += energy / span
    return watts


def known_until(lines: list[Line]) -> float:
    """Return until when all nodes have lines, but for those that had none in the two minutes before the newest."""
    newest = {node: max(line[3] for line in lines if line[0] == node) for node in {line[0] for line in lines}}
    return min((at for at in newest.values() if at >= max(newest.values()) - LOST_S), default=0.0)


def silent(lines: list[Line], begin: float, until: float) -> float:
    """Return the share of the nodes' time, each from its first line on, that is in no line."""
    whole = missing = 0.0
    for node in {line[0] for line in lines}:
        at = first = max(min(line[2] for line in lines if line[0] == node), begin)
        if first >= until:
            continue
        edges = sorted((line[2], line[3]) for line in lines if line[0] == node)
        for since, end in [*edges, (until, until)]:
            missing += max(min(since, until) - at, 0.0)
            at = max(at, end)
        whole += until - first
    return missing / whole if whole else 0.0


def problems(report: dict[str, Any], lines: list[Line]) -> list[str]:
    """Return every figure of a report that the lines do not give."""
    order = report["order"]
    lines = [line for line in lines if line[0] in report["nodes"]]
    start, end = seconds(order["start_at"]), seconds(order["end_at"])
    begin, until, counted = (seconds(report[each]) for each in ("since", "until", "counted_until"))
    ends = min(end, seconds(order["withdrawn_at"])) if order["withdrawn_at"] else end
    base = order["baseline_w"]

    terms = [(seconds(each["until"]), each["steps"]) for each in report["amended"]] + [(end, order["steps"])]
    steps, began = list[tuple[float, float, float]](), start
    for upto, said in terms:
        ends_of = [start + step["offset_s"] for step in said[1:]] + [upto]
        for step, last in zip(said, ends_of, strict=True):
            watts = step["to_w"] if step["cut"] is None else base * (1 - step["cut"])
            steps.append((max(start + step["offset_s"], began), min(last, upto), watts))
        began = upto

    def limit(since: float, upto: float, most: float = float("inf")) -> float:
        parts = ((max(min(last, upto) - max(first, since), 0.0), watts) for first, last, watts in steps)
        return sum(seconds * min(watts, most) for seconds, watts in parts) / (upto - since)

    def worst(stretches: list[list[float]], allowed: Any) -> float | None:
        found: list[float] = []
        for since, upto in stretches:
            times = [
                (since + BUCKET_S * at, since + BUCKET_S * (at + 1)) for at in range(int((upto - since) // BUCKET_S))
            ]
            times.append((max(upto - BUCKET_S, since), upto))
            for first, last in times if upto - since >= SHORTEST_S else []:
                drawn, allowed_w = sum(joules(lines, first, last).values()) / (last - first), allowed(first, last)
                found.append((drawn - allowed_w) / (allowed_w or base))
        return max(0.0, *found) if found else None

    limited: list[list[float]] = []
    for first, last, watts in steps:
        first, last = max(first, begin), min(last, until)
        if first < last and watts < NO_LIMIT_W:
            if limited and limited[-1][1] == first:
                limited[-1][1] = last
            else:
                limited.append([first, last])

    at = seconds(order["baseline_at"])
    during, before = joules(lines, begin, until), watts_before(lines, at)
    mean = sum(during.values()) / (until - begin)
    figures = {
        "baseline_w": sum(before.values()),
        "limit_w": limit(begin, until, base),
        "mean_w": mean,
        "ordered_w": base - limit(begin, until, base),
        "delivered_w": base - mean,
        "unheard": silent(lines, begin, until),
        "above_most": worst(limited, limit),
        "rebound": worst([[ends, counted]] if counted > ends else [], lambda *_: base),
    }
    found = [name for name, value in figures.items() if not _same(report[name], value)]
    latest = min(known_until(lines), end + min(end - start, RECOVERY_S))
    found += ["counted_until"] if counted > latest + 1e-3 else []
    found += ["until"] if until != min(ends, counted) else []
    for job in report["jobs"]:
        name = job["job_id"] or ""
        parts = {"before_w": before.get(name, 0.0), "during_w": during.get(name, 0.0) / (until - begin)}
        found += [f"{each} of {name or 'no job'}" for each, value in parts.items() if not _same(job[each], value)]
    return found


def _same(stated: float | None, found: float | None) -> bool:
    if stated is None or found is None:
        return stated is found
    return abs(stated - found) <= TOLERANCE * max(abs(stated), abs(found), 1.0)


def main() -> int:
    """Print what does not agree, and return the exit code."""
    report, lines = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), lines_of(Path(sys.argv[2]))
    found = problems(report, lines)
    print(
        "\n".join(f"{each} does not follow from the lines" for each in found) or f"{len(lines)} lines give the report"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
