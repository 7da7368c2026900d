"""PowerFlow against its paper as tables: ``python -m lab.reproductions.powerflow_day PAGE RESULTS``.

RESULTS is a folder with what ``wattshift lab experiment`` left of powerflow-day, powerflow-day-down,
powerflow-sensitivity, powerflow-sensitivity-split, powerflow-afs and powerflow-marginal, each in a folder of that name.
In PAGE, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made anew where all results it needs are there;
the text around it is by hand.

===================== ==============================================================================================
``powerflow-points``  every policy's points on the day, means over seeds
``powerflow-day``     PowerFlow's points, and each baseline against it at equal energy and at equal time, by seed
``...-split``         both with the batch of a job split over its GPUs, as in the paper
``sensitivity``       section 6.4: completion times at the energy of the two baselines with Zeus
``sensitivity-split`` that with the batch split
``powerflow-afs``     AFS without lengths, and PowerFlow without measuring, against each other
``marginal``          by what GPUs and power are given out (``docs/powerflow.md``)
===================== ==============================================================================================
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lab.reproductions import marked
from lab.reproductions.equal_energy import Curve, compared

PAPER = {"gandiva": 3.39, "las": 1.73, "gandiva+zeus": 2.90, "zeus+las": 1.62, "afs": 1.57}
"""Section 6.2: how many times shorter PowerFlow's average completion time is at most, at equal energy."""
OURS = "powerflow"
SETTINGS = {"power_limit_w": "{:g} W", "eta": "weight {:g}"}
DAY, DOWN = "powerflow-day", "powerflow-day-down"
SENSITIVITY, SPLIT = "powerflow-sensitivity", "powerflow-sensitivity-split"
AFS, MARGINAL = "powerflow-afs", "powerflow-marginal"
UNKNOWN, UNMEASURED = "lengths unknown", "nothing measured"
ON, OFF = "all nodes on", "unused nodes powered down"
KEPT_PER_GPU, KEPT_IN_ALL = "day", "day, batch split"


@dataclass(frozen=True)
class Point:
    """One cell of an experiment: what ran, and what of its summary the tables show."""

    label: str
    policy: str
    setting: str
    trace: str
    seed: int
    energy_kwh: float
    idle_kwh: float
    peak_w: float
    jct_s: float
    p99_jct_s: float
    stops: int


def points_of(folder: Path, trace: str | None = None) -> list[Point]:
    """Return the cells of an experiment, or of one of its traces, as its last run named them."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    points: list[Point] = []
    for key, *_ in index:
        cell = json.loads((folder / "cells" / f"{key}.json").read_text(encoding="utf-8"))
        inputs, summary = cell["inputs"], cell["summary"]
        if trace not in (None, inputs["trace"]["label"]):
            continue
        choice = inputs["choice"]
        given = {**choice["options"], **choice["params"]}
        setting = next((form.format(given[name]) for name, form in SETTINGS.items() if name in given), "default")
        points.append(
            Point(
                choice["label"],
                choice["policy"],
                setting,
                inputs["trace"]["label"],
                inputs["seed"],
                summary["energy_kwh"],
                summary["idle_energy_kwh"],
                summary["peak_power_w"],
                summary["avg_jct_s"],
                summary["p99_jct_s"],
                summary["preemptions"],
            )
        )
    return points


def rows_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def mean(points: Iterable[Point], of: Callable[[Point], float]) -> float:
    """Return the mean of a figure over seeds."""
    return float(np.mean([of(point) for point in points]))


def points_table(results: Path, trace: str = KEPT_PER_GPU) -> str:
    """Return the baselines' points: a row per setting, a column per policy and per what becomes of unused nodes."""
    shown = [(name, policy) for name in (DAY, DOWN) for policy in ("gandiva", "las", "afs")]
    cells: dict[tuple[str, str, str], list[Point]] = defaultdict(list)
    settings: dict[str, None] = {}
    for name in (DAY, DOWN):
        for point in points_of(results / name, trace):
            if point.policy != OURS:
                bare = next(part for part in ("gandiva", "las", "afs") if part in point.policy)
                setting = f"Zeus, {point.setting}" if "zeus" in point.policy else point.setting
                settings[setting] = None
                cells[name, bare, setting].append(point)
    head = ["kWh, mean JCT in min", *(f"{policy}, {ON if name == DAY else 'powered down'}" for name, policy in shown)]
    rows: list[list[str]] = []
    for setting in sorted(settings, key=lambda each: "Zeus" in each):
        found = [cells[name, policy, setting] for name, policy in shown]
        texts = [
            f"{mean(each, lambda p: p.energy_kwh):,.0f}, {mean(each, lambda p: p.jct_s) / 60:.0f}" if each else ""
            for each in found
        ]
        rows.append([setting, *texts])
    return rows_of(head, rows)


def day_table(results: Path, trace: str = KEPT_PER_GPU) -> str:
    """Return PowerFlow's points, and every baseline against them."""
    day, down = points_of(results / DAY, trace), points_of(results / DOWN, trace)
    ours: dict[str, list[Point]] = defaultdict(list)
    for point in day:
        if point.policy == OURS:
            ours[point.label].append(point)
    head = ["mean over seeds", "energy", "of it idle", "peak", "mean JCT", "p99 JCT", "stops"]
    rows = [
        [
            label,
            f"{mean(each, lambda p: p.energy_kwh):,.0f} kWh",
            f"{mean(each, lambda p: p.idle_kwh):,.0f} kWh",
            f"{mean(each, lambda p: p.peak_w) / 1000:.1f} kW",
            f"{mean(each, lambda p: p.jct_s) / 60:.1f} min",
            f"{mean(each, lambda p: p.p99_jct_s) / 3600:.1f} h",
            f"{mean(each, lambda p: p.stops):,.0f}",
        ]
        for label, each in ours.items()
    ]
    of_ours = [point for points in ours.values() for point in points]
    against = [
        [f"{policy}{account}", *against_seeds(of_ours, theirs, of), "" if account else f"{paper:.2f} x"]
        for policy, paper in PAPER.items()
        for account, theirs, of in accounts(policy, day, down)
    ]
    beside = [
        "PowerFlow against",
        "energies both reach",
        "times faster there",
        "times less energy at equal JCT",
        "paper",
    ]
    return rows_of(head, rows) + "\n\n" + rows_of(beside, against)


def accounts(
    policy: str, day: Sequence[Point], down: Sequence[Point]
) -> Iterator[tuple[str, list[Point], Callable[[Point], float]]]:
    """Yield how a baseline's energy may be counted: what to call it, its points, and a point's energy, kWh.

    Zeus stands at its default weight, as in the paper, and then over its weight.
    """
    on, off = ([point for point in points if point.policy == policy] for points in (day, down))
    if "zeus" not in policy:
        yield "", on, lambda point: point.energy_kwh
        yield f", {OFF}", off, lambda point: point.energy_kwh
        yield ", running gangs alone", on, lambda point: point.energy_kwh - point.idle_kwh
        return
    yield "", [point for point in on if point.setting == "default"], lambda point: point.energy_kwh
    yield f", {OFF}", [point for point in off if point.setting == "default"], lambda point: point.energy_kwh
    yield f", {OFF}, over its weight", off, lambda point: point.energy_kwh


def against_seeds(ours: Sequence[Point], theirs: Sequence[Point], of: Callable[[Point], float]) -> tuple[str, str, str]:
    """Return the energies both curves reach, how many times faster ours is there, and how much less it takes then.

    A baseline that needs more than PowerFlow ever does is set against PowerFlow's fastest point.
    """
    faster, less, spans, beyond = [], [], [], []
    for seed in sorted({point.seed for point in theirs} & {point.seed for point in ours}):
        mine, other = (
            Curve.of([(of(point), point.jct_s) for point in points if point.seed == seed]) for points in (ours, theirs)
        )
        at_energy, at_time = compared(mine, other), compared(mine.turned(), other.turned())
        if at_energy is None and mine.energy_kwh[-1] < other.energy_kwh[0]:
            beyond.append((float(mine.energy_kwh[-1] / other.energy_kwh[0]), float(other.jct_s[0] / mine.jct_s[-1])))
        elif at_energy is not None:
            faster.append((at_energy.least, at_energy.most))
            spans.append((at_energy.low, at_energy.high))
        if at_time is not None:
            less.append((at_time.least, at_time.most))
    energies = between(spans, "{:,.0f}") + " kWh" if spans else "none"
    times = spread(faster)
    if beyond and not faster:
        share, ratio = np.mean(beyond, axis=0).tolist()
        times = f"{ratio:.2f} x at {100 * share:.0f} % of its least"
    return energies, times, spread(less)


def between(pairs: Sequence[tuple[float, float]], form: str) -> str:
    """Return the mean of the first and of the second, as a range where they differ."""
    low, high = (form.format(value) for value in np.mean(pairs, axis=0).tolist())
    return low if low == high else f"{low}-{high}"


def spread(pairs: Sequence[tuple[float, float]]) -> str:
    """Return least and most times, means over seeds, with the standard deviation of the most."""
    if not pairs:
        return ""
    deviation = f" (± {np.std([most for _, most in pairs], ddof=1):.2f})" if len(pairs) > 1 else ""
    return between(pairs, "{:.2f}") + " x" + deviation


def sensitivity_table(name: str, results: Path) -> str:
    """Return every trace's completion times at the mean energy of the two with Zeus, as multiples of PowerFlow's.

    A curve that ends before that energy stands with its nearest point, and says by how much it is off.
    """
    by_trace: dict[str, list[Point]] = defaultdict(list)
    for point in points_of(results / name):
        by_trace[point.trace].append(point)
    head = ["", "energy", "powerflow", *PAPER]
    rows: list[list[str]] = []
    for trace, points in by_trace.items():
        energy_kwh = mean((p for p in points if "zeus" in p.policy), lambda p: p.energy_kwh)
        jct_s: dict[str, float] = {}
        off: dict[str, str] = {}
        for policy in (OURS, *PAPER):
            curve = Curve.of([(p.energy_kwh, p.jct_s) for p in points if p.policy == policy])
            nearest = float(np.clip(energy_kwh, curve.energy_kwh[0], curve.energy_kwh[-1]))
            jct_s[policy] = curve.at(nearest)
            share = nearest / energy_kwh - 1
            off[policy] = "" if abs(share) < 0.05 else f" at {100 * share:+.0f} % energy"
        times = [f"{jct_s[policy] / jct_s[OURS]:.2f} x{off[policy]}" for policy in PAPER]
        rows.append([trace, f"{energy_kwh:,.0f} kWh", f"{jct_s[OURS] / 60:,.0f} min{off[OURS]}", *times])
    return rows_of(head, rows)


def afs_table(results: Path) -> str:
    """Return by trace what lengths give AFS, and how many times faster PowerFlow is at equal energy."""
    by_trace: dict[str, list[Point]] = defaultdict(list)
    for point in points_of(results / AFS):
        by_trace[point.trace].append(point)
    head = ["", "AFS", f"AFS, {UNKNOWN}", "PowerFlow against AFS", f"PowerFlow, {UNMEASURED}, against AFS"]
    rows: list[list[str]] = []
    for trace, points in by_trace.items():
        groups = {
            (policy, bare): [p for p in points if p.policy == policy and (label in p.label) != bare]
            for policy, label in (("afs", UNKNOWN), (OURS, UNMEASURED))
            for bare in (True, False)
        }
        fastest = {bare: min(groups["afs", bare], key=lambda p: p.jct_s) for bare in (True, False)}
        shown = [f"{each.jct_s / 60:.1f} min, {each.energy_kwh:,.0f} kWh" for each in fastest.values()]
        theirs = Curve.of([(p.energy_kwh, p.jct_s) for p in groups["afs", True]])
        for bare in (True, False):
            at_energy = compared(Curve.of([(p.energy_kwh, p.jct_s) for p in groups[OURS, bare]]), theirs)
            shown.append("" if at_energy is None else spread([(at_energy.least, at_energy.most)]))
        rows.append([trace, *shown])
    return rows_of(head, rows)


def marginal_table(results: Path) -> str:
    """Return energy and mean completion time by what the greedy goes by."""
    rows = [
        [
            point.label.removeprefix(f"{OURS}, eta ").split(",")[0],
            "`power`" if point.label.endswith("by power") else "`energy`",
            f"{point.energy_kwh:,.0f} kWh",
            f"{point.jct_s / 60:.1f} min",
        ]
        for point in sorted(points_of(results / MARGINAL), key=lambda point: point.label)
    ]
    return rows_of(["`eta`", "`marginal`", "energy", "mean JCT"], rows)


TABLES: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    "powerflow-points": (points_table, (DAY, DOWN)),
    "powerflow-day": (day_table, (DAY, DOWN)),
    "powerflow-points-split": (partial(points_table, trace=KEPT_IN_ALL), (DAY, DOWN)),
    "powerflow-day-split": (partial(day_table, trace=KEPT_IN_ALL), (DAY, DOWN)),
    "sensitivity": (partial(sensitivity_table, SENSITIVITY), (SENSITIVITY,)),
    "sensitivity-split": (partial(sensitivity_table, SPLIT), (SPLIT,)),
    "powerflow-afs": (afs_table, (AFS,)),
    "marginal": (marginal_table, (MARGINAL,)),
}


def is_complete(folder: Path) -> bool:
    """Whether an experiment's folder has every cell that its last run named."""
    index = folder / "index.json"
    if not index.is_file():
        return False
    return all((folder / "cells" / f"{key}.json").is_file() for key, *_ in json.loads(index.read_text("utf-8")))


def filled(page: str, results: Path) -> str:
    """Return a page whose tables are made anew where the experiments they show have run to their end."""
    complete = {
        mark: table for mark, (table, needs) in TABLES.items() if all(is_complete(results / name) for name in needs)
    }
    return marked.filled(page, {mark: partial(table, results) for mark, table in complete.items()})


def main() -> None:
    """Fill the page."""
    page, results = Path(sys.argv[1]), Path(sys.argv[2])
    page.write_text(filled(page.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
