"""Random jobs for PowerFlow's greedy, and the best allocation by trying all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from services.core.cycle.capacity import powers_of_two
from services.core.domain.arrays import Floats, Ints
from services.core.policies.powerflow.allocate import Choices, Room, allocate_gpus
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.controls import allocate_controls

IDLE_W = 30.0


@dataclass(frozen=True)
class Allocation:
    """Gang sizes (0: none), settings (-1: none), mean time to the end (inf where a job has no GPU), and power."""

    gpus: Ints
    settings: Ints
    mean_s: float
    power_w: float


def random_choices(rng: np.random.Generator, n_jobs: int, *, most_gpus: int = 8, settings: int = 3) -> Choices:
    """Return jobs that gain less and less from each GPU and each step of the clock, all in their own way."""
    ones = np.ones(n_jobs, dtype=np.int64)
    gpus = powers_of_two(ones, np.full(n_jobs, most_gpus), ones)
    clock = np.linspace(0.4, 1.0, settings)
    scaling, bound = rng.uniform(0.3, 1.0, (n_jobs, 1, 1)), rng.uniform(0.2, 1.0, (n_jobs, 1, 1))
    speed = gpus[:, :, None] ** scaling * clock**bound * rng.uniform(0.5, 2.0, (n_jobs, 1, 1))
    board_w = rng.uniform(40, 80, (n_jobs, 1, 1)) + rng.uniform(100, 300, (n_jobs, 1, 1)) * clock**3
    return Choices(gpus, speed, gpus[:, :, None] * board_w)


def greedily(
    choices: Choices, work_s: Floats, gpus: int, limit_w: float, config: PowerflowConfig = PowerflowConfig()
) -> Allocation:
    """Return what both halves of Algorithm 1 give, on nodes of four GPUs."""
    n_jobs = len(choices)
    room = Room(np.array([gpus]), np.array([IDLE_W]), 4, limit_w, 0.0, np.array([gpus]))
    nobody, gpu_model = np.zeros(n_jobs, dtype=np.bool_), np.zeros(n_jobs, dtype=np.int64)
    sizes = allocate_gpus(choices, room, gpu_model=gpu_model, keeps=nobody, work_s=work_s, config=config)
    runs = np.flatnonzero(sizes >= 0)
    held = np.zeros(n_jobs, dtype=np.int64)
    held[runs] = choices.gpus[runs, sizes[runs]]
    speed, power_w = (table[runs] for table in choices.at(np.maximum(sizes, 0)))
    idle_w = float(gpus - held.sum()) * IDLE_W
    settings = np.full(n_jobs, -1)
    weighted = work_s[runs] if config.marginal == "power" else None
    settings[runs] = allocate_controls(speed, power_w, limit_w - idle_w, weighted)
    at = np.arange(runs.size), settings[runs]
    mean_s = float(np.mean(work_s[runs] / speed[at])) if 0 < runs.size == n_jobs else float("inf")
    return Allocation(held, settings, mean_s, float(power_w[at].sum()) + idle_w)


def optimum_s(choices: Choices, work_s: Floats, gpus: int, limit_w: float) -> float:
    """Return the least mean time to the end that any sizes and settings within GPUs and limit reach, all running."""
    n_jobs, n_sizes, n_settings = choices.speed.shape
    best = float("inf")
    for picked in product(range(n_sizes * n_settings), repeat=n_jobs):
        sizes, settings = np.divmod(np.array(picked), n_settings)
        at = np.arange(n_jobs), sizes, settings
        held = int(choices.gpus[at[:2]].sum())
        if held <= gpus and float(choices.power_w[at].sum()) + (gpus - held) * IDLE_W <= limit_w:
            best = min(best, float((work_s / choices.speed[at]).mean()))
    return best


def gaps(cases: int, config: PowerflowConfig, seed: int = 1) -> Floats:
    """Return by how much the greedy's mean time exceeds the optimum's, as a share of it: (n_feasible,).

    Cases are of three jobs on eight GPUs; those that leave a job without a GPU, or have no solution, are left out.
    """
    rng = np.random.default_rng(seed)
    found: list[float] = []
    for _ in range(cases):
        choices, work_s = random_choices(rng, 3), rng.lognormal(8.0, 1.0, 3)
        limit_w = float(rng.uniform(0.3, 1.0)) * 8 * 300.0
        reached = greedily(choices, work_s, 8, limit_w, config).mean_s
        if np.isfinite(reached):
            found.append(reached / optimum_s(choices, work_s, 8, limit_w) - 1)
    return np.array(found)
