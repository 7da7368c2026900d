"""A job's replicas on given free GPUs by a chosen method, and how good that is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike

from lab.placement.exact import exact
from services.core.domain.arrays import Ints
from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend
from services.core.parallel import mapping
from services.core.parallel.edges import Edges
from services.core.parallel.graph import JobGraph
from services.core.parallel.heavy_edge import heavy_edge
from services.core.parallel.mapping import counts_of, vertices_of
from services.core.parallel.refine import refine


class Method(StrEnum):
    """How a placement is found."""

    HEAVY_EDGE = "heavy-edge"  #: The paper's greedy cut
    REFINED = "refined"  #: The greedy cut, then exchanges while they shorten the iteration; never longer than it
    ILP = "ilp"  #: The least iteration time, by a mixed-integer programme; never longer than ``refined``


@dataclass(frozen=True)
class Mapping:
    """A placement of a job's replicas."""

    server: Ints  #: (n_vertices,) the server of each replica
    iteration_time_s: float  #: Iteration time by eq. 7.
    cut_bytes: float  #: Weight of the edges between servers, bytes per iteration
    proven: bool = False  #: Whether no placement is faster
    note: str = ""  #: What a reader should know about the solve


class Mapper(mapping.Mapper):
    """Maps one job onto whatever is free, and says how long its iterations take there."""

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
        best = exact(self.model, free, counts, backend=backend, time_limit_s=time_limit_s)
        server = vertices_of(best.counts)
        return self._mapping(server, best.counts, proven=best.proven, note=best.note)

    def _mapping(self, server: Ints, counts: Ints, *, proven: bool = False, note: str = "") -> Mapping:
        time_s = float(self.model.time_s(counts))
        return Mapping(server, time_s, cut_bytes(self.graph, self.edges, server), proven, note)


def cut_bytes(graph: JobGraph, edges: Edges, server: Ints) -> float:
    """Return the bytes per iteration on edges whose ends sit on different servers; ``server``: (n_vertices,)."""
    a, b = edges.ends[:, 0], edges.ends[:, 1]
    cut = float(edges.weights[server[a] != server[b]].sum())
    servers = int(server.max()) + 1
    counts = [
        np.bincount(server[start:end], minlength=servers)
        for start, end in zip(graph.first[:-1].tolist(), graph.first[1:].tolist(), strict=True)
    ]
    for weight, here, there in zip(edges.between.tolist(), counts[:-1], counts[1:], strict=True):
        apart = int(here.sum()) * int(there.sum()) - int((here * there).sum())
        cut += weight * apart
    return cut
