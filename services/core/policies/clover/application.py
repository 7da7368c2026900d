"""An application's model variants and what was measured of them on slices."""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.layouts import SLICES


@dataclass(frozen=True)
class Application:
    """Variants of one model family on slices of one GPU model.

    Raises:
        DomainError: a variant fits no slice, or a number is out of range; the message names the variant.
    """

    variants: tuple[str, ...]  #: Their names
    accuracy: Floats  #: (variants,) per cent, above 0
    service_s: Floats
    """(variants, 5) mean service time of a request, NaN where the variant does not run: it was not measured there, or
    the slice's memory is too small."""
    jitter_s: Floats  #: (variants, 5) standard deviation of the service time
    busy_w: Floats  #: (variants, 5) the GPU's draw above idle while the instance works
    idle_w: float  #: Draw of a whole GPU while nothing runs on it

    def __post_init__(self) -> None:
        shape = (len(self.variants), len(SLICES))
        if not self.variants or not self.service_s.shape == self.jitter_s.shape == self.busy_w.shape == shape:
            raise DomainError("an application needs variants, and three numbers for each on each slice type")
        if not (np.isfinite(self.idle_w) and self.idle_w >= 0):
            raise DomainError("the idle draw of a GPU is a number of watts, at least 0")
        for name, accuracy, row in zip(self.variants, self.accuracy.tolist(), range(len(self.variants)), strict=True):
            here = self.fits[row]
            if not (np.isfinite(accuracy) and 0 < accuracy <= 100):
                raise DomainError(f"variant {name}: accuracy is a percentage above 0, not {accuracy:g}")
            if not here.any():
                raise DomainError(f"variant {name} fits no slice")
            if (self.service_s[row][here] <= 0).any():
                raise DomainError(f"variant {name}: a service time must be above 0")
            for numbers in (self.jitter_s[row][here], self.busy_w[row][here]):
                if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
                    raise DomainError(f"variant {name}: service times and watts are finite and at least 0")

    @property
    def fits(self) -> Bools:
        """(variants, 5) where an instance can run."""
        return np.isfinite(self.service_s)

    @property
    def best_variant(self) -> int:
        return int(np.argmax(self.accuracy))

    def base(self, gpus: int) -> ConfigGraph:
        """Return the default: the best variant on every GPU, uncut; ``DomainError`` if it does not run there."""
        if not self.fits[self.best_variant, -1]:
            raise DomainError(f"variant {self.variants[self.best_variant]} does not run on a whole GPU (7g)")
        weights = np.zeros(self.service_s.shape, dtype=np.int64)
        weights[self.best_variant, -1] = gpus
        return ConfigGraph(weights)

    def capacity_per_s(self, weights: Ints) -> float:
        """Return how many requests per second these instances (variants, 5) can serve."""
        there = weights > 0
        return float((weights[there] / self.service_s[there]).sum())
