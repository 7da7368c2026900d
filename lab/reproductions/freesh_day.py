"""The tables and plots of ``lab/results/freesh-pools.md``.

    python -m lab.reproductions.freesh_day PAGE DATA

DATA is a folder with ``carbon/freesh/e_instance.csv``, ``llm/freesh_qps_partition_{a,b}.csv`` and
``profiles/freesh``, the inputs and the first solutions that FREESH's authors published. In PAGE, what stands between
``<!-- NAME -->`` and ``<!-- end -->`` is made anew for the names published, day, ties, below-full-load and sensitivity,
and the plots beside the page are redrawn.

A day is 48 half hours of six five-minute steps, each planned on its own as the paper does, with the day's real demand
and rates taken as forecast. Demand is the file's divided by ``BETA``, as in the authors' solutions.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.report.charts import Line, picture
from lab.reproductions.marked import fill
from services.contracts.pools import PoolsRequest, PoolsResult
from services.core.domain.gpus import gpu_model
from services.core.domain.solving import SolveStatus
from services.core.policies.freesh.pool_planning import plan_pools
from services.solving.pools import pool_problem, pools_result

HALF_HOURS, STEPS, STEP_S, BETA, HEAD_ROOM = 48, 6, 300, 2.0, 1.1
CLASSES, PARTITIONS = ("SS", "SL", "LS", "LL"), ("a", "b")
SIZES, LOADS = (0.75, 1.0, 1.5, 2.0), (0.5, 1.0, 1.5, 2.0)
GAP = 1e-4
IDLE_W = {"A100": gpu_model("A100-SXM4-80GB").idle_w, "H100": gpu_model("H100-SXM5-80GB").idle_w}
TIE = 1e-8
DRAWS = 20
UNTIED: dict[str, Any] = {"objective": "cost"}
"""Least energy at a price of 1 everywhere: the objective ``energy`` itself takes the cleanest of equal plans."""
"""Share of a kWh that a unit of the rate counts, where energy is what matters and carbon decides between equals."""

Row = dict[str, str]


@dataclass(frozen=True)
class Inputs:
    """What the authors published, as text."""

    rates: list[Row]
    demand: dict[str, list[Row]]
    profiles: list[Row]
    limits: list[Row]
    gpus: list[Row]


def read(data: Path) -> Inputs:
    """Return the inputs in a folder."""

    def rows(name: str) -> list[Row]:
        lines = csv.DictReader((data / name).read_text(encoding="utf-8").splitlines())
        return [{key.strip(): value for key, value in row.items()} for row in lines]

    return Inputs(
        rates=rows("carbon/freesh/e_instance.csv"),
        demand={part: rows(f"llm/freesh_qps_partition_{part}.csv") for part in PARTITIONS},
        profiles=rows("profiles/freesh/profile.csv"),
        limits=rows("profiles/freesh/slo.csv"),
        gpus=rows("profiles/freesh/gpu_capacity.csv"),
    )


def half_hour(
    inputs: Inputs, index: int, *, size: float = 1.0, load: float = 1.0, tie: float = 0.0, **terms: Any
) -> PoolsRequest:
    """Return the problem of one half hour, with multiples of the GPUs and of the demand."""
    steps = slice(index * STEPS, (index + 1) * STEPS)
    rates = inputs.rates[steps]
    limits = {(row["partition"], row["request_class"]): row for row in inputs.limits}
    modes = {row["mode"]: {"A100": int(row["gpus_a100"]), "H100": int(row["gpus_h100"])} for row in inputs.profiles}
    document = {
        "step_s": STEP_S,
        "head_room": HEAD_ROOM,
        "intensity_unit": "lb_per_mwh",
        "gap": GAP,
        "locations": [
            {
                "name": row["location"],
                "gpus": {"A100": round(size * int(row["gpus_a100"])), "H100": round(size * int(row["gpus_h100"]))},
                "intensity": [float(list(rate.values())[at]) for rate in rates],
                "price_per_kwh": [1 + tie * float(list(rate.values())[at]) for rate in rates],
            }
            for at, row in enumerate(inputs.gpus)
        ],
        "modes": [{"name": name, "gpus": gpus} for name, gpus in modes.items()],
        "partitions": [
            {
                "name": part,
                "classes": [
                    {
                        "name": name,
                        "demand_qps": [load * float(row[name.lower()]) / BETA for row in inputs.demand[part][steps]],
                        "max_ttft_ms": float(limits[part, name]["ttft_limit_ms"]),
                        "max_tbt_ms": float(limits[part, name]["tbt_limit_ms"]),
                        "profiles": [
                            {key: float(row[key]) for key in ("max_qps", "power_w", "latency_s", "tbt_ms", "ttft_ms")}
                            | {"mode": row["mode"]}
                            for row in inputs.profiles
                            if (row["partition"], row["request_class"]) == (part, name)
                        ],
                    }
                    for name in CLASSES
                ],
            }
            for part in PARTITIONS
        ],
    }
    return PoolsRequest.model_validate(document | terms)


def solved(request: PoolsRequest) -> PoolsResult:
    """Return the plan of a half hour."""
    problem = pool_problem(request)
    return pools_result(request, problem, plan_pools(problem, relative_gap=request.gap))


def day(inputs: Inputs, **terms: Any) -> list[PoolsResult]:
    """Return the plans of all half hours."""
    return [solved(half_hour(inputs, index, **terms)) for index in range(HALF_HOURS)]


def totals(plans: Sequence[PoolsResult], both: Sequence[PoolsResult] | None = None) -> tuple[float, float, int]:
    """Return kgCO2 and kWh of the half hours that are served (in ``both`` too), and how many are not in ``plans``."""
    pairs = list(zip(plans, both or plans, strict=True))
    served = [plan for plan, other in pairs if SolveStatus.INFEASIBLE not in (plan.status, other.status)]
    lost = sum(plan.status is SolveStatus.INFEASIBLE for plan in plans)
    return sum(plan.emissions_kg or 0 for plan in served), sum(plan.energy_kwh or 0 for plan in served), lost


def published(data: Path, inputs: Inputs) -> str:
    """Return the authors' twelve objectives beside ours, on their terms and with both partitions."""
    with gzip.open(data / "profiles/freesh/published_allocation_beta2_first12.csv.gz", "rt", encoding="utf-8") as file:
        theirs = {int(row["time_step"]): float(row["objective"]) for row in csv.DictReader(file)}
    lines = [
        "| half hour | published | ours, same terms | both partitions | both, frugal |",
        "|---:|---:|---:|---:|---:|",
    ]
    for index, objective in sorted(theirs.items()):
        literal = {"negative_rates": "paper", "gap": 1e-9}
        same = solved(half_hour(inputs, index, partition="a", **literal))
        both, frugal = solved(half_hour(inputs, index, **literal)), solved(half_hour(inputs, index, gap=1e-9))
        assert None not in (same.objective, both.objective, frugal.objective)
        shares = [f"{100 * ((plan.objective or 0) / objective - 1):+.1f} %" for plan in (both, frugal)]
        apart = f"{(same.objective or 0) / objective - 1:+.0e}"
        lines.append(f"| {index + 1} | {objective:.6e} | {apart} | {shares[0]} | {shares[1]} |")
    return "\n".join(lines)


def choices(inputs: Inputs, plots: Path) -> str:
    """Return the day under each objective, with and without a choice of partitions; draw Figures 9, 12 and 13."""
    terms: dict[str, dict[str, Any]] = {
        "energy": UNTIED,
        "energy, among equals the cleanest": {"objective": "cost", "tie": TIE, "gap": TIE},
        "energy, among equals the dirtiest": {"objective": "cost", "tie": -TIE, "gap": TIE},
        "carbon": {"objective": "carbon"},
        "carbon, negative rates literally": {"objective": "carbon", "negative_rates": "paper"},
        "energy, partition a alone": {**UNTIED, "partition": "a"},
        "carbon, partition a alone": {"objective": "carbon", "partition": "a"},
    }
    plans = {name: day(inputs, **each) for name, each in terms.items()}
    base = totals(plans["energy"])
    lines = ["| objective | carbon | energy | carbon | energy | not served |", "|---|---:|---:|---:|---:|---:|"]
    for name, found in plans.items():
        carbon_kg, energy_kwh, lost = totals(found)
        changes = f"{100 * (carbon_kg / base[0] - 1):+.2f} % | {100 * (energy_kwh / base[1] - 1):+.2f} %"
        lines.append(f"| {name} | {carbon_kg:.2f} kg | {energy_kwh:.1f} kWh | {changes} | {lost} of {HALF_HOURS} |")
    _draw(inputs, plans, plots)
    return "\n".join(lines)


def ties(inputs: Inputs) -> str:
    """Return the carbon objective's gain over the energy objective, by which of the equal plans the latter returns."""
    carbon_kg = totals(day(inputs))[0]
    drawn: list[float] = []
    for seed in range(DRAWS):
        random = np.random.default_rng(seed)
        plans: list[PoolsResult] = []
        for index in range(HALF_HOURS):
            request = half_hour(inputs, index, objective="cost", gap=TIE)
            places = [  # preferred at random among equals
                place.model_copy(update={"price_per_kwh": [1 + TIE * float(random.random())] * STEPS})
                for place in request.locations
            ]
            request = request.model_copy(update={"locations": places})
            plans.append(solved(request))
        drawn.append(100 * (carbon_kg / totals(plans)[0] - 1))
    named = {"as HiGHS returns it": UNTIED, "the cleanest, as Wattshift takes it": {"objective": "energy", "gap": 1e-6}}
    found = {name: 100 * (carbon_kg / totals(day(inputs, **terms))[0] - 1) for name, terms in named.items()}
    found |= {
        f"{DRAWS} random choices, the least gain": max(drawn),
        f"{DRAWS} random choices, mean": sum(drawn) / len(drawn),
        f"{DRAWS} random choices, the greatest gain": min(drawn),
    }
    return "\n".join(
        ["| plan of least energy | carbon objective against it |", "|---|---:|"]
        + [f"| {name} | {change:+.1f} % |" for name, change in found.items()]
    )


def below_full_load(inputs: Inputs) -> str:
    """Return the day if power follows the load down to that of idle boards, planned with and without knowing it."""
    lines = ["| planned with | carbon | energy | carbon | energy |", "|---|---:|---:|---:|---:|"]
    base: tuple[float, float] | None = None
    for name, is_known in {"full power": False, "power that follows the load": True}.items():
        carbon_kg = energy_kwh = 0.0
        for index in range(HALF_HOURS):
            request = half_hour(inputs, index)
            modes = [
                mode.model_copy(update={"idle_w": sum(n * IDLE_W[of] for of, n in mode.gpus.items())})
                for mode in request.modes
            ]
            real = request.model_copy(update={"modes": modes})
            problem, known = pool_problem(real), pool_problem(real if is_known else request)
            found = pools_result(real, problem, plan_pools(known, relative_gap=GAP))
            carbon_kg, energy_kwh = carbon_kg + (found.emissions_kg or 0), energy_kwh + (found.energy_kwh or 0)
        base = base or (carbon_kg, energy_kwh)
        changes = f"{100 * (carbon_kg / base[0] - 1):+.1f} % | {100 * (energy_kwh / base[1] - 1):+.1f} %"
        lines.append(f"| {name} | {carbon_kg:.2f} kg | {energy_kwh:.1f} kWh | {changes} |")
    return "\n".join(lines)


def sensitivity(inputs: Inputs) -> str:
    """Return carbon against energy objective by capacity and load."""
    lines = ["| GPUs | " + " | ".join(f"demand x {load:g}" for load in LOADS) + " |", "|---:|" + "---|" * len(LOADS)]
    for size in SIZES:
        cells: list[str] = []
        for load in LOADS:
            carbon, energy = (day(inputs, size=size, load=load, **each) for each in ({}, UNTIED))
            ours, base = totals(carbon, energy), totals(energy, carbon)
            lost = f", {ours[2]} not served" if ours[2] else ""
            if ours[2] == HALF_HOURS:
                cells.append("nothing is served")
                continue
            change = f"{100 * (ours[0] / base[0] - 1):+.1f} %, {100 * (ours[1] / base[1] - 1):+.1f} %"
            cells.append(change + lost)
        lines.append(f"| x {size:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _draw(inputs: Inputs, plans: dict[str, list[PoolsResult]], plots: Path) -> None:
    hours = [(index + 1) / 2 for index in range(HALF_HOURS)]
    carbon, energy = plans["carbon"], plans["energy"]

    def gpus(result: PoolsResult, pool: str, mode: str) -> float:
        held = int(mode.removeprefix("A100_TP").removeprefix("H100_TP"))
        return float(held * sum(i.count for i in result.instances if (i.request_class, i.mode) == (pool, mode)))

    modes = list(dict.fromkeys(row["mode"] for row in inputs.profiles))
    by_class = [
        (f"GPUs for {pool} by mode", [Line(mode, hours, [gpus(plan, pool, mode) for plan in carbon]) for mode in modes])
        for pool in CLASSES
    ]
    (plots / "freesh-modes.svg").write_text(picture(by_class), encoding="utf-8")
    both = {"carbon objective": carbon, "energy objective": energy}
    sums = [
        (
            "kgCO2 since midnight",
            [Line(name, hours, _sums([p.emissions_kg for p in each])) for name, each in both.items()],
        ),
        ("kWh since midnight", [Line(name, hours, _sums([p.energy_kwh for p in each])) for name, each in both.items()]),
    ]
    (plots / "freesh-day.svg").write_text(picture(sums), encoding="utf-8")
    names = [row["location"] for row in inputs.gpus]

    def drawn_kw(result: PoolsResult, location: str) -> float:
        return sum(each.count * each.power_w for each in result.instances if each.location == location) / 1_000

    means = [
        Line(name, hours, [_mean(inputs.rates[i * STEPS : (i + 1) * STEPS], at) for i in range(HALF_HOURS)])
        for at, name in enumerate(names)
    ]
    places = [("marginal rate, lb/MWh, mean of the half hour", means)]
    for label, each in both.items():
        places.append((f"kW by place, {label}", [Line(n, hours, [drawn_kw(p, n) for p in each]) for n in names]))
    (plots / "freesh-places.svg").write_text(picture(places), encoding="utf-8")


def _mean(rows: Sequence[Row], at: int) -> float:
    return sum(float(list(row.values())[at]) for row in rows) / len(rows)


def _sums(values: Sequence[float | None]) -> list[float]:
    found, total = [], 0.0
    for value in values:
        total += value or 0.0
        found.append(total)
    return found


def main() -> None:
    """Fill the page, and draw its plots."""
    page, data = Path(sys.argv[1]), Path(sys.argv[2])
    inputs = read(data)
    tables = {
        "published": lambda: published(data, inputs),
        "day": lambda: choices(inputs, page.parent),
        "ties": lambda: ties(inputs),
        "below-full-load": lambda: below_full_load(inputs),
        "sensitivity": lambda: sensitivity(inputs),
    }
    fill(page, tables)


if __name__ == "__main__":
    main()
