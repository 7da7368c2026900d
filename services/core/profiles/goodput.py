"""Goodput: how fast a training job really progresses, which is its throughput times what each sample is worth.

A larger batch uses GPUs better (throughput, samples/s) but teaches less per sample (statistical efficiency). With the
gradient noise scale ``phi`` and the batch ``M0`` the user chose, a batch ``M`` is worth

    EFFICIENCY(M) = (phi + M0) / (phi + M),    GOODPUT(M) = THROUGHPUT(M) * EFFICIENCY(M)

in samples of batch ``M0``.

Source: Qiao et al., Pollux, OSDI'21, section 3.
"""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints

CANDIDATES = 50  #: Batch sizes tried between the least and the largest, as in the authors' implementation


def statistical_efficiency(noise_scale: Floats | float, batch: Floats | float, base_batch: float) -> Floats:
    """Return what a sample of each batch is worth, in samples of the base batch: 1 at the base batch, less beyond.

    Args:
        noise_scale: Gradient noise scale, samples; > 0. Broadcast with ``batch``.
        batch: Total batch sizes, samples; >= ``base_batch``.
        base_batch: M0, samples.
    """
    return np.asarray((noise_scale + base_batch) / (noise_scale + np.asarray(batch, dtype=np.float64)))


@dataclass(frozen=True)
class StepTable:
    """How long one training step takes, by size of the gang and total batch.

    Linear between known points, and proportional to the batch beyond the largest one.
    """

    gpus: Ints  #: (n_sizes,) ascending
    batch: Floats  #: (n_batches,) total batch sizes, samples, ascending
    step_s: Floats  #: (n_sizes, n_batches) times in any unit, since only their ratios count

    def at(self, gpus: int, batch: Floats) -> Floats:
        """Return the step times of gangs of one size at these total batches: (n,)."""
        columns: list[Floats] = list(self.step_s.T)
        by_batch = np.array([float(np.interp(gpus, self.gpus, column)) for column in columns])
        return np.interp(batch, self.batch, by_batch) * np.maximum(batch / self.batch[-1], 1.0)


def best_batches(
    times: StepTable, noise_scale: float, base: float, permitted: tuple[int, int], sizes: int
) -> tuple[Ints, Floats, Floats]:
    """Return the batch with the highest goodput at 1, 2, ... GPUs among those that the user permits, and that goodput.

    Batches that the gang divides evenly are preferred; every GPU has at least one sample if the user's largest batch
    allows that.

    Args:
        times: Step times of the job's gangs.
        noise_scale: Gradient noise scale, samples; > 0.
        base: M0, samples.
        permitted: The smallest and the largest total batch, samples.
        sizes: How many gang sizes.

    Returns:
        (sizes,) total batches, samples; (sizes,) goodput, in samples of batch M0 per unit of time; (sizes,) that
        goodput relative to the one at batch M0.

    Source: Pollux section 3, with the user's own range.
    """
    low, high = permitted
    tried = np.unique(np.geomspace(low, high, CANDIDATES).round().astype(np.int64))
    batches, goodput, gain = np.empty(sizes, dtype=np.int64), np.empty(sizes), np.empty(sizes)
    own = np.array([base])
    for gpus in range(1, sizes + 1):
        even = np.maximum(tried // gpus, 1) * gpus
        even = even[(even >= low) & (even <= high)]
        some = even if even.size else np.clip(tried, min(gpus, high), high)
        total = some.astype(np.float64)
        found = total / times.at(gpus, total) * statistical_efficiency(noise_scale, total, base)
        best = int(found.argmax())
        batches[gpus - 1], goodput[gpus - 1] = some[best], found[best]
        gain[gpus - 1] = found[best] / (base / float(times.at(gpus, own)[0]))
    return batches, goodput, gain


def batch_gain(times: StepTable, noise_scale: float, base: float, gpus: int, batch: float) -> float:
    """Return the goodput of a gang with a total batch relative to that with batch M0; args as for ``best_batches``."""
    own, chosen = np.array([base]), np.array([batch])
    efficiency = float(statistical_efficiency(noise_scale, chosen, base)[0])
    return batch * efficiency / float(times.at(gpus, chosen)[0]) / (base / float(times.at(gpus, own)[0]))
