"""Place a job's replicas on given free GPUs, by a chosen method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from services.core.domain.arrays import Ints
from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend, Method
from services.core.parallel.edges import Edges, cut_bytes, edges_of
from services.core.parallel.graph import JobGraph
from services.core.parallel.heavy_edge import heavy_edge
from services.core.parallel.iteration import IterationModel, Network
from services.core.parallel.refine import refine


@dataclass(frozen=True)
class Mapping:
    """A placement of a job's replicas."""

    server: Ints  #: (n_vertices,) the server of each replica
    iteration_time_s: float  #: Iteration time by eq. 7.
    cut_bytes: float  #: Weight of the edges between servers, bytes per iteration
    proven: bool = False  #: Whether no placement is faster
    note: str = ""  #: What a reader should know about the solve


class Mapper:
    """Maps one job onto whatever is free; the job's graph, edges and time model are built only once."""

    def __init__(self, graph: JobGraph, network: Network) -> None:
        self.graph = graph
        self.model = IterationModel(graph, network)
        self.edges: Edges = edges_of(graph)
        self.narrowest = int(graph.size.min())  #: GPUs of its smallest replica

    def counts(self, servers: Ints, method: Method) -> Ints | None:
        """Return replicas by class and server, (n_classes, n_servers), or None if tensor groups do not fit.

        ``servers``: (n_servers,) free GPUs. Not for ``Method.ILP``, which takes seconds rather than milliseconds.
        """
        server = heavy_edge(self.graph, self.edges, servers)
        if server is None:
            return None
        counts = counts_of(self.graph, server, servers.size)
        return counts if method is Method.HEAVY_EDGE else refine(self.model, counts, servers)

    def map(
        self,
        servers: ArrayLike,
        method: Method | str,
        *,
        backend: Backend | str = Backend.HIGHS,
        time_limit_s: float | None = None,
    ) -> Mapping:
        """Return the placement on servers with these numbers of free GPUs.

        Args:
            servers: (n_servers,) free GPUs of each, at least 0.
            time_limit_s: For the solver of ``Method.ILP``; None for no limit.

        Raises:
            DomainError: an unknown method, too few GPUs, or a tensor group that fits on no server.
        """
        if method not in set(Method):
            raise DomainError(f"there is no placement method {method!r}; known: {', '.join(Method)}")
        free = np.asarray(servers, dtype=np.int64)
        if free.ndim != 1 or (free < 0).any():
            raise DomainError("the servers are a list of free GPUs, each at least 0")
        if int(free.sum()) < self.graph.gpus:
            raise DomainError(f"the job needs {self.graph.gpus} GPUs, the servers have {int(free.sum())} free")
        greedy = heavy_edge(self.graph, self.edges, free)
        if greedy is None:
            raise DomainError(f"tensor groups of {int(self.graph.size.max())} GPUs do not fit the free GPUs whole")
        counts = counts_of(self.graph, greedy, free.size)
        if method == Method.HEAVY_EDGE:
            return self._mapping(greedy, counts)
        counts = refine(self.model, counts, free)
        if method == Method.REFINED:
            return self._mapping(vertices_of(counts), counts)
        from services.core.parallel.exact import exact  # a solver's package, which only its users pay for

        best = exact(self.model, free, counts, backend=backend, time_limit_s=time_limit_s)
        server = vertices_of(best.counts)
        return self._mapping(server, best.counts, proven=best.proven, note=best.note)

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

    def _mapping(self, server: Ints, counts: Ints, *, proven: bool = False, note: str = "") -> Mapping:
        time_s = float(self.model.time_s(counts))
        return Mapping(server, time_s, cut_bytes(self.graph, self.edges, server), proven, note)


def counts_of(graph: JobGraph, server: Ints, servers: int) -> Ints:
    """Return replicas by class and server, (n_classes, servers), from the server of each replica."""
    classes = len(graph.stage_of_class)
    flat = np.bincount(graph.class_of * servers + server, minlength=classes * servers)
    return flat.reshape(classes, servers)


def vertices_of(counts: Ints) -> Ints:
    """Return the server of each replica, (n_vertices,), from counts: neighbours within a class stay together."""
    servers: Ints = np.indices(counts.shape)[1]
    return np.repeat(servers.ravel(), counts.ravel())
