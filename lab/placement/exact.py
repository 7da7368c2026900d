"""The placement with the shortest iteration, as a mixed-integer linear programme.

A binary ``y[s, m, j]`` says that server ``m`` has ``j`` replicas of stage ``s``; with it, eq. 6, whose ``1/x`` is not
linear, becomes a sum over ``j``, and so does "the stage is on this server at all". The rest of a server's time is
linear in the counts ``n[c, m]`` of classes (see ``iteration``)::

    minimise T
    T >= sum over j >= 1 of load[s, j] y[s, m, j] - before[s] x[s-1, m] - after[s] x[s+1, m]      for all s, m
    x[s, m] = sum over j of j y[s, m, j] = sum over c in s of n[c, m],   sum over j of y[s, m, j] = 1
    sum over m of n[c, m] = replicas of c,   sum over c of width[c] n[c, m] <= free[m]

The bound needs no big-M constant: a stage that is not on a server has 0 >= something not above 0. With expert groups
each class adds ``alone[c] z[c, m] - saved[c] (n[c, m] - z[c, m])`` with a binary ``z[c, m] >= n[c, m] / replicas``.

Source: A-SRPT section V-B (2-e), which names the programme but does not print it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.solving import Backend, SolveStatus
from services.core.parallel.iteration import IterationModel
from services.core.solvers.model import LinearModel, ModelBuilder
from services.core.solvers.solve import solve

RELATIVE_GAP = 1e-6


@dataclass(frozen=True)
class Exact:
    """The programme's solution: (n_classes, n_servers) counts, and whether it is proven to be optimal."""

    counts: Ints
    proven: bool
    note: str


def exact(
    model: IterationModel,
    servers: Ints,
    start: Ints,
    *,
    backend: Backend | str = Backend.HIGHS,
    time_limit_s: float | None = None,
) -> Exact:
    """Return the best placement found, which is ``start`` if the solver found none that is faster.

    Args:
        servers: (n_servers,) free GPUs.
        start: (n_classes, n_servers) a placement that fits; its time bounds the search.
        time_limit_s: As for ``solve``.
    """
    known_s = float(model.time_s(start))
    programme, counted = _programme(model, servers, known_s)
    solution = solve(programme, backend, time_limit_s=time_limit_s, relative_gap=RELATIVE_GAP)
    proven = solution.status is SolveStatus.OPTIMAL
    said = [solution.note, "" if proven else f"not proven: the solver ended with {solution.status.value}"]
    note = "; ".join(each for each in said if each)
    if solution.values is None:
        return Exact(start, proven, note)
    found = np.rint(solution.values[counted]).astype(np.int64)
    return Exact(found if float(model.time_s(found)) < known_s else start, proven, note)


def _programme(model: IterationModel, servers: Ints, known_s: float) -> tuple[LinearModel, Ints]:
    """Return the programme, and the columns of ``n``: (n_classes, n_servers). Times are in units of ``known_s``."""
    graph = model.graph
    n_servers = servers.size
    build = ModelBuilder()
    unit = known_s if known_s > 0 else 1.0
    longest = build.add_variables(1, upper=known_s / unit, cost=1.0)[0]
    most = np.minimum(graph.class_replicas[:, None], servers[None, :] // graph.class_size[:, None])
    n = build.add_variables(most.size, upper=most.ravel(), integer=True).reshape(most.shape)
    classes, sites = np.indices(n.shape)
    build.add_rows(len(n), (classes.ravel(), n.ravel(), 1.0), lower=graph.class_replicas, upper=graph.class_replicas)
    widths = np.broadcast_to(graph.class_size[:, None], n.shape)
    build.add_rows(n_servers, (sites.ravel(), n.ravel(), widths.ravel()), upper=servers)
    alone, saved = model.expert_alone, model.expert_saved
    for stage in range(len(graph.stages)):
        own = np.flatnonzero(graph.stage_of_class == stage)
        before = np.flatnonzero(graph.stage_of_class == stage - 1)
        after = np.flatnonzero(graph.stage_of_class == stage + 1)
        load, saved_before, saved_after = model.load[stage, 1:], model.saved_before[stage], model.saved_after[stage]
        for server in range(n_servers):
            highest = min(graph.stages[stage].replicas, int(servers[server]) // graph.stages[stage].tensor_parallel)
            y = build.add_variables(highest + 1, upper=1.0, integer=True)
            build.add_rows(1, (0, y, 1.0), lower=1.0, upper=1.0)
            counts = n[own, server]
            terms = np.concatenate((np.arange(highest + 1.0), np.full(counts.size, -1.0)))
            build.add_rows(1, (0, np.concatenate((y, counts)), terms), lower=0.0, upper=0.0)
            columns = [np.array([longest]), y[1:], n[before, server], n[after, server]]
            parts: list[Floats] = [
                np.array([unit]),
                -load[:highest],
                np.full(before.size, saved_before),
                np.full(after.size, saved_after),
            ]
            for each in own if alone[own].any() else own[:1]:
                row, values = columns, parts
                if alone[each]:
                    z = build.add_variables(1, upper=1.0, integer=True)
                    limit = [1.0, -float(graph.class_replicas[each])]
                    build.add_rows(1, ([0, 0], [n[each, server], z[0]], limit), upper=0.0)
                    row = [*columns, z, n[each, server][None]]
                    values = [*parts, -(alone[each] + saved[each])[None], saved[each][None]]
                found = np.concatenate(row)
                build.add_rows(1, (0, found, np.concatenate(values) / unit), lower=0.0)
    return build.build(), n
