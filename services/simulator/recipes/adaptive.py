"""The measured models with a batch size that follows the gang: how jobs run under a policy that adapts both (Pollux).

**Goodput.** Among all batches between the application's smallest and largest total batch, the one with the highest
goodput is chosen (``core.profiles.goodput``): throughput, at the resulting samples per GPU and accumulation, from the
same measured steps as the speed of fixed batches; statistical efficiency from the measured gradient noise, which grows
during training. A job goes through ten stages, equal shares of its work, each with its own noise.

**Unit.** Work is counted in samples of the application's smallest batch, M0. A fixed-batch job of the same profile does
one second of work per second on one GPU of the reference tag. Each sample it processes counts for the
samples needed until trained at M0 over those needed at the batch that job was measured at or asked for. Both are
interpolated linearly between validated batches; a batch below M0 counts as M0, since nothing was measured there.

A fixed-batch job that is given a larger gang is not charged for the lower efficiency of its larger total batch; a job
that tunes its batch is. That favours schedulers without tuning.

**Power.** The power of the measured batch nearest to the samples per GPU; less during the part of a step in which GPUs
wait for each other, which is the gang's throughput deficit against the same number of single GPUs, as for fixed
batches. The effect of a power limit is that of the measured batch nearest to one GPU's: nobody has measured limits on
jobs that tune.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache, partial

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import GPU_MODELS
from services.core.profiles.goodput import BestBatch, NoiseScale, StepTimes, best_batch
from services.simulator.bundles import rows_of
from services.simulator.recipes.measured import (
    REFERENCE_GPU,
    SIZES,
    SPEED_OF,
    WAITING_FRACTION,
    dynamic_fraction,
    power_limits,
    power_w,
    profile,
    samples_to_train,
    speed_tag,
    speeds,
)
from services.simulator.workload import Behaviour, JobProfile

STAGES = 10
Gang = tuple[str, int]
"""``one`` or ``spread``, and how many GPUs."""


def tuning_profile(model: str, batch: int, total: int) -> JobProfile:
    """Return a measured model at one batch per GPU that can tune its batch; see ``adaptive``."""
    batches = noise_scales(SPEED_OF[model])[0].batch
    permitted = int(batches[0]), int(batches[-1])
    return replace(profile(model, batch), adaptive=partial(adaptive, model, batch, total), batch_range=permitted)


@cache
def adaptive(model: str, batch: int, total: int, gpu_model: str) -> tuple[Behaviour, ...]:
    """Return how a model runs on one kind of board with its batch tuned, by stage.

    Args:
        model: One of ``SPEED_OF``.
        batch: Samples per GPU of the fixed-batch job whose seconds of work are the unit.
        total: The total batch at which its work was counted.
        gpu_model: One of ``GPU_MODELS``; any other runs like the reference board.
    """
    application = SPEED_OF[model]
    gpu_model = gpu_model if gpu_model in GPU_MODELS else REFERENCE_GPU
    tag = speed_tag(gpu_model)
    at_once = speeds()[(application, "rtx", batch)][("one", 1)]
    base = int(noise_scales(application)[0].batch[0])
    unit = at_once * samples_to_train(application, base) / samples_to_train(application, total)
    return tuple(_behaviour(model, gpu_model, application, tag, stage, unit) for stage in range(STAGES))


@cache
def goodputs(application: str, tag: str, stage: int) -> dict[Gang, BestBatch]:
    """Return the best batch of every measured gang at a stage of the training."""
    noise = noise_scales(application)[stage]
    return {gang: best_batch(times, noise, gang[1]) for gang, times in steps(application, tag).items()}


@cache
def steps(application: str, tag: str) -> dict[Gang, StepTimes]:
    """Return the step times of each measured gang."""
    points: dict[Gang, list[tuple[float, float, float]]] = defaultdict(list)
    for row in rows_of("speeds.csv"):
        if (row["application"], row["gpu"]) == (application, tag):
            gang, batch = (row["placement"], int(row["gpus"])), float(row["batch_per_gpu"])
            step_s = gang[1] * batch / float(row["samples_per_s"])
            points[gang].append((batch, step_s, step_s * float(row["sync_share"])))
    return {gang: StepTimes(*np.array(sorted(rows)).T) for gang, rows in points.items()}


@cache
def noise_scales(application: str) -> tuple[NoiseScale, ...]:
    """Return the gradient noise by stage."""
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in rows_of("noise.csv"):
        if row["application"] == application:
            points[int(row["stage"])].append((float(row["batch"]), float(row["noise"])))
    return tuple(NoiseScale(*np.array(sorted(points[stage])).T) for stage in range(STAGES))


def _behaviour(model: str, gpu_model: str, application: str, tag: str, stage: int, unit: float) -> Behaviour:
    best, times = goodputs(application, tag, stage), steps(application, tag)
    alone = times[("one", 1)]
    waiting_w = power_w(WAITING_FRACTION, gpu_model)

    def drawn_w(gang: Gang) -> float:
        chosen = best[gang]
        at_once, passes = np.array([chosen.batch_per_gpu]), np.array([chosen.accumulated])
        ideal = gang[1] * alone.throughput(1, at_once, np.zeros_like(at_once))
        working = min(float((times[gang].throughput(gang[1], at_once, passes) / ideal)[0]), 1.0)
        busy_w = power_w(dynamic_fraction(model, chosen.batch_per_gpu), gpu_model)
        return working * busy_w + (1.0 - working) * min(waiting_w, busy_w)

    def total(gang: Gang) -> int:
        chosen = best[gang]
        return gang[1] * chosen.batch_per_gpu * (chosen.accumulated + 1)

    def columns(first: str, second: str) -> tuple[Floats, Floats, Floats]:
        gangs = [(first if (first, size) in best else second, size) for size in SIZES.tolist()]
        gangs = [gang for gang in gangs if gang in best]
        sizes = [size for _, size in gangs]
        speed = np.interp(SIZES, sizes, [best[gang].goodput / unit for gang in gangs])
        drawn = np.interp(SIZES, sizes, [drawn_w(gang) for gang in gangs])
        return speed, drawn, np.interp(SIZES, sizes, [total(gang) for gang in gangs]).round()

    (one, one_w, one_batch), (spread, spread_w, spread_batch) = columns("one", "spread"), columns("spread", "one")
    limits = power_limits(model, best[("one", 1)].batch_per_gpu, gpu_model)
    controls = {} if limits is None else {ControlKind.POWER_LIMIT: limits}
    batches = np.array((one_batch, spread_batch), dtype=np.int64)
    return Behaviour(SIZES, one, one_w, np.minimum(spread, one), spread_w, controls, batches=batches)
