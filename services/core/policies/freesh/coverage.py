"""Which instances may serve the requests of which regions, and the throughput that this requires.

Requests of a class come from *regions*, each with its share, and a region reaches the instances whose latency,
including the network's, keeps the class's limits. Demand can be divided among the instances so that every region is
served if and only if, for every set of regions, the instances that any of them reaches have the throughput for all of
them (max flow, min cut: Gale, 1957; Hall's condition for fractions). That takes one row for each set, and no variable
for each region and instance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from services.core.domain.arrays import Bools, Floats
from services.core.policies.freesh.pools import PoolProblem


@dataclass(frozen=True)
class Coverage:
    """Instances that together must have a given throughput."""

    request_class: int  #: Their class
    reached: Bools  #: (n_locations, n_modes) which instances
    needed_qps: float  #: Requests per second with head-room, from the regions that reach no others


def coverages(problem: PoolProblem, partition: int, wanted_qps: Floats) -> list[Coverage]:
    """Return what the instances of a partition must serve together; for each class, all of its demand comes first.

    Args:
        wanted_qps: (n_classes,) demand of all regions, with head-room.
    """
    part = problem.partitions[partition]
    reach, found = problem.reach_of(partition), list[Coverage]()
    for request_class, wanted in enumerate(wanted_qps.tolist()):
        usable = part.usable[request_class][None, :]
        regions = {
            region: reach[region, :, request_class, :] & usable
            for region, share in enumerate(problem.region_shares.tolist())
            if share > 0
        }
        found += _of_class(request_class, wanted, regions, problem.region_shares.tolist())
    return found


def _of_class(
    request_class: int, wanted_qps: float, regions: dict[int, Bools], shares: Sequence[float]
) -> list[Coverage]:
    """Return one row, that with the most demand, for each set of instances that some set of regions reaches."""
    alike: dict[bytes, tuple[Bools, float]] = {}
    for region, reached in regions.items():
        _, share = alike.get(reached.tobytes(), (reached, 0.0))
        alike[reached.tobytes()] = reached, share + shares[region]
    most: dict[bytes, tuple[Bools, float]] = {}
    for size in range(len(alike), 0, -1):
        for some in combinations(alike.values(), size):
            union = np.logical_or.reduce([reached for reached, _ in some])
            share = sum(each for _, each in some)
            if share > most.get(union.tobytes(), (union, 0.0))[1]:
                most[union.tobytes()] = union, share
    return [Coverage(request_class, reached, share * wanted_qps) for reached, share in most.values()]
