"""The tables of ``lab/results``, from what ``wattshift lab experiment FILES --out RESULTS`` left in RESULTS.

In a page, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is replaced by the tables of experiment NAME; the
text around them is written by hand. A word after the name says which tables:

- ``zones`` (the default): carbon by zone and means of everything; the baseline itself; completion times by size;
- ``means``: means over traces, zones and seeds alone;
- ``traces``: means by trace, for experiments whose traces are settings, and completion times by size in each;
- ``settings``: the same with traces together whose labels are equal up to their first comma: settings on several days.

``--page`` of that command fills a page; ``python -m lab.report.markdown PAGE RESULTS`` fills it from the
results there are. Both leave every cell's figures beside the page, in ``PAGE-cells.csv.gz``. Where RESULTS has some of
an experiment's cells and that file has others, both count, and the page says which are of the file; completion times
by size of job are not in it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.report.tables import (
    FIGURES,
    Compared,
    Place,
    Result,
    above_bounds,
    bound_names,
    bound_ratios,
    by_setting,
    by_signal,
    by_trace,
    change,
    changes,
    compare,
    fairness,
    label_of,
    place_of,
    sizes,
)
from services.kit.text import write_row

BASELINE = "Tiresias (LAS)"
MARK = re.compile(r"<!-- ([\w-]+)( \w+)? -->\n.*?<!-- end -->", re.DOTALL)
BY_SIZE = ("green", "joint")
"""Policies whose completion times are shown by size of job, too."""
HEAD = ["**carbon**", "energy", "mean JCT", "p99 JCT", "peak", "by energy", "by idling", "by hours"]
Named = tuple[str, str, str, str, int]
"""A cell: labels of policy and trace, zone, signal and seed."""
ABSOLUTE = {
    "energy, kWh": ("energy_kwh", 1.0),
    "idle, kWh": ("idle_energy_kwh", 1.0),
    "mean JCT, h": ("avg_jct_s", 3_600.0),
    "p99 JCT, h": ("p99_jct_s", 3_600.0),
    "peak, kW": ("peak_power_w", 1_000.0),
    "GPUs held": ("utilisation", 1.0),
}


def load(folder: Path, kept: Sequence[Result] = ()) -> tuple[list[Result], list[Result]]:
    """Return an experiment's cells as far as they are there, the baseline's first, and its bounds.

    Args:
        folder: Of the experiment's results.
        kept: Cells of earlier runs, which stand in for those that the folder lacks.
    """
    cells, bounds = (
        [
            json.loads(file.read_text(encoding="utf-8"))
            for key, _ in _index(folder)
            for file in sorted(folder.glob(f"{name}/{key}*"))
        ]
        for name in ("cells", "least")
    )
    cells.extend(_stand_ins(folder, kept))
    bounds = [bound for pair in bounds for bound in pair]
    cells.sort(key=lambda cell: (label_of(cell) != BASELINE, label_of(cell), *place_of(cell)))
    return cells, bounds


def whole(cells: Sequence[Result]) -> list[Result]:
    """Return the cells less those of policies that have not run everywhere: their means would be over other places."""
    places = {place_of(cell) for cell in cells}
    of: dict[tuple[str, str], set[Place]] = {}
    for cell in cells:
        of.setdefault((label_of(cell), place_of(cell)[2]), set()).add(place_of(cell))
    run = {key for key, own in of.items() if own == {place for place in places if place[2] == key[1]}}
    return [cell for cell in cells if (label_of(cell), place_of(cell)[2]) in run]


def unfinished(folder: Path, kept: Sequence[Result] = ()) -> list[tuple[str, str]]:
    """Return the policies, each with a signal, some of whose cells are yet to run; ``kept`` as ``load`` takes it."""
    there = {(label_of(cell), *place_of(cell)) for cell in kept}
    return list(dict.fromkeys((of[0], of[3]) for of in _missing(folder) if of not in there))


def _stand_ins(folder: Path, kept: Sequence[Result]) -> list[Result]:
    """Return the kept cells that an experiment has and its folder lacks."""
    missing = set(_missing(folder))
    return [cell for cell in kept if (label_of(cell), *place_of(cell)) in missing]


def _missing(folder: Path) -> list[Named]:
    return [of for key, of in _index(folder) if not (folder / "cells" / f"{key}.json").exists()]


def _has_results(folder: Path) -> bool:
    return (folder / "index.json").is_file()


def _index(folder: Path) -> list[tuple[str, Named]]:
    found: list[tuple[str, str, str, str, str, int]] = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    return [(key, (label, trace, zone, signal, seed)) for key, label, trace, zone, signal, seed in found]


def tables(cells: Sequence[Result], bounds: Sequence[Result], which: str = "zones") -> str:
    """Return an experiment's tables; see the module for ``which``."""
    if not cells:
        return "\n(no results)\n"
    return "\n" + "\n\n".join(KINDS[which](cells, bounds)) + "\n"


def _zones(cells: Sequence[Result], bounds: Sequence[Result]) -> list[str]:
    rows, least = compare(cells, BASELINE), bound_ratios(bounds, cells, BASELINE)
    run = whole(cells)
    means = {(mean.label, mean.signal): mean for mean in compare(cells, BASELINE, by_signal)}
    parts: list[str] = []
    for signal in dict.fromkeys(row.signal for row in rows):
        own = [row for row in rows if row.signal == signal]
        zones = list(dict.fromkeys(row.zone for row in own))
        of = {(row.label, row.zone): row.carbon for row in own}
        lines: list[list[str]] = []
        labels = [label for label in dict.fromkeys(row.label for row in own) if label != BASELINE]
        same = [label for label in labels if _is_baseline(means[label, signal])]
        for label in labels:
            if label not in same:
                carbon = [change(of.get((label, zone), float("nan"))) for zone in zones]
                mean, most = means[label, signal], means[BASELINE, signal].cells
                name = label if mean.cells == most else f"{label} ({mean.cells} of {most} runs)"
                lines.append([name, *carbon, *changes(mean)])
        for key, name in bound_names(least, signal).items():
            ratios = [least.get((zone, signal, *key), float("nan")) for zone in zones]
            lines.append(
                [f"*{name}*", *map(change, ratios), change(sum(ratios) / len(ratios)), *[""] * (len(HEAD) - 1)]
            )
        head = ["policy", *(f"carbon {zone}" for zone in zones), *HEAD]
        equal = f" {', '.join(same)}: the same schedule." if same else ""
        parts.append(f"Against {BASELINE}, {signal} intensity:{equal}\n\n{_table(head, lines)}")
    parts.extend(_above(run, bounds))
    parts.append(f"{BASELINE} itself, means over traces and seeds:\n\n{_absolute(cells)}")
    for of, at in (("Mean", 2), ("99th percentile of", 3)):
        parts.append(f"{of} completion time by size of job, against {BASELINE}:\n\n{_sizes(run, at)}")
    return [*parts, *_fairness(run)]


def _fairness(cells: Sequence[Result]) -> list[str]:
    """Return how evenly tenants were served, where several waited."""
    rows = [[label, f"{jain:.3f}"] for label, jain in fairness(cells).items()]
    head = "Jain's index of what waiting tenants had of their shares, means over all"
    return [f"{head}:\n\n{_table(['policy', 'Jain'], rows)}"] if rows else []


def _above(cells: Sequence[Result], bounds: Sequence[Result]) -> list[str]:
    """Return how far runs are above their own bounds, where those were asked for."""
    ratios = above_bounds(bounds, cells)
    said = {(bound["label"], bound["of"]): bound for bound in bounds if bound["horizon_h"] is None}
    rows = [
        [
            label,
            said[label, "own"]["slack"],
            said[label, "own"]["levers"],
            change(ratios.get((label, signal, "own"), float("nan"))),
            change(ratios.get((label, signal, "all"), float("nan"))),
        ]
        for label, signal in dict.fromkeys(key[:2] for key in ratios)
    ]
    if not rows:
        return []
    head = ["policy", "slack", "levers", "above the least with these levers", "with all levers"]
    return [f"Carbon of each run above the least that it could have emitted, means over zones:\n\n{_table(head, rows)}"]


def _means(cells: Sequence[Result], bounds: Sequence[Result]) -> list[str]:
    del bounds
    run = whole(cells)
    rows = [row for row in compare(run, BASELINE, by_signal) if row.label != BASELINE]
    made = [
        f"Against {BASELINE}, {signal} intensity, means over zones:\n\n"
        + _table(["policy", *HEAD], [[row.label, *changes(row)] for row in rows if row.signal == signal])
        for signal in dict.fromkeys(row.signal for row in rows)
    ]
    return [*made, *_fairness(run)]


def _traces(cells: Sequence[Result], bounds: Sequence[Result]) -> list[str]:
    del bounds
    run = whole(cells)
    return [*_settings_by(compare(run, BASELINE, by_trace), "zones"), *_sizes_by_trace(run)]


def _settings(cells: Sequence[Result], bounds: Sequence[Result]) -> list[str]:
    del bounds
    return _settings_by(compare(whole(cells), BASELINE, by_setting), "zones and days")


def _settings_by(rows: Sequence[Compared], over: str) -> list[str]:
    others = sorted((row for row in rows if row.label != BASELINE), key=lambda row: _by_numbers(row.of[0]))
    lines = [[row.of[0], row.label, *changes(row)] for row in others]
    head = f"Against {BASELINE} in the same setting, means over {over}:"
    return [f"{head}\n\n{_table(['setting', 'policy', *HEAD], lines)}"]


def _by_numbers(label: str) -> list[tuple[int, str]]:
    """Return a key that sorts the numbers in labels by their size."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", label)]


KINDS: Mapping[str, Callable[[Sequence[Result], Sequence[Result]], list[str]]] = {
    "zones": _zones,
    "means": _means,
    "traces": _traces,
    "settings": _settings,
}


def _is_baseline(row: Compared) -> bool:
    ratios = (row.carbon, row.energy, row.avg_jct, row.p99_jct, row.peak)
    return all(abs(ratio - 1.0) < 1e-4 for ratio in ratios)


def _absolute(cells: Sequence[Result]) -> str:
    """Return the baseline's figures by zone: carbon by signal, and what is the same for both."""
    own = [cell for cell in cells if label_of(cell) == BASELINE]
    signals = list(dict.fromkeys(place_of(cell)[2] for cell in own))
    lines: list[list[str]] = []
    for zone in dict.fromkeys(place_of(cell)[1] for cell in own):
        here = [cell for cell in own if place_of(cell)[1] == zone]
        carbon = [[cell["summary"]["carbon_kg"] for cell in here if place_of(cell)[2] == signal] for signal in signals]
        same = [[cell["summary"][name] / unit for cell in here] for name, unit in ABSOLUTE.values()]
        *values, held = (sum(each) / len(each) for each in (*carbon, *same))
        lines.append([zone, *(f"{value:.1f}" for value in values), f"{100 * held:.0f} %"])
    return _table(["zone", *(f"carbon {signal}, kg" for signal in signals), *ABSOLUTE], lines)


def _sizes(cells: Sequence[Result], at: int) -> str:
    """Return changes of completion times by size of job, of the variants of ``BY_SIZE``; ``at``: as ``sizes``."""
    found = _sizes_shown(cells)
    first = next(iter(found.values()), [])
    head = ["policy", *(f"{size} ({100 * share:.0f} %)" for size, share, *_ in first)]
    return _table(head, [[label, *(change(1 + float(row[at])) for row in rows)] for label, rows in found.items()])


def _sizes_by_trace(cells: Sequence[Result]) -> list[str]:
    """Return the same tables with a row per trace and variant; none where completion times by size are not known."""
    traces = dict.fromkeys(place_of(cell)[0] for cell in cells)
    found = [
        (trace, label, rows)
        for trace in sorted(traces, key=_by_numbers)
        for label, rows in _sizes_shown([cell for cell in cells if place_of(cell)[0] == trace]).items()
    ]
    names = list(dict.fromkeys(size for *_, rows in found for size, *_ in rows))
    parts: list[str] = []
    for of, at in (("Mean", 2), ("99th percentile of", 3)) if found else ():
        lines: list[list[str]] = []
        for trace, label, rows in found:
            by_name = {row[0]: float(row[at]) for row in rows}
            lines.append([trace, label, *(change(1 + by_name.get(name, math.nan)) for name in names)])
        head = f"{of} completion time by size of job, against {BASELINE} in the same setting:"
        parts.append(f"{head}\n\n{_table(['setting', 'policy', *names], lines)}")
    return parts


def _sizes_shown(cells: Sequence[Result]) -> dict[str, list[tuple[str, float, float, float]]]:
    """Return ``sizes`` of the variants of ``BY_SIZE``."""
    shown = {label_of(cell) for cell in cells if cell["inputs"]["choice"]["policy"] in BY_SIZE}
    return {label: rows for label, rows in sizes(cells, BASELINE).items() if label in shown}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def fill(text: str, results: Path, before: bytes = b"") -> str:
    """Return a page with its marked tables made new; those of experiments without results stay.

    Args:
        text: The page.
        results: Folder of results.
        before: The cells until now, as ``cells_of`` made them.
    """

    def made(match: re.Match[str]) -> str:
        folder, which = results / match[1], match[2] or ""
        if not _has_results(folder):
            return match[0]
        kept = kept_cells(match[1], before)
        waiting = ", ".join(f"{label} ({signal})" for label, signal in unfinished(folder, kept))
        made_anew, rest = tables(*load(folder, kept), which.strip() or "zones"), _earlier(_stand_ins(folder, kept))
        rest += _line(f"Not run everywhere yet, and not among completion times by size: {waiting}.") if waiting else ""
        return f"<!-- {match[1]}{which} -->\n{made_anew}{rest}\n<!-- end -->"

    return MARK.sub(made, text)


def _earlier(cells: Sequence[Result]) -> str:
    """Return which cells of a table are of earlier runs."""
    zones: dict[str, list[str]] = {}
    for cell in cells:
        zones.setdefault(label_of(cell), []).append(place_of(cell)[1])
    rows = "; ".join(f"{label} in {', '.join(dict.fromkeys(each))}" for label, each in zones.items())
    return _line(f"Of an earlier run, and not among completion times by size: {rows}.") if rows else ""


def _line(text: str) -> str:
    """Return a paragraph, wrapped as the pages are."""
    return f"\n{textwrap.fill(text, 120, break_on_hyphens=False)}\n"


def kept_cells(experiment: str, before: bytes) -> list[Result]:
    """Return an experiment's cells among those beside a page, packed; without completion times by size."""
    rows = csv.DictReader(io.StringIO(gzip.decompress(before).decode())) if before else ()
    return [
        {
            "inputs": {
                "choice": {"label": row["policy"], "policy": ""},
                "trace": {"label": row["trace"]},
                "zone": row["zone"],
                "signal": row["signal"],
                "seed": int(row["seed"]),
            },
            "summary": {figure: float(row[figure] or "nan") for figure in FIGURES},
            "sizes": [],
        }
        for row in rows
        if row["experiment"] == experiment
    ]


def cells_of(text: str, results: Path, before: bytes = b"") -> bytes:
    """Return the figures of every cell behind a page, one row each: CSV, packed.

    Args:
        text: The page.
        results: Folder of results.
        before: The cells until now: those of experiments without results stay, as their tables do.
    """
    rows = io.StringIO()
    write_row(rows, ["experiment", "policy", "trace", "zone", "signal", "seed", *FIGURES])
    known = list(csv.reader(io.StringIO(gzip.decompress(before).decode()))) if before else []
    for name in sorted({match[1] for match in MARK.finditer(text)}):
        if not _has_results(results / name):
            for row in known:
                if row[0] == name:
                    write_row(rows, row)
            continue
        for cell in load(results / name, kept_cells(name, before))[0]:
            figures = (cell["summary"][figure] for figure in FIGURES)
            shown = (f"{value:.7g}" if isinstance(value, float) else value for value in figures)
            write_row(rows, [name, label_of(cell), *place_of(cell), *shown])
    return gzip.compress(rows.getvalue().encode(), 9, mtime=0)


def fill_page(page: Path, results: Path) -> None:
    """Fill a page in place, and write the cells beside it."""
    cells = page.with_name(f"{page.stem}-cells.csv.gz")
    before = cells.read_bytes() if cells.exists() else b""
    text = fill(page.read_text(encoding="utf-8"), results, before)
    page.write_text(text, encoding="utf-8")
    cells.write_bytes(cells_of(text, results, before))


if __name__ == "__main__":
    fill_page(Path(sys.argv[1]), Path(sys.argv[2]))
