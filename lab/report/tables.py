"""Cells compared with the baseline's cell of the same trace, zone, signal and seed.

The change of carbon is split exactly into three causes. With busy and idle energy ``E`` and the mean intensity ``c`` at
which each was drawn (and 0 for the baseline), as shares of the baseline's carbon ``C0``:

- energy: ``(Eb - Eb0) * cb0``: the jobs themselves took more or less energy;
- idle: ``(Ei - Ei0) * ci0``: GPUs stood idle for longer or shorter;
- intensity: ``Eb * (cb - cb0) + Ei * (ci - ci0)``: what was drawn was drawn in other hours.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.accounting.carbon import percent_change
from services.kit.text import write_row

Result = dict[str, Any]
Place = tuple[str, str, str, int]
"""Trace, zone, signal and seed."""
FIGURES = (
    "jobs",
    "completed",
    "avg_jct_s",
    "p50_jct_s",
    "p99_jct_s",
    "makespan_s",
    "energy_kwh",
    "carbon_kg",
    "idle_energy_kwh",
    "idle_carbon_kg",
    "peak_power_w",
    "preemptions",
    "rounds",
    "gpu_hours",
    "utilisation",
)
RATIOS = {
    "carbon": "carbon_kg",
    "energy": "energy_kwh",
    "avg_jct": "avg_jct_s",
    "p99_jct": "p99_jct_s",
    "peak": "peak_power_w",
}
"""Names in ``Compared`` by the figures they are ratios of."""


@dataclass(frozen=True)
class Compared:
    """A policy against the baseline over some cells: means of the cells' ratios.

    Attributes:
        label: Of the policy.
        of: What the cells have in common, such as zone and signal.
        carbon, energy, avg_jct, p99_jct, peak: Ratios; 1 is the baseline.
        by_energy, by_idle, by_intensity: Change of carbon by cause, shares of the baseline's carbon; they add up.
        cells: How many ratios were averaged.
        between_seeds: Standard deviation of the carbon ratio from seed to seed, everything else averaged; NaN of one.
        deviations: The same of every ratio, by its name.
    """

    label: str
    of: tuple[str, ...]
    carbon: float
    energy: float
    avg_jct: float
    p99_jct: float
    peak: float
    by_energy: float
    by_idle: float
    by_intensity: float
    cells: int
    between_seeds: float
    deviations: Mapping[str, float]

    @property
    def zone(self) -> str:
        """Zone, where cells were compared by zone and signal."""
        return self.of[0]

    @property
    def signal(self) -> str:
        """The last of what the cells have in common: their signal."""
        return self.of[-1]


def place_of(result: Result) -> Place:
    """Return trace, zone, signal and seed of a cell."""
    inputs = result["inputs"]
    return inputs["trace"]["label"], inputs["zone"], inputs["signal"], inputs["seed"]


def label_of(result: Result) -> str:
    """Return the label of a cell's policy."""
    return str(result["inputs"]["choice"]["label"])


def baselines(results: Sequence[Result], baseline: str) -> dict[Place, Result]:
    """Return the baseline's cell by place."""
    return {place_of(result): result for result in results if label_of(result) == baseline}


def causes(summary: Result, base: Result) -> tuple[float, float, float]:
    """Return the change of carbon by energy, idling and intensity, as shares of the baseline's carbon."""
    idle, idle0 = summary["idle_energy_kwh"], base["idle_energy_kwh"]
    busy, busy0 = summary["energy_kwh"] - idle, base["energy_kwh"] - idle0
    busy_c0 = _per(base["carbon_kg"] - base["idle_carbon_kg"], busy0)
    idle_c0 = _per(base["idle_carbon_kg"], idle0)
    by_energy, by_idle = (busy - busy0) * busy_c0, (idle - idle0) * idle_c0
    total = summary["carbon_kg"] - base["carbon_kg"]
    carbon0 = base["carbon_kg"]
    return _per(by_energy, carbon0), _per(by_idle, carbon0), _per(total - by_energy - by_idle, carbon0)


def by_zone(place: Place) -> tuple[str, ...]:
    """Return zone and signal."""
    return place[1:3]


def by_trace(place: Place) -> tuple[str, ...]:
    """Return trace and signal."""
    return place[0], place[2]


def by_setting(place: Place) -> tuple[str, ...]:
    """Return what the trace's label says before its first comma, and signal: one setting on several days."""
    return place[0].split(",")[0], place[2]


def by_signal(place: Place) -> tuple[str, ...]:
    """Return the signal alone: means over traces, zones and seeds."""
    return (place[2],)


def compare(
    results: Sequence[Result], baseline: str, by: Callable[[Place], tuple[str, ...]] = by_zone
) -> list[Compared]:
    """Return every policy against the baseline, over the cells that ``by`` puts together; in order of the results."""
    base = baselines(results, baseline)
    groups: dict[tuple[str, tuple[str, ...]], list[Result]] = defaultdict(list)
    for result in results:
        if place_of(result) in base:
            groups[(label_of(result), by(place_of(result)))].append(result)
    rows: list[Compared] = []
    for (label, of), cells in groups.items():
        pairs = {place_of(cell): (cell["summary"], base[place_of(cell)]["summary"]) for cell in cells}
        ratios = {
            name: {place: _per(one[figure], other[figure]) for place, (one, other) in pairs.items()}
            for name, figure in RATIOS.items()
        }
        split = [_mean(column) for column in zip(*(causes(*pair) for pair in pairs.values()), strict=True)]
        deviations = {name: _deviation(_grouped(each, lambda place: place[3])) for name, each in ratios.items()}
        rows.append(
            Compared(
                label,
                of,
                **{name: _mean(each.values()) for name, each in ratios.items()},
                by_energy=split[0],
                by_idle=split[1],
                by_intensity=split[2],
                cells=len(pairs),
                between_seeds=deviations["carbon"],
                deviations=deviations,
            )
        )
    return rows


def change(ratio: float, deviation: float = math.nan) -> str:
    """Return a ratio as a change in per cent, with its standard deviation between seeds where there is one."""
    if ratio != ratio:
        return "-"
    spread = f" ± {100 * deviation:.1f}" if deviation == deviation else ""
    return f"{percent_change(ratio, 1.0)}{spread}"


def changes(row: Compared) -> list[str]:
    """Return a comparison's cells: carbon, energy, completion times and peak, then carbon by cause."""
    ratios = [change(getattr(row, name), row.deviations[name]) for name in RATIOS]
    return [*ratios, *(change(1 + share) for share in (row.by_energy, row.by_idle, row.by_intensity))]


def bound_ratios(
    bounds: Sequence[Result], results: Sequence[Result], baseline: str
) -> dict[tuple[str, str, float, str], float]:
    """Return the least possible over the baseline's carbon, means over traces and seeds.

    By zone, signal, slack (h; 0 is any) and levers: ``own`` of the baseline, or ``all``.
    """
    base = baselines(results, baseline)
    found: dict[tuple[str, str, float, str], list[float]] = defaultdict(list)
    for bound in bounds:
        place = bound["trace"], bound["zone"], bound["signal"], bound["seed"]
        if place in base and bound["carbon_kg"] is not None and bound["horizon_h"] is not None:
            key = bound["zone"], bound["signal"], bound["horizon_h"], bound["of"]
            found[key].append(_per(bound["carbon_kg"], base[place]["summary"]["carbon_kg"]))
    return {key: _mean(ratios) for key, ratios in found.items()}


def bound_names(ratios: Mapping[tuple[str, str, float, str], float], signal: str) -> dict[tuple[float, str], str]:
    """Return how the bounds of a signal are called in tables, by slack and levers, the least slack first."""
    keys = {key[2:] for key in ratios if key[1] == signal}
    ordered = sorted(keys, key=lambda key: (key[0] or math.inf, key[1] != "own"))
    return {
        (hours, of): "least possible" + (f", {hours:g} h" if hours else "") + (", all levers" if of == "all" else "")
        for hours, of in ordered
    }


def above_bounds(bounds: Sequence[Result], results: Sequence[Result]) -> dict[tuple[str, str, str], float]:
    """Return the carbon of runs over their own bounds, by label, signal and levers (``own``, ``all``); means."""
    runs = {(label_of(result), *place_of(result)): result["summary"]["carbon_kg"] for result in results}
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for bound in bounds:
        run = bound["label"], bound["trace"], bound["zone"], bound["signal"], bound["seed"]
        if bound["horizon_h"] is None and run in runs:
            found[bound["label"], bound["signal"], bound["of"]].append(_per(runs[run], bound["carbon_kg"]))
    return {key: _mean(ratios) for key, ratios in found.items()}


def sizes(results: Sequence[Result], baseline: str) -> dict[str, list[tuple[str, float, float, float]]]:
    """Return per policy and size of jobs: share of jobs, and change of mean and 99th percentile of completion times.

    Changes are relative to the baseline and means over all places.
    """
    base = baselines(results, baseline)
    found: dict[str, dict[str, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        label = label_of(result)
        if label == baseline or place_of(result) not in base or not result["sizes"]:
            continue
        total = sum(row["jobs"] for row in result["sizes"])
        for row, other in zip(result["sizes"], base[place_of(result)]["sizes"], strict=True):
            if row["avg_jct_s"] is not None and other["avg_jct_s"]:
                mean, tail = row["avg_jct_s"] / other["avg_jct_s"] - 1, row["p99_jct_s"] / other["p99_jct_s"] - 1
                found[label][row["size"]].append((row["jobs"] / total, mean, tail))
    return {
        label: [(size, *map(_mean, zip(*values, strict=True))) for size, values in by_size.items()]  # type: ignore[misc]
        for label, by_size in found.items()
    }


def fairness(results: Sequence[Result]) -> dict[str, float]:
    """Return Jain's index of what waiting tenants had of their shares, by policy: means over all places.

    Policies of traces without several tenants that wait are left out.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if (jain := result["summary"].get("jain")) is not None:
            found[label_of(result)].append(jain)
    return {label: _mean(values) for label, values in found.items()}


@dataclass(frozen=True)
class Sensitivity:
    """What turning one thing does, all else at its default.

    Attributes:
        policy: Its name.
        name: The parameter of the policy, or option of the engine.
        labels: Of the choices that turn it, and of the one that turns nothing, by its value.
    """

    policy: str
    name: str
    labels: Mapping[float, str]


def sensitivities(results: Sequence[Result], defaults: Mapping[tuple[str, str], float]) -> list[Sensitivity]:
    """Return which parameters and options were tried at two values or more, the default among them.

    Args:
        results: Cells.
        defaults: Values of the choice that turns nothing, by policy and name.
    """
    turned: dict[tuple[str, str], dict[float, str]] = defaultdict(dict)
    plain: dict[str, str] = {}
    for result in results:
        choice = result["inputs"]["choice"]
        changes = {**choice["params"], **choice["options"]}
        if not changes:
            plain.setdefault(choice["policy"], choice["label"])
        elif len(changes) == 1:
            [(name, value)] = changes.items()
            if isinstance(value, int | float) and not isinstance(value, bool):
                turned[(choice["policy"], name)][float(value)] = choice["label"]
    found: list[Sensitivity] = []
    for (policy, name), labels in turned.items():
        default = defaults.get((policy, name))
        if policy in plain and default is not None:
            both = {**labels, default: plain[policy]}
            if len(both) > 2:
                found.append(Sensitivity(policy, name, dict(sorted(both.items()))))
    return found


def write_csv(file: Path, results: Iterable[Result]) -> None:
    """Write one row per cell with all of its figures."""
    with file.open("w", newline="", encoding="utf-8") as text:
        write_row(text, ["policy", "trace", "zone", "signal", "seed", *FIGURES])
        for result in results:
            write_row(text, [label_of(result), *place_of(result), *(result["summary"][name] for name in FIGURES)])


def _grouped(values: Mapping[Place, float], of: Callable[[Place], Hashable]) -> list[float]:
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for place, value in values.items():
        groups[of(place)].append(value)
    return [_mean(group) for group in groups.values()]


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _per(amount: float | None, base: float | None) -> float:
    return amount / base if amount is not None and base is not None and base > 0 else math.nan


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan
