"""What the simulated jobs do at each size, looked up once per kind of job, GPU model and size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.domain.settings import SettingKind
from services.simulator.workload import Workload

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Settings = tuple[tuple[SettingKind, float], ...]
"""What is set on a gang's devices, by kind; nothing at the defaults."""
Key = tuple[int, int, int, int, Settings]


@dataclass(frozen=True, slots=True)
class Run:
    """A gang at work.

    Attributes:
        speed: Work seconds per second.
        gpu_w: Draw of all its GPUs, watts.
        draw_w: With the host's part, watts.
        efficiency: Work seconds per joule.
        restart_s, checkpoint_s: As in the job's profile.
    """

    speed: float
    gpu_w: float
    draw_w: float
    efficiency: float
    restart_s: float
    checkpoint_s: float


class Behaviours:
    """Truth and prediction of a workload's jobs on a cluster's GPU models."""

    def __init__(self, workload: Workload, models: tuple[str, ...], host_per_job_w: float | None = None) -> None:
        """Take the kinds of jobs, the cluster's GPU models, and ``EngineOptions.host_per_job_w``."""
        self._profiles = workload.profiles
        self._models = models
        self._host_per_job_w = host_per_job_w
        self._runs: dict[Key, Run] = {}

    def run(self, profile: int, model: int, gpus: int, nodes: int, settings: Settings = ()) -> Run:
        """Return what a gang of this size does on this model, on so many nodes and so set.

        Raises:
            KeyError: the job cannot run on that model.
        """
        key = (profile, model, gpus, nodes, settings)
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = self._look_up(*key)
        return found

    def _look_up(self, profile: int, model: int, gpus: int, nodes: int, settings: Settings) -> Run:
        spread = nodes > 1
        kind = self._profiles[profile]
        behaviour = kind.truth(self._models[model])
        if behaviour is None:
            raise KeyError(f"{kind.name} does not run on {self._models[model]}")
        size = np.array([gpus])
        slower, cooler = behaviour.factors_at(dict(settings))
        speed = float(behaviour.speed_at(size, spread=spread)[0]) * slower
        gpu_w = gpus * float(behaviour.power_w_at(size, spread=spread)[0]) * cooler
        host_w = gpus * kind.host_power_w if self._host_per_job_w is None else nodes * self._host_per_job_w
        draw_w = gpu_w + host_w
        return Run(speed, gpu_w, draw_w, speed / draw_w, kind.restart_s, kind.checkpoint_s)


def eligible_models(workload: Workload, models: tuple[str, ...]) -> Bools:
    """Return which jobs may run on which models: (n_jobs, n_models)."""
    runs = np.array([[profile.truth(model) is not None for model in models] for profile in workload.profiles])
    eligible = runs.reshape(len(workload.profiles), len(models))[workload.profile]
    if workload.gpu_model is not None:
        wanted = np.array(workload.gpu_model)
        for at, model in enumerate(models):
            eligible[:, at] &= (wanted == "") | (wanted == model)
    return eligible


def predicted_s(workload: Workload, models: tuple[str, ...]) -> Floats:
    """Return the predicted duration of each job at its smallest gang, on the first model it may use: (n_jobs,)."""
    work = workload.work_s if workload.predicted_work_s is None else workload.predicted_work_s
    speeds = np.ones(len(workload))
    for at, profile in enumerate(workload.profiles):
        of_kind = np.flatnonzero(workload.profile == at)
        behaviour = next((each for model in models if (each := profile.prediction(model)) is not None), None)
        if behaviour is not None and of_kind.size:
            speeds[of_kind] = behaviour.speed_at(workload.min_gpus[of_kind])
    return work / speeds


def speed_curves(workload: Workload, models: tuple[str, ...]) -> Floats:
    """Return the predicted speed of each kind at 1, 2, ... GPUs over the speed at one: (n_profiles, most GPUs)."""
    sizes = np.arange(1, int(workload.max_gpus.max(initial=1)) + 1)
    curves = np.ones((len(workload.profiles), sizes.size))
    for at, profile in enumerate(workload.profiles):
        behaviour = next((each for model in models if (each := profile.prediction(model)) is not None), None)
        if behaviour is not None:
            speed = behaviour.speed_at(sizes)
            if behaviour.gpus[0] > 1:  # nothing is known below the smallest size: as if it scaled perfectly there
                speed = np.where(sizes < behaviour.gpus[0], speed[0] * sizes / behaviour.gpus[0], speed)
            curves[at] = speed / speed[0]
    return curves
