"""The measured models with a total batch that stays: on ``n`` GPUs each has ``BS / n`` samples a step (strong scaling).

Steps are those measured (Sia) at that many samples per GPU, between measured batches linear. A GPU that would have more
than the largest measured batch takes them in several passes, of which the last one synchronises; **one that would have
fewer than the smallest takes as long as with that one**, since how much sooner it ends was not measured. So a small
total batch gains nothing from more GPUs, and where they span nodes it loses.

Power is that of the measured batch nearest to the samples per GPU, and less in the part of a step in which GPUs wait
for each other, as in ``measured.py``. What a power limit does is that of the batch per GPU of the user's own gang.
"""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np

from lab.recipes.best_batch import StepTimes
from lab.recipes.measured import SPEED_OF, WAITING_FRACTION, dynamic_fraction, power_limits, steps
from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS
from services.simulator.recipes.measured import HOST_W_PER_GPU, REFERENCE_GPU, SIZES, power_w, speed_tag
from services.simulator.workload import ANY_MODEL, Behaviour, JobProfile

SLACK = 1e-9


@cache
def strong_profile(model: str, batch: int, gang: int) -> JobProfile:
    """Return a measured model that splits ``gang`` batches over its GPUs, on every board we know."""
    true = {name: strong_behaviour(model, batch, gang, name) for name in GPU_MODELS}
    true[ANY_MODEL] = true[REFERENCE_GPU]
    return JobProfile(f"{model}, batch {batch} on each of {gang}", true, host_power_w=HOST_W_PER_GPU)


def strong_behaviour(model: str, batch: int, gang: int, gpu_model: str) -> Behaviour:
    """Return the same on one kind of board; speed 1 is one board of the reference tag with the whole batch."""
    total = batch * gang
    table, reference = (steps(SPEED_OF[model], tag) for tag in (speed_tag(gpu_model), "rtx"))
    alone = table[("one", 1)]
    base = samples_per_s(reference[("one", 1)], total, 1)
    waiting_w = power_w(WAITING_FRACTION, gpu_model)

    def drawn_w(placement: str, size: int) -> float:
        ideal = size * samples_per_s(alone, total / size, 1)
        working = min(samples_per_s(table[placement, size], total, size) / ideal, 1.0)
        busy_w = power_w(dynamic_fraction(model, max(total / size, 1.0)), gpu_model)
        return working * busy_w + (1.0 - working) * min(waiting_w, busy_w)

    def columns(first: str, second: str) -> tuple[Floats, Floats]:
        gangs = [(first if (first, size) in table else second, size) for size in SIZES.tolist()]
        gangs = [each for each in gangs if each in table]
        sizes = [size for _, size in gangs]
        speed = [samples_per_s(table[each], total, each[1]) / base for each in gangs]
        return np.interp(SIZES, sizes, speed), np.interp(SIZES, sizes, [drawn_w(*each) for each in gangs])

    (one, one_w), (spread, spread_w) = columns("one", "spread"), columns("spread", "one")
    limits = power_limits(model, batch, gpu_model)
    controls = {} if limits is None else {ControlKind.POWER_LIMIT: limits}
    return Behaviour(SIZES, one, one_w, np.minimum(spread, one), spread_w, controls)


def samples_per_s(times: StepTimes, total: float, gpus: int) -> float:
    """Return the throughput of a gang that splits a total batch: samples/s.

    Args:
        times: Steps of this gang by samples per GPU.
        total: Samples in a step of the whole gang.
        gpus: Size of the gang.

    Source: PowerFlow section 4, ``bs = BS / n``.
    """
    per_gpu = total / gpus
    passes = max(ceil(per_gpu / float(times.batch_per_gpu[-1]) - SLACK), 1)
    at_once = np.array([per_gpu / passes])
    return float(times.throughput(gpus, at_once, np.array([passes - 1]))[0])
