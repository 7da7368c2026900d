"""A bounded local search that shortens the iteration of a placement.

It begins from the given placement, and from the best of some hundred others: servers filled in some order, with the
stages in the order of the chain or in another. From each it descends. The iteration takes as long as the slowest
server, and a server's time depends only on its own replicas. So a step looks at one slowest server: exchanges of up to
``MOST_AT_ONCE`` of its replicas of a class with as many elsewhere, or with free GPUs, are timed together, and the one
that leaves the two servers fastest is made if both are then faster than the slowest. The number of slowest servers
falls with each step, so a descent ends. The orders are drawn from a fixed seed: equal input gives equal placements.
"""

import numpy as np

from services.core.domain.arrays import Ints
from services.core.parallel.iteration import IterationModel

WORK = 4_000_000  #: Table look-ups all descents together may spend: some tens of milliseconds
ORDERS_WORK = 400_000
ORDERS = 256
DESCENTS = 4
MOST_AT_ONCE = 3


def refine(model: IterationModel, counts: Ints, servers: Ints) -> Ints:
    """Return a placement, (n_classes, n_servers) like ``counts``, whose iteration takes no longer."""
    candidates = [counts]
    if counts.shape[1] > 1:
        drawn = _orders(model, servers)
        candidates += [drawn[at] for at in np.argsort(model.time_s(drawn), kind="stable")[: DESCENTS - 1]]
    ends = [_descend(model, each, servers, WORK // len(candidates)) for each in candidates]
    times = model.time_s(np.stack(ends))
    return ends[int(times.argmin())]


def _orders(model: IterationModel, servers: Ints) -> Ints:
    """Return placements that fill servers one after another: (n, n_classes, n_servers); none if widths differ."""
    graph = model.graph
    classes, sites = len(graph.stage_of_class), servers.size
    width = int(graph.size[0])
    slots = servers // width
    if (graph.size != width).any() or int(slots.sum()) < graph.size.size:
        return np.empty((0, classes, sites), dtype=np.int64)
    n = max(4, min(ORDERS, ORDERS_WORK // (classes * sites)))
    random = np.random.default_rng(0)
    by_server = random.random((n, sites)).argsort(axis=1)
    by_server[0] = np.argsort(-slots, kind="stable")
    by_server[1] = by_server[0][::-1]
    by_class = np.tile(np.arange(classes), (n, 1))
    by_class[n // 2 :] = random.random((n - n // 2, classes)).argsort(axis=1)
    where = np.repeat(by_server.ravel(), slots[by_server].ravel()).reshape(n, -1)[:, : graph.size.size]
    what = np.repeat(by_class.ravel(), graph.class_replicas[by_class].ravel()).reshape(n, -1)
    at = (np.arange(n)[:, None] * classes + what) * sites + where
    return np.bincount(at.ravel(), minlength=n * classes * sites).reshape(n, classes, sites)


def _descend(model: IterationModel, counts: Ints, servers: Ints, work: int) -> Ints:
    counts = counts.copy()
    sizes = model.graph.class_size
    room = servers - sizes @ counts
    times = model.server_times(counts)
    while work > 0:
        slowest = int(times.argmax())
        out, into, other, many = _exchanges(counts, sizes, room, slowest)
        if not out.size:
            break
        here = np.repeat(counts[:, slowest, None], out.size, axis=1)
        there = counts[:, other]
        _exchange(here, there, out, into, many)
        after = model.server_times(np.stack((here, there)))
        work -= 2 * here.size
        best = int(after.max(axis=0).argmin())
        if not after[:, best].max() < times[slowest] * (1 - 1e-12):
            break
        counts[:, slowest], counts[:, other[best]] = here[:, best], there[:, best]
        room = servers - sizes @ counts
        times[slowest], times[other[best]] = after[:, best]
    return counts


def _exchanges(counts: Ints, sizes: Ints, room: Ints, server: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return which class may leave a server, which may replace it, from which server, and how many: four of (n,).

    -1 stands for free GPUs, which are assumed to be plentiful; exchanges that do not fit are left out.
    """
    leave = np.append(np.flatnonzero(counts[:, server]), -1)
    come_from, come = np.nonzero(counts.T)
    open_servers = np.flatnonzero(room)
    come_from = np.concatenate((come_from, open_servers))
    come = np.concatenate((come, np.full(open_servers.size, -1)))
    many, out, at = (
        grid.ravel() for grid in np.meshgrid(np.arange(1, MOST_AT_ONCE + 1), leave, np.arange(come.size), indexing="ij")
    )
    into, other = come[at], come_from[at]
    width = np.append(sizes, 0)
    gain = many * (width[into] - width[out])
    enough = np.vstack((counts, np.full((1, counts.shape[1]), MOST_AT_ONCE)))
    there = (enough[out, server] >= many) & (enough[into, other] >= many)
    fits = (other != server) & (out != into) & there & (gain <= room[server]) & (-gain <= room[other])
    return out[fits], into[fits], other[fits], many[fits]


def _exchange(here: Ints, there: Ints, out: Ints, into: Ints, many: Ints) -> None:
    """Make each exchange in its own column of both arrays: (n_classes, n)."""
    column = np.arange(out.size)
    for replica, source, target in ((out, here, there), (into, there, here)):
        real = replica >= 0
        source[replica[real], column[real]] -= many[real]
        target[replica[real], column[real]] += many[real]
