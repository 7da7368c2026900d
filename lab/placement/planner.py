"""How a common model is laid out on a number of GPUs, so that a user need not say.

Models that fit on one GPU are cut as in PipeDream: of all ways to cut the layers into stages and to give each stage
replicas, the one whose slowest stage is fastest. The planner does not know where the gang will sit, so it relies only
on what every GPU has anywhere: its share of a NIC. Gangs larger than ``CUT_GPUS`` are several such pipelines side by
side, each with its own mini-batch.

Large models take a published layout (``architectures``): tensor groups of that width or of the greatest power of two
that divides the number of GPUs, at least that many stages of even length, and replicas of the whole; of the depths that
divide the number of GPUs, the one with the least time per sample on those shares.

Sources: Narayanan et al., PipeDream, SOSP'19, section 3.1; A-SRPT section V-A uses the planner of Luo et al.
(INFOCOM'22), which is of that kind.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lab.placement.architectures import Architecture, architecture
from lab.placement.layers import Layer
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.parallel.graph import AllReduce, JobGraph, Stage
from services.core.parallel.iteration import IterationModel, Network

CUT_GPUS = 16  #: The largest pipeline that is cut freely; the search grows with its square
MAX_GPUS = 65_536


def plan_layout(
    model: str | Architecture,
    gpus: int,
    batch: int | None = None,
    *,
    network: Network | None = None,
    tensor_parallel: int | None = None,
    all_reduce: AllReduce = AllReduce.RING,
) -> JobGraph:
    """Return a layout of the model on exactly ``gpus`` GPUs.

    Args:
        model: A name, or a shape of your own.
        gpus: Size of the gang; 1 to ``MAX_GPUS``.
        batch: Mini-batch of each pipeline, samples; A-SRPT's Table I unless given.
        network: What to plan for; the paper's unless given.
        tensor_parallel: Width of tensor groups, instead of the published one.
        all_reduce: How replicas sum gradients.

    Raises:
        DomainError: there is no such model, or the numbers are inconsistent.
    """
    shape = architecture(model) if isinstance(model, str) else model
    samples = shape.batch if batch is None else batch
    if not 1 <= gpus <= MAX_GPUS or samples < 1:
        raise DomainError(f"a layout needs 1 to {MAX_GPUS} GPUs and a mini-batch of at least one sample")
    width = _tensor_width(shape, gpus, tensor_parallel)
    if width == 1 and shape.pipeline == shape.tensor_parallel == 1:
        stages = _cut(shape, gpus, samples, network or Network())
    else:
        stages = _even(shape, gpus // width, width, samples, network or Network())
    return JobGraph(tuple(stages), all_reduce)


def _tensor_width(shape: Architecture, gpus: int, asked: int | None) -> int:
    if asked is None:
        return min(shape.tensor_parallel, gpus & -gpus)
    if asked < 1 or gpus % asked:
        raise DomainError(f"{gpus} GPUs do not divide into tensor groups of {asked}")
    return asked


def _even(shape: Architecture, groups: int, width: int, batch: int, network: Network) -> list[Stage]:
    """Return stages with layers split as evenly as possible, at the depth with the least worst-case time per sample."""
    embedding = int(not shape.layers[0].forward_flops)  # goes with the layer behind it
    depth = len(shape.layers) - embedding
    depths = [each for each in range(shape.pipeline, depth + 1) if groups % each == 0]
    if not depths:  # fewer GPUs than the published layout has
        depths = [max(each for each in range(1, min(shape.pipeline, groups, depth) + 1) if groups % each == 0)]
    layouts: list[list[Stage]] = []
    for stages in depths:
        replicas = groups // stages
        ends = [0, *(embedding + depth * at // stages for at in range(1, stages + 1))]
        layouts.append(
            [
                _stage(shape, shape.layers[start:end], replicas, batch * replicas, width, last=end == ends[-1])
                for start, end in pairwise(ends)
            ]
        )
    return min(
        layouts, key=lambda stages: IterationModel(JobGraph(tuple(stages)), network).worst_s / stages[0].replicas
    )


def _cut(shape: Architecture, gpus: int, batch: int, network: Network) -> list[Stage]:
    """Return the cut whose slowest stage is fastest, with as many pipelines side by side as are needed."""
    pipeline = max(each for each in range(1, min(gpus, CUT_GPUS) + 1) if gpus % each == 0)
    copies = gpus // pipeline
    return [
        _stage(shape, shape.layers[start:end], replicas * copies, batch * copies, 1, last=end == len(shape.layers))
        for start, end, replicas in _best_cut(shape, pipeline, batch, network)
    ]


def _best_cut(shape: Architecture, gpus: int, batch: int, network: Network) -> list[tuple[int, int, int]]:
    """Return (first layer, end, replicas) of each stage, by dynamic programming.

    ``best[g, j]`` is the time of the slowest stage with the first ``j`` layers on ``g`` GPUs; a stage takes the time of
    eq. 7 with each replica on its own server.
    """
    n = len(shape.layers)
    value = shape.bytes_per_value
    operations = np.cumsum([0.0, *(3 * layer.forward_flops * batch for layer in shape.layers)]) / shape.flops_per_s
    parameters = np.cumsum([0.0, *(layer.parameters * value for layer in shape.layers)])
    sent = np.array([0.0, *(layer.outputs * value * batch for layer in shape.layers[:-1]), 0.0])
    share = network.inter_bytes_per_s / network.server_gpus
    start, end = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    work_s, summed = operations[end] - operations[start], parameters[end] - parameters[start]
    times: list[Floats] = []
    for replicas in range(1, gpus + 1):
        moved = 2 * (sent[start] + sent[end]) / replicas + 2 * (replicas - 1) / replicas * summed
        possible = (end > start) & (replicas <= batch)
        times.append(np.where(possible, work_s / replicas + moved / share, np.inf))
    best: Floats = np.full((gpus + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    chosen: dict[tuple[int, int], tuple[int, int]] = {}
    for used in range(1, gpus + 1):
        for replicas in range(1, used + 1):
            slowest = np.maximum(best[used - replicas][:, None], times[replicas - 1])
            for j in np.flatnonzero(slowest.min(axis=0) < best[used]).tolist():
                chosen[used, j] = int(slowest[:, j].argmin()), replicas
            best[used] = np.minimum(best[used], slowest.min(axis=0))
    stages: list[tuple[int, int, int]] = []
    used, j = gpus, n
    while used:
        if (used, j) not in chosen:
            raise DomainError(f"{shape.name} cannot be cut for {gpus} GPUs with a mini-batch of {batch}")
        first, replicas = chosen[used, j]
        stages.append((first, j, replicas))
        used, j = used - replicas, first
    return stages[::-1]


def _stage(
    shape: Architecture, layers: tuple[Layer, ...], replicas: int, batch: int, width: int, *, last: bool
) -> Stage:
    value = shape.bytes_per_value
    forward_s = sum(layer.forward_flops for layer in layers) * batch / replicas / width / shape.flops_per_s
    return Stage(
        replicas=replicas,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        parameter_bytes=float(sum(layer.parameters for layer in layers) * value),
        output_bytes=0.0 if last else float(layers[-1].outputs * value * batch),
        tensor_parallel=width,
        tensor_bytes=float(sum(layer.tensor_sums for layer in layers) * value * batch) if width > 1 else 0.0,
    )
