"""A configuration as a bipartite graph between model variants and slice types, its distance and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.core.domain.arrays import Bools, Ints
from services.core.domain.errors import DomainError
from services.core.policies.clover.layouts import SLICES, SliceCounts, can_be_cut

GED_THRESHOLD = 4  #: Graphs within this distance are neighbours (§4.2)
_TRIES = 10_000


@dataclass(frozen=True, eq=False)
class ConfigGraph:
    """A Clover configuration graph (Definition 1)."""

    weights: Ints  #: (variants, 5) instances of a variant on slices of a type; an edge of weight 0 is absent

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or self.weights.shape[1] != len(SLICES) or (self.weights < 0).any():
            raise DomainError(f"a configuration has {len(SLICES)} counts of at least 0 per variant")

    @cached_property
    def key(self) -> bytes:
        return self.weights.astype(np.int64).tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigGraph) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def instances(self) -> int:
        return int(self.weights.sum())

    @property
    def slices(self) -> SliceCounts:
        """The number of slices of each type that it needs."""
        ones, twos, threes, fours, sevens = self.weights.sum(axis=0).tolist()
        return ones, twos, threes, fours, sevens

    def distance(self, other: ConfigGraph) -> int:
        """Return the graph edit distance on weights: the weight removed plus the weight added (§4.2, Figure 7)."""
        return int(np.abs(self.weights - other.weights).sum())


def random_neighbour(graph: ConfigGraph, fits: Bools, gpus: int, rng: np.random.Generator) -> ConfigGraph:
    """Return a graph at most a neighbour's distance from ``graph``, but not equal to it, that can be cut from the GPUs.

    One to four unit edits: some instances are removed at random, and some are added where they fit, (variants, 5).

    Raises:
        DomainError: none was found, because nothing fits.
    """
    cells = np.flatnonzero(fits)
    centre = graph.weights.ravel()
    instances = np.repeat(np.arange(centre.size), centre)
    if not cells.size:
        raise DomainError("no variant fits any slice")
    for _ in range(_TRIES):
        edits = int(rng.integers(1, GED_THRESHOLD + 1))
        removed = min(int(rng.integers(0, edits + 1)), instances.size)
        weights = centre.copy()
        for cell in rng.permutation(instances)[:removed].tolist():
            weights[cell] -= 1
        for cell in cells[rng.integers(0, cells.size, edits - removed)].tolist():
            weights[cell] += 1
        found = ConfigGraph(weights.reshape(graph.weights.shape))
        if found.instances and found != graph and can_be_cut(found.slices, gpus):
            return found
    raise DomainError("no neighbouring configuration was found")
