"""``joint`` on clusters and workloads drawn by chance: ``python -m lab.reproductions.joint_anywhere PAGE OUT``.

Each seed draws a cluster of 1 to 64 GPUs, 1 to 16 a node, of one or two of the catalogue's models; 30 to 80 jobs of a
minute to a day, rigid or elastic, in bursts, by day or evenly, at a load of 0.05 to 1.5, as the measured models or as
made up ones, with no lengths, right or wrong ones, with deadlines or without; a recorded grid or one that is constant,
has two levels, falls below zero or is known for a day; and whether nodes may sleep, limits may be set and batches may
follow. All policies have the same means. Every case leaves a file in OUT, and a second run makes only those that are
missing; then the table ``joint-anywhere`` of PAGE is made anew, in some minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.experiments.runner import write_json
from lab.reproductions.marked import fill
from services.core.domain.carbon import CarbonCurve, Signal
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS, GpuModel
from services.core.domain.units import J_PER_KWH
from services.kit.policies import load_policies
from services.simulator.bundles import BUNDLED_ZONES
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.grid import Grid
from services.simulator.readers.carbon import read_carbon
from services.simulator.recipes.green import CATEGORIES, EDGES_S, MODELS
from services.simulator.recipes.measured import HOST_IDLE_W_PER_GPU, HOST_W_PER_GPU, KINDS, tuning_profile
from services.simulator.workload import (
    ANY_MODEL,
    Behaviour,
    CarbonTrace,
    ClusterSpec,
    ForecastKind,
    JobProfile,
    NodeGroup,
    Workload,
)

LOOKED_AT, JUDGES = range(140), range(140, 260)  #: Seeds; the first showed where ``joint`` loses, the others judge
BOOT_S = 180.0  #: How long a node takes to boot, as in every simulation here
BEGIN_S = 1_672_704_000.0  #: 3 January 2023, 00:00 UTC
HOUR_S, DAY_S = 3_600.0, 86_400.0
MOST_GPUS = 64
FIGURES = ("carbon_kg", "avg_jct_s", "p99_jct_s")
CLEARLY = 0.5  #: How much above LAS counts as worse, per cent
JOINT, JOINT_BOOT, LAS, LAS_AWAKE = "joint", "joint, sleeps after a boot's time", "LAS", "LAS, no sleep"
FIFO, ZEUS = "fifo", "Zeus + LAS"


@dataclass(frozen=True)
class Case:
    """A cluster, its jobs, its grid, and what is permitted."""

    seed: int
    cluster: ClusterSpec
    jobs: Workload
    grid: CarbonTrace
    sleeps: bool  #: Whether nodes may sleep
    limits: bool  #: Whether power limits may be set
    batches: str  #: Which users let batches follow their gangs
    traits: Mapping[str, Any]  #: What it was drawn as


def a_case(seed: int) -> Case:
    """Return the case of a seed."""
    random = np.random.default_rng(seed)
    traits: dict[str, Any] = {}

    def drawn(name: str, *choices: Any) -> Any:
        traits[name] = choices[int(random.integers(len(choices)))]
        return traits[name]

    cluster = _cluster(random, drawn("models", 1, 1, 1, 2))
    traits["cluster"] = ", ".join(f"{each.count}x{each.gpus}:{each.model.name}" for each in cluster.groups)
    traits["gpus"] = cluster.gpus
    traits["load"] = round(float(np.exp(random.uniform(np.log(0.05), np.log(1.5)))), 3)
    n = int(random.integers(30, 81))
    asked = _asked(random, n, cluster, drawn("asked", "one", "mixed", "mixed"))
    usual_s = drawn("usual_s", 60.0, 600.0, HOUR_S, 6 * HOUR_S)
    lasts_s = np.exp(random.normal(np.log(usual_s), drawn("spread", 0.3, 1.0, 1.5), n)).clip(30.0, DAY_S)
    kinds = drawn("kinds", "measured", "measured", "made up")
    profiles = tuple(tuning_profile(*each) for each in KINDS) if kinds == "measured" else _made_up(random)
    profile = _measured(random, lasts_s) if kinds == "measured" else random.integers(0, len(profiles), n)
    board = cluster.groups[0].model.name
    work_s = lasts_s.copy()
    for row in range(n):
        truth = profiles[profile[row]].truth(board)
        assert truth is not None
        work_s[row] *= float(truth.speed_at(asked[row : row + 1])[0])
    span_s = float((lasts_s * asked).sum()) / traits["load"] / cluster.gpus
    since_s = np.sort(_arrivals(random, n, drawn("arrivals", "even", "even", "bursts", "daytime"), span_s))
    submitted_s = BEGIN_S + since_s - since_s[0]
    widest = np.maximum(asked, min(8, *(each.count * each.gpus for each in cluster.groups)))
    elastic = random.random(n) < drawn("elastic", 1.0, 1.0, 0.5, 0.0)
    lengths = drawn("lengths", "unknown", "unknown", "known", "wrong")
    guessed_s = np.where(random.random(n) < 0.2, np.nan, work_s * np.exp(random.normal(0.0, 1.2, n)))
    predicted = {"unknown": np.full(n, np.nan), "known": None, "wrong": guessed_s}[lengths]
    due = drawn("deadlines", 0.0, 0.0, 0.5)
    has = random.random(n) < due
    deadline_s = np.where(has, submitted_s + lasts_s * random.uniform(1.5, 6.0, n) + HOUR_S, np.inf)
    jobs = Workload(
        ids=tuple(f"j{at}" for at in range(n)),
        tenants=("t",) * n,
        submitted_s=submitted_s,
        work_s=work_s,
        requested_gpus=asked,
        min_gpus=np.where(elastic, 1, asked),
        max_gpus=np.where(elastic, widest, asked),
        step_gpus=np.ones(n, dtype=np.int64),
        profile=profile,
        profiles=profiles,
        predicted_work_s=predicted,
        deadline_s=deadline_s,
    )
    grid = _grid(random, drawn("grid", *BUNDLED_ZONES, "constant", "square", "negative", "one day known"))
    sleeps, limits = drawn("sleeps", True, True, False), drawn("limits", True, True, False)
    batches = drawn("batches", "all", "none", "none", "half")
    return Case(seed, cluster, jobs, grid, sleeps, limits, batches, traits)


def _cluster(random: np.random.Generator, models: int) -> ClusterSpec:
    boards = list(GPU_MODELS.values())
    groups: list[NodeGroup] = []
    for _ in range(models):
        gpus = int(random.choice([1, 2, 4, 8, 16]))
        most = MOST_GPUS // models // gpus
        count = min(int(np.exp(random.uniform(0.0, np.log(most + 1)))), most)
        groups.append(NodeGroup(max(count, 1), gpus, boards[int(random.integers(len(boards)))]))
    return ClusterSpec(tuple(groups))


def _asked(random: np.random.Generator, n: int, cluster: ClusterSpec, how: str) -> np.ndarray[Any, Any]:
    most = min(each.count * each.gpus for each in cluster.groups)
    asked = random.choice([1, 2, 4, 8, 16], n, p=[0.6, 0.15, 0.12, 0.1, 0.03]) if how == "mixed" else np.ones(n)
    return np.minimum(asked, most).astype(np.int64)


def _arrivals(random: np.random.Generator, n: int, how: str, span_s: float) -> np.ndarray[Any, Any]:
    if how == "bursts":
        return random.choice(random.uniform(0.0, span_s, max(n // 15, 2)), n) + random.uniform(0.0, 60.0, n)
    at_s = random.uniform(0.0, span_s, n)
    if how == "daytime":  # 8 to 18 o'clock
        return at_s // DAY_S * DAY_S + 8 * HOUR_S + at_s % DAY_S * 10 / 24
    return at_s


def _measured(random: np.random.Generator, lasts_s: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    category = np.digitize(lasts_s, EDGES_S)
    models = [CATEGORIES[each][int(random.integers(len(CATEGORIES[each])))] for each in category.tolist()]
    return np.array([3 * MODELS.index(name) + int(random.integers(3)) for name in models], dtype=np.int64)


def _made_up(random: np.random.Generator) -> tuple[JobProfile, ...]:
    """Return four kinds of jobs that scale from hardly to linearly, are bound by memory or by arithmetic, and tune."""
    return tuple(_kind(random, f"kind {at}") for at in range(4))


def _kind(random: np.random.Generator, name: str) -> JobProfile:
    sizes = np.array([1, 2, 4, 8, 16])
    speed = sizes ** random.uniform(0.3, 1.0)
    spread = speed * np.append(1.0, np.full(4, random.uniform(0.5, 1.0)))
    share, bound, gain = random.uniform(0.3, 0.95), random.uniform(0.2, 0.8), random.uniform(1.0, 2.0)

    def on(board: GpuModel, times: float = 1.0) -> Behaviour:
        drawn_w = board.idle_w + share * (board.peak_w - board.idle_w)
        limits_w = np.linspace(board.lowest_limit_w, board.peak_w, 6)
        part = np.minimum(limits_w / drawn_w, 1.0)
        curve = ControlCurve(limits_w, part**bound, drawn_w * part)
        controls = {ControlKind.POWER_LIMIT: curve}
        batches = None if times == 1.0 else np.array([sizes * 64, sizes * 64])
        return Behaviour(sizes, times * speed, np.full(5, drawn_w), times * spread, None, controls, batches=batches)

    true = {model: on(board) for model, board in GPU_MODELS.items()}
    true[ANY_MODEL] = on(GPU_MODELS["RTX3090"])
    return JobProfile(
        name,
        true,
        host_power_w=HOST_W_PER_GPU,
        checkpoint_s=float(random.choice([2.0, 10.0, 60.0])),
        restart_s=float(random.choice([5.0, 30.0, 120.0])),
        adaptive=lambda model: (on(GPU_MODELS[model], gain),) if gain > 1.3 else (on(GPU_MODELS[model]),),
        batch_range=(64, 4096),
    )


def _grid(random: np.random.Generator, how: str) -> CarbonTrace:
    if how in BUNDLED_ZONES:
        start_s = BEGIN_S + DAY_S * int(random.integers(0, 300))
        trace = read_carbon(how, start=start_s - DAY_S, days=60.0, forecast=ForecastKind.PERSISTENCE)
        shift_s = start_s - BEGIN_S
        curve = trace.curve
        moved = CarbonCurve(curve.times_s - shift_s, curve.intensity_gco2_per_kwh, curve.end_s - shift_s)
        return replace(trace, curve=moved, before=None)
    hours = np.arange(-24, 24 if how == "one day known" else 24 * 60)
    by_hour = {
        "constant": np.full(hours.size, 300.0),
        "square": np.where(hours % 24 < 12, 600.0, 30.0),
        "negative": 200.0 * np.sin(hours * 2 * np.pi / 24) + random.normal(150.0, 60.0, hours.size),
        "one day known": 250.0 + 150.0 * np.sin(hours * 2 * np.pi / 24),
    }
    times_s = (BEGIN_S + HOUR_S * hours).astype(np.float64)
    curve = CarbonCurve(times_s, by_hour[how], float(times_s[-1]) + HOUR_S)
    return CarbonTrace(how, Signal.AVERAGE_DIRECT, curve, ForecastKind.PERSISTENCE)


def rows_of(case: Case) -> dict[str, tuple[str, dict[str, Any], EngineOptions]]:
    """Return the policies that a case compares, all given the same means: their parameters and the options."""
    terms = EngineOptions(batch_tuning=case.batches)
    rigid = replace(terms, rigid=True)
    asleep = replace(rigid, power_down_after_s=300.0) if case.sleeps else rigid
    of_joint: dict[str, Any] = {} if case.limits else {"limits": False}
    rows: dict[str, tuple[str, dict[str, Any], EngineOptions]] = {}
    rows[JOINT] = "joint", of_joint | ({} if case.sleeps else {"sleep_after_s": None}), terms
    rows[LAS], rows[FIFO] = ("las", {}, asleep), ("fifo", {}, asleep)
    if case.sleeps:
        rows[JOINT_BOOT] = "joint", of_joint | {"sleep_after_s": BOOT_S}, terms
        rows[LAS_AWAKE] = "las", {}, rigid
    if case.limits:
        rows[ZEUS] = "zeus+las", {}, asleep
    return rows


def figures_of(case: Case) -> dict[str, dict[str, float]]:
    """Return the figures of a case's rows; nodes that never sleep draw power until the last row's last job has ended.

    Raises:
        RuntimeError: a job did not end.
    """
    due_s = case.jobs.deadline_s
    begin_s, found = float(case.jobs.submitted_s[0]), dict[str, dict[str, float]]()
    for label, (policy, params, options) in rows_of(case).items():
        result = simulate(policy, case.jobs, case.cluster, case.grid, parameters=params, options=options)
        if result.completed != len(case.jobs):
            raise RuntimeError(f"seed {case.seed}, {label}: {result.completed} of {len(case.jobs)} jobs ended")
        late = 0.0 if due_s is None else float((result.columns.ended_s > due_s).sum())
        summary = result.summary()
        found[label] = {name: float(summary[name]) for name in (*FIGURES, "makespan_s")} | {"late": late}
    grid, end_s = Grid(case.grid, 1.0, 1.0), begin_s + max(each["makespan_s"] for each in found.values())
    idle_w = sum(each.count * each.gpus * (each.model.idle_w + HOST_IDLE_W_PER_GPU) for each in case.cluster.groups)
    for label in found if not case.sleeps else [LAS_AWAKE]:
        rest = grid.integral(end_s) - grid.integral(begin_s + found[label]["makespan_s"])
        found[label]["carbon_kg"] += idle_w * rest / J_PER_KWH / 1e3
    return found


def made(seed: int, out: Path) -> dict[str, Any]:
    """Return a case's traits and figures; run once, and kept in ``out``."""
    file = out / f"{seed}.json"
    if not file.exists():
        case = a_case(seed)
        write_json(file, {"traits": dict(case.traits), "rows": figures_of(case)})
    return json.loads(file.read_text(encoding="utf-8"))


def change(rows: Mapping[str, Mapping[str, float]], label: str, base: str = LAS) -> list[float]:
    """Return a row's carbon, mean and 99th percentile of completion time relative to another's, per cent."""
    return [100.0 * (rows[label][name] / rows[base][name] - 1.0) if rows[base][name] else 0.0 for name in FIGURES]


KINDS_OF_CASES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "all": lambda case: True,
    "no deadlines": lambda case: not case["deadlines"],
    "... nodes sleep": lambda case: not case["deadlines"] and case["sleeps"],
    "... they never sleep": lambda case: not case["deadlines"] and not case["sleeps"],
    "... some batches follow": lambda case: not case["deadlines"] and case["batches"] != "none",
    "... nobody tunes batches": lambda case: not case["deadlines"] and case["batches"] == "none",
    "... no limits either": lambda case: not case["deadlines"] and case["batches"] == "none" and not case["limits"],
    "... jobs of a minute": lambda case: not case["deadlines"] and case["usual_s"] == 60.0,
    "... predictions wrong": lambda case: not case["deadlines"] and case["lengths"] == "wrong",
    "half of the jobs have deadlines": lambda case: bool(case["deadlines"]),
}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per kind of case and way to sleep: ``joint`` against LAS, and how often it is worse."""
    head = ["cases", "of them", "nodes sleep after", "carbon", "mean JCT", "p99 JCT", "carbon above LAS"]
    head += ["mean JCT above", "p99 above", "two of the three", "carbon and mean JCT"]
    lines = [f"| {' | '.join(head)} |", f"|---|---:|---:|{'---:|' * (len(head) - 3)}"]
    for name, is_one in KINDS_OF_CASES.items():
        some = [each for each in found if is_one(each["traits"])]
        for label, words in ((JOINT, "60 s"), (JOINT_BOOT, "a boot's 180 s")):
            if not some or (label == JOINT_BOOT and not any(label in each["rows"] for each in some)):
                continue
            changes = np.array([change(each["rows"], label if label in each["rows"] else JOINT) for each in some])
            worse = changes > CLEARLY
            cells = [f"{each:+.1f} %" for each in np.median(changes, axis=0).tolist()]
            counts = (
                *worse.sum(axis=0).tolist(),
                int((worse.sum(axis=1) >= 2).sum()),
                int(worse[:, :2].all(axis=1).sum()),
            )
            cells += map(str, counts)
            lines.append(f"| {name} | {len(some)} | {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def judged(out: Path) -> str:
    """Return the table of the cases that judge."""
    out.mkdir(parents=True, exist_ok=True)
    return table([made(seed, out) for seed in JUDGES])


if __name__ == "__main__":
    load_policies()
    fill(Path(sys.argv[1]), {"joint-anywhere": lambda: judged(Path(sys.argv[2]))})
