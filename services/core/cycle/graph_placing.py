"""Placing by the job's graph: servers as A-SRPT's Algorithm 1 picks them, replicas by Heavy-Edge or better.

A job that would lose much by being spread (``COMM_HEAVY``) gets the fewest nodes; any other gang takes the nodes with
the fewest free devices first, and so leaves whole nodes to such jobs. A tensor group never spans nodes: a gang whose
groups do not fit waits. ``refined`` also tries gangs of the first kind on nodes with room to spare, because even shares
of more nodes can beat uneven shares of fewer. ``first-fit`` takes the first nodes with free devices whatever the job:
the paper's baselines use A-SRPT's mapping of replicas, but not its choice of servers.

A job without a graph is treated as pure data parallelism of a model of ``UNKNOWN_PARAMETER_BYTES``. A placement lists
nodes in the order of the first replica they hold, so that ranks, which are numbered in that order, follow the stages.

Source: A-SRPT section IV-C, lines 8 to 23 of Algorithm 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np

from services.core.cycle.levels import rooms, sums
from services.core.cycle.placing import FreeDevices, consolidated
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Ints
from services.core.domain.placement import Placement
from services.core.domain.solving import Method
from services.core.parallel.graph import JobGraph, data_parallel
from services.core.parallel.iteration import Network
from services.core.parallel.mapping import Mapper, vertices_of

COMM_HEAVY = 1.5
UNKNOWN_PARAMETER_BYTES = 4e8
"""A hundred million parameters; their size does not matter to where the replicas of one stage sit."""
SPARE_NODES = 2  #: How many nodes more than necessary are tried


class Servers(Enum):
    """Which servers a gang is offered first."""

    FULLEST = "those with the most free devices"
    EMPTIEST = "those with the fewest free devices"
    FIRST = "those with the lowest numbers"


def first_fit_placing(snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
    nodes = snapshot.nodes.gpu_model
    if gpus == 1:
        fits = np.flatnonzero((nodes == gpu_model) & (free.count > 0))
        return free.take([(int(fits[0]), 1)]) if fits.size else None
    found = seated(snapshot, job, gpus, gpu_model, free, method=Method.HEAVY_EDGE, servers=Servers.FIRST)
    return None if found is None else free.take(list(found.shares))


@dataclass(frozen=True)
class Seats:
    """Where a gang would sit: (node, GPU count) in the order of the first replica there, and its iteration time."""

    shares: tuple[tuple[int, int], ...]
    time_s: float


def seats(
    node_model: Ints, mapper: Mapper, gpu_model: int, count: Ints, method: Method, servers: Servers
) -> Seats | None:
    """Return the seats of a gang; None if its tensor groups do not fit whole.

    Args:
        node_model: (n_nodes,) the GPU model of each node.
        count: (n_nodes,) free devices.
        servers: Which servers it is offered first. On the fullest it gets the fewest nodes, or just one if that
            suffices.
    """
    gpus = mapper.graph.gpus
    nodes = np.flatnonzero((node_model == gpu_model) & (count > 0))
    counts = count[nodes]
    order = np.argsort(
        {Servers.FULLEST: -counts, Servers.EMPTIEST: counts, Servers.FIRST: nodes}[servers], kind="stable"
    )
    if servers is Servers.FULLEST:
        tightest = np.flatnonzero(counts >= gpus)
        if tightest.size:  # one node holds it all
            order = tightest[[counts[tightest].argmin()]]
    spare = SPARE_NODES if servers is Servers.FULLEST and method is Method.REFINED else 0
    ordered = counts[order]
    width = mapper.narrowest
    enough = int(np.searchsorted(np.cumsum(ordered // width * width), gpus)) + 1 + spare
    found = _found(mapper, tuple(ordered[:enough].tolist()), method, spare)
    if found is None and enough < ordered.size:  # groups of several widths leave gaps
        found = _found(mapper, tuple(ordered.tolist()), method, spare)
    if found is None:
        return None
    return Seats(tuple((int(nodes[order[at]]), taken) for at, taken in found.shares), found.time_s)


def seated(
    snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices, *, method: Method, servers: Servers
) -> Seats | None:
    """Return the seats of a gang among free devices: on the fullest servers, those of the narrowest domain."""
    graph = snapshot.graphs.get(snapshot.jobs.ids[job])
    for level, count in rooms(snapshot, job, gpus, gpu_model, free.count, narrows=servers is Servers.FULLEST):
        mapper = mapper_of(graph, gpus, snapshot.network.within(level))
        if (found := seats(snapshot.nodes.gpu_model, mapper, gpu_model, count, method, servers)) is not None:
            return found
    return None


def place_by_graph(
    snapshot: Snapshot,
    job: int,
    gpus: int,
    gpu_model: int,
    free: FreeDevices,
    *,
    method: Method,
    comm_heavy: float = COMM_HEAVY,
    accepts: Callable[[float, Seats], bool] | None = None,
) -> Placement | None:
    """Take devices for one gang as its graph requires; None: it waits, and nothing was taken.

    Args:
        accepts: Whether a communication-heavy gang takes the seats it is offered, given the iteration time of the best;
            None if it always does.
    """
    if gpus == 1:
        return consolidated(snapshot, job, gpus, gpu_model, free)
    mapper = mapper_of(snapshot.graphs.get(snapshot.jobs.ids[job]), gpus, snapshot.network)
    least_s = best_s(snapshot, mapper, gpu_model)
    servers = Servers.FULLEST if extremes_s(mapper)[1] >= comm_heavy * least_s else Servers.EMPTIEST
    found = seated(snapshot, job, gpus, gpu_model, free, method=method, servers=servers)
    if found is None or (servers is Servers.FULLEST and accepts is not None and not accepts(least_s, found)):
        return None
    return free.take(list(found.shares))


@lru_cache(maxsize=1 << 12)
def mapper_of(graph: JobGraph | None, gpus: int, network: Network) -> Mapper:
    """Return the mapper of a job at a gang size; ``graph`` is None where nothing is known about it."""
    return Mapper(data_parallel(gpus, UNKNOWN_PARAMETER_BYTES) if graph is None else graph.sized(gpus), network)


@lru_cache(maxsize=1 << 12)
def extremes_s(mapper: Mapper) -> tuple[float, float]:
    """Return the estimated best and worst iteration times, ``alpha~min`` and ``alpha_max``.

    Both are infinite if a tensor group fits no server.
    """
    if int(mapper.graph.size.max()) > mapper.model.network.server_gpus:
        return np.inf, np.inf
    return mapper.least_s(), mapper.model.worst_s


def best_s(snapshot: Snapshot, mapper: Mapper, gpu_model: int) -> float:
    """Return the estimated best iteration time of a gang: within the narrowest level with a domain that is as large."""
    nodes, network = snapshot.nodes, mapper.model.network
    count: Ints = np.where(nodes.schedulable & (nodes.gpu_model == gpu_model), nodes.gpus, 0)
    for level, _ in enumerate(network.within_bytes_per_s):
        if int(sums(nodes.domains[:, level], count).max(initial=0)) >= mapper.graph.gpus:
            return extremes_s(mapper_of(mapper.graph, mapper.graph.gpus, network.within(level)))[0]
    return extremes_s(mapper)[0]


def servers_for(mapper: Mapper) -> Servers:
    """Return a gang's servers: the fullest, if its worst placement takes ``COMM_HEAVY`` times its best or longer."""
    least_s, worst_s = extremes_s(mapper)
    return Servers.FULLEST if worst_s >= COMM_HEAVY * least_s else Servers.EMPTIEST


@lru_cache(maxsize=1 << 14)
def _found(mapper: Mapper, counts: tuple[int, ...], method: Method, spare: int) -> Seats | None:
    """Return how many GPUs each server gives; None if the gang waits."""
    width = mapper.narrowest
    room = np.array(counts, dtype=np.int64) // width * width
    enough = np.flatnonzero(np.cumsum(room) >= mapper.graph.gpus)
    if not enough.size:
        return None
    fewest = int(enough[0]) + 1
    best: Ints | None = None
    best_s = np.inf
    for end in range(fewest, len(counts) + 1):
        if best is not None and end > fewest + spare:
            break
        cut = room[:end].copy()
        cut[-1] = max(int(cut[-1]) - (int(cut.sum()) - mapper.graph.gpus), 0)
        for servers in (cut, room[:end]):  # the second where groups of several widths need it, or it is faster
            placed = mapper.counts(servers, method)
            if placed is not None and (time_s := float(mapper.model.time_s(placed))) < best_s * (1 - 1e-9):
                best, best_s = placed, time_s
            if best is not None and not spare:
                break
    if best is None:
        return None
    taken = mapper.graph.class_size @ best
    first = np.unique(vertices_of(best), return_index=True)
    return Seats(tuple((at, int(taken[at])) for at in first[0][np.argsort(first[1])].tolist()), best_s)
