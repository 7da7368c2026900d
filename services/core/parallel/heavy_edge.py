"""Heavy-Edge: servers are filled one by one, each time with the replica on the heaviest edge to those already there.

Servers are taken by free GPUs, most first. One whose GPUs the rest of the job fills exactly takes the rest; one with a
single GPU takes the replica of least total edge weight; any other begins with an end of the heaviest edge left and
grows along the heaviest edges. Ties go to the lowest vertex. Without an edge to follow, the paper takes a random
replica and we take the lowest, so that equal input gives equal placements.

Section VI: a tensor group is one vertex of several GPUs, so that it cannot be split. A server then takes only replicas
that still fit. If the greedy method leaves some that fit nowhere, all are placed widest first, whatever their edges,
which succeeds whenever possible as long as each width divides the next.

Source: A-SRPT section IV-B.
"""

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.parallel.edges import Edges
from services.core.parallel.graph import JobGraph


def heavy_edge(graph: JobGraph, edges: Edges, servers: Ints) -> Ints | None:
    """Return the server of each replica: (n_vertices,), or None if tensor groups do not fit.

    ``servers``: (n_servers,) free GPUs; together at least the job's.
    """
    greedy = _Greedy(graph, edges)
    for server in np.argsort(-servers, kind="stable").tolist():
        if not greedy.left:
            break
        greedy.fill(server, int(servers[server]))
    return greedy.server if not greedy.left else _widest_first(graph.size, servers)


class _Greedy:
    """The assignment in progress. ``_reach`` is the heaviest edge from each free vertex to the server being filled."""

    def __init__(self, graph: JobGraph, edges: Edges) -> None:
        self._graph = graph
        self._size: list[int] = graph.size.tolist()
        self._first: list[int] = graph.first.tolist()
        self._stage: list[int] = np.repeat(np.arange(len(graph.stages)), np.diff(graph.first)).tolist()
        self._between: list[float] = edges.between.tolist()
        self._neighbours = _neighbours(edges, len(self._size))
        self._degree = _degrees(graph, edges)
        heaviest = np.argsort(-edges.weights, kind="stable")
        self._listed: list[list[int]] = edges.ends[heaviest].tolist()
        self._listed_weights: list[float] = edges.weights[heaviest].tolist()
        self._pairs = sorted(range(len(self._between)), key=lambda stage: -self._between[stage])
        self._next_listed = self._next_pair = 0
        self._unplaced: list[int] = [stage.replicas for stage in graph.stages]
        self._widest = max(self._size)
        self._reach: Floats = np.zeros(len(self._size))
        self.server: Ints = np.full(len(self._size), -1, dtype=np.int64)
        self.left = graph.gpus

    def fill(self, server: int, room: int) -> None:
        """Fill a server with as many replicas as it has room for."""
        free = self.server < 0
        if room == self.left:
            self.server[free] = server
            self.left = 0
            return
        self._reach[free] = 0.0
        if room == 1:
            lightest = np.where(free & (self._graph.size == 1), self._degree, np.inf)
            vertex = int(lightest.argmin())
            if np.isfinite(lightest[vertex]):
                self._take(vertex, server)
            return
        vertex = self._end_of_heaviest()
        if vertex < 0 or self._size[vertex] > room:
            vertex = self._first_that_fits(room)
        while vertex >= 0:
            self._take(vertex, server)
            room -= self._size[vertex]
            if not room or not self.left:
                return
            reach = self._reach if room >= self._widest else np.where(self._graph.size <= room, self._reach, -np.inf)
            vertex = int(reach.argmax())
            if not reach[vertex] > 0:
                vertex = self._first_that_fits(room)

    def _take(self, vertex: int, server: int) -> None:
        reach, stage = self._reach, self._stage[vertex]
        self.server[vertex] = server
        self._unplaced[stage] -= 1
        self.left -= self._size[vertex]
        for other, weight in self._neighbours[vertex]:
            if -np.inf < reach[other] < weight:  # free, and this is its heaviest edge yet
                reach[other] = weight
        for other, weight_at in ((stage - 1, stage - 1), (stage + 1, stage)):
            if 0 <= other < len(self._unplaced) and self._unplaced[other]:
                ends = slice(self._first[other], self._first[other + 1])
                np.maximum(reach[ends], self._between[weight_at], out=reach[ends], where=reach[ends] >= 0)
        reach[vertex] = -np.inf

    def _end_of_heaviest(self) -> int:
        """Return the lower end of the heaviest edge between free vertices, or -1; edges once used up stay used up."""
        while self._next_listed < len(self._listed):
            if all(self.server[end] < 0 for end in self._listed[self._next_listed]):
                break
            self._next_listed += 1
        while self._next_pair < len(self._pairs):
            stage = self._pairs[self._next_pair]
            if self._unplaced[stage] and self._unplaced[stage + 1]:
                break
            self._next_pair += 1
        listed = self._listed_weights[self._next_listed] if self._next_listed < len(self._listed) else 0.0
        paired = self._between[self._pairs[self._next_pair]] if self._next_pair < len(self._pairs) else 0.0
        if max(listed, paired) <= 0:
            return -1
        if listed >= paired:
            return self._listed[self._next_listed][0]
        stage = self._pairs[self._next_pair]
        return self._first[stage] + int((self.server[self._first[stage] : self._first[stage + 1]] < 0).argmax())

    def _first_that_fits(self, room: int) -> int:
        fits = (self.server < 0) & (self._graph.size <= room)
        vertex = int(fits.argmax())
        return vertex if fits[vertex] else -1


def _neighbours(edges: Edges, vertices: int) -> list[list[tuple[int, float]]]:
    found: list[list[tuple[int, float]]] = [[] for _ in range(vertices)]
    ends: list[tuple[int, int]] = edges.ends.tolist()
    for (a, b), weight in zip(ends, edges.weights.tolist(), strict=True):
        found[a].append((b, weight))
        found[b].append((a, weight))
    return found


def _degrees(graph: JobGraph, edges: Edges) -> Floats:
    """Return the total weight of each vertex's edges: (n_vertices,)."""
    k = np.array([stage.replicas for stage in graph.stages], dtype=np.float64)
    per_stage = np.zeros(len(k))
    per_stage[1:] += edges.between * k[:-1]
    per_stage[:-1] += edges.between * k[1:]
    degree = np.repeat(per_stage, np.diff(graph.first))
    for end in (0, 1):
        degree += np.bincount(edges.ends[:, end], edges.weights, minlength=degree.size)
    return degree


def _widest_first(size: Ints, servers: Ints) -> Ints | None:
    room = servers.copy()
    server = np.full(size.size, -1, dtype=np.int64)
    for vertex in np.argsort(-size, kind="stable").tolist():
        at = int(room.argmax())
        if room[at] < size[vertex]:
            return None
        room[at] -= size[vertex]
        server[vertex] = at
    return server
