"""The batch at which a gang progresses fastest, by measured steps and gradient noise.

A GPU takes a limited number of samples at once; beyond that, gradients are accumulated over several passes, of which
only the last one synchronises.

Source: Qiao et al., Pollux, OSDI'21, section 3.
"""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.profiles.goodput import CANDIDATES, statistical_efficiency

SLACK = 1e-8


@dataclass(frozen=True)
class StepTimes:
    """How long one training step of one gang takes, by samples per GPU; linear between measured points."""

    batch_per_gpu: Floats  #: (n,) samples per GPU, ascending
    step_s: Floats  #: (n,) a whole step, seconds
    sync_s: Floats  #: (n,) the part of it in which gradients are exchanged and nothing else happens, seconds

    def throughput(self, gpus: int, batch_per_gpu: Ints | Floats, accumulated: Ints) -> Floats:
        """Return samples/s of a gang whose steps accumulate gradients over this many extra passes; same shape."""
        step_s = np.interp(batch_per_gpu, self.batch_per_gpu, self.step_s)
        pass_s = step_s - np.interp(batch_per_gpu, self.batch_per_gpu, self.sync_s)
        return gpus * batch_per_gpu * (accumulated + 1) / (step_s + accumulated * pass_s)


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale at some stage of training, by total batch; linear between measured points."""

    batch: Floats  #: (n,) total batch sizes, samples, ascending; the first is M0, the last the largest allowed
    noise: Floats  #: (n,) noise scales, samples

    def efficiency(self, batch: Floats) -> Floats:
        """Return the statistical efficiency at each total batch size; same shape."""
        base = float(self.batch[0])
        return statistical_efficiency(np.interp(batch, self.batch, self.noise), np.maximum(batch, base), base)


@dataclass(frozen=True)
class BestBatch:
    """The batch at which a gang progresses fastest."""

    goodput: float  #: Samples of batch M0 per second
    batch_per_gpu: int  #: Samples a GPU takes at once
    accumulated: int  #: Passes before the one that synchronises


def best_batch(times: StepTimes, noise: NoiseScale, gpus: int) -> BestBatch:
    """Return the batch with the highest goodput for a gang.

    Candidates lie in geometric steps between M0 (or one smallest batch per GPU) and the largest batch. A lone GPU
    beyond M0 accumulates at least once, because the noise scale cannot be measured from a single batch.

    Args:
        times: Step times of this gang where it sits.
        noise: Noise at the job's present stage.
        gpus: Size of the gang, >= 1; its smallest batch must not exceed the largest allowed.

    Source: Pollux section 4.1.
    """
    base, largest = float(noise.batch[0]), float(noise.batch[-1])
    smallest_per_gpu, largest_per_gpu = float(times.batch_per_gpu[0]), float(times.batch_per_gpu[-1])
    total = np.geomspace(max(base, smallest_per_gpu * gpus), largest, CANDIDATES)
    per_gpu = total / gpus
    accumulated = np.ceil(per_gpu / largest_per_gpu - SLACK).astype(np.int64) - 1
    if gpus == 1:
        accumulated = np.where(per_gpu > base + SLACK, np.maximum(accumulated, 1), accumulated)
    at_once = np.ceil(per_gpu / (accumulated + 1) - SLACK).astype(np.int64)
    total = (gpus * at_once * (accumulated + 1)).astype(np.float64)
    goodput = times.throughput(gpus, at_once, accumulated) * noise.efficiency(total)
    goodput = np.where((at_once >= smallest_per_gpu) & (at_once <= largest_per_gpu), goodput, 0.0)
    best = int(goodput.argmax())
    return BestBatch(float(goodput[best]), int(at_once[best]), int(accumulated[best]))
