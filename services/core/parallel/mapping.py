"""Place a job's replicas on given free GPUs: by Heavy-Edge, or refined."""

import numpy as np

from services.core.domain.arrays import Ints
from services.core.domain.errors import DomainError
from services.core.domain.solving import Method
from services.core.parallel.edges import Edges, edges_of
from services.core.parallel.graph import JobGraph
from services.core.parallel.heavy_edge import heavy_edge
from services.core.parallel.iteration import IterationModel, Network
from services.core.parallel.refine import refine


class Mapper:
    """Maps one job onto whatever is free; the job's graph, edges and time model are built only once."""

    def __init__(self, graph: JobGraph, network: Network) -> None:
        self.graph = graph
        self.model = IterationModel(graph, network)
        self.edges: Edges = edges_of(graph)
        self.narrowest = int(graph.size.min())  #: GPUs of its smallest replica

    def counts(self, servers: Ints, method: Method) -> Ints | None:
        """Return replicas by class and server, (n_classes, n_servers), or None if tensor groups do not fit.

        ``servers``: (n_servers,) free GPUs.
        """
        server = heavy_edge(self.graph, self.edges, servers)
        if server is None:
            return None
        counts = counts_of(self.graph, server, servers.size)
        return counts if method is Method.HEAVY_EDGE else refine(self.model, counts, servers)

    def least_s(self) -> float:
        """Return the paper's estimate of the shortest iteration: Heavy-Edge on as few whole servers as hold the job.

        Source: section IV-B, ``alpha~min``.
        """
        g, sizes = self.model.network.server_gpus, self.graph.size
        if int(sizes.max()) > g:
            raise DomainError(f"a tensor group of {int(sizes.max())} GPUs does not fit a server of {g}")
        whole, rest = divmod(self.graph.gpus, g)
        servers = np.array([g] * whole + [rest] * (rest > 0), dtype=np.int64)
        counts = self.counts(servers, Method.HEAVY_EDGE)
        if counts is None:  # tensor groups leave gaps
            counts = self.counts(np.full(len(sizes), g, dtype=np.int64), Method.HEAVY_EDGE)
        assert counts is not None
        return float(self.model.time_s(counts))


def counts_of(graph: JobGraph, server: Ints, servers: int) -> Ints:
    """Return replicas by class and server, (n_classes, servers), from the server of each replica."""
    classes = len(graph.stage_of_class)
    flat = np.bincount(graph.class_of * servers + server, minlength=classes * servers)
    return flat.reshape(classes, servers)


def vertices_of(counts: Ints) -> Ints:
    """Return the server of each replica, (n_vertices,), from counts: neighbours within a class stay together."""
    servers: Ints = np.indices(counts.shape)[1]
    return np.repeat(servers.ravel(), counts.ravel())
