"""Equation 1 for one partition, as a linear model.

Exactly one partition is in use (equation 1f), so its binary variables need not be in a model: the best plan is the best
of the partitions' best plans. That is equation 1d without its product of variables.

Variables: integer numbers of instances ``x`` by location, class and mode, for the modes that may serve the class there;
``kept`` instances without requests, where some may not be stopped or stopping costs; starts and stops where they cost.

    minimise    sum of rate x power x step x (x, kept) + price x (starts, stops)
    subject to  sum of max_qps x over a class        >= head_room * greatest demand     (1b)
                the same over the instances that some regions reach, for their demand (``coverages``)
                sum of GPUs of (x, kept)             <= GPUs of a location and type     (1c)
                instances of each size               <= those of the ways in which its nodes are filled
                instances of a location and mode     >= those that may not be stopped
                starts >= instances - running,  stops >= running - instances

Where power follows the load, an instance costs its idle power, and each class's mean load ``y`` is divided among its
instances, ``y <= max_qps x``, at the cost of what they draw beyond that.

With negative rates, "frugal" means: while an instance of throughput ``L`` is in use at a negative rate, its class's
throughput is less than its demand plus ``L``, so that the instance could not be dropped. A binary variable for each
class and mode says "in use". The reading is ours; ``tests/unit/freesh/test_pools.py`` shows its effect. Which instances
could be dropped is less simple if regions reach different ones: there a negative rate counts as 0, and whatever is
needless is dropped afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.packing import patterns
from services.core.domain.serving import NegativeRates
from services.core.policies.freesh.pools import Coverage, PoolProblem, coverages
from services.core.solvers.model import LinearModel, ModelBuilder

STRICTLY = 1e-6  #: Share of an instance's throughput by which "less than" is kept: solvers know "at most" only


@dataclass(frozen=True)
class PoolModel:
    """The model of one partition, and how to read its solution."""

    model: LinearModel  #: To be minimised
    location: Ints  #: (n_columns,) those of the first variables, the instances; so are the next two
    request_class: Ints
    mode: Ints
    kept_location: Ints  #: (n_kept,) those of the variables that follow; so is the next one
    kept_mode: Ints
    lacking_qps: Ints  #: (n_classes,) variables of unserved demand, in a model of shortfall; else empty
    is_clipped: bool = False
    """Whether a negative rate was counted as 0, so that the model's bound does not bound the objective."""

    def instances(self, values: Floats, shape: tuple[int, int, int]) -> Ints:
        """Return the numbers of instances in a solution: ``shape`` is (n_locations, n_classes, n_modes)."""
        counts = np.zeros(shape, np.int64)
        counts[self.location, self.request_class, self.mode] = np.round(values[: self.location.size])
        return counts

    def kept(self, values: Floats, shape: tuple[int, int]) -> Ints:
        """Return the numbers of instances kept without requests: ``shape`` is (n_locations, n_modes)."""
        counts = np.zeros(shape, np.int64)
        first = self.location.size
        counts[self.kept_location, self.kept_mode] = np.round(values[first : first + self.kept_mode.size])
        return counts

    def start(self, instances: Ints, kept: Ints) -> Floats:
        """Return a plan as initial values, (n,); what follows from the instances is left to the solver."""
        values = np.zeros(self.model.variables)
        values[: self.location.size] = instances[self.location, self.request_class, self.mode]
        first = self.location.size
        values[first : first + self.kept_mode.size] = kept[self.kept_location, self.kept_mode]
        values[first + self.kept_mode.size :] = self.model.upper[first + self.kept_mode.size :]
        return np.clip(np.nan_to_num(values, posinf=0.0), self.model.lower, self.model.upper)


def pool_model(problem: PoolProblem, partition: int, wanted_qps: Floats, *, shortfall: bool = False) -> PoolModel:
    """Return the model of ``partition`` that serves ``wanted_qps`` (n_classes,), or the model of its least shortfall.

    The latter minimises the sum of the unserved shares of each class's demand, and nothing else: if requests per second
    counted instead, classes that are expensive to serve would get nothing.
    """
    part, most = problem.partitions[partition], problem.most
    frugal = problem.negative_rates is NegativeRates.FRUGAL
    needs = coverages(problem, partition, wanted_qps)
    served = np.zeros((most.shape[0], wanted_qps.size, most.shape[1]), np.bool_)
    for need in needs:
        served[:, need.request_class, :] |= need.reached
    served &= ((wanted_qps > 0) | (not frugal))[None, :, None]
    location, request_class, mode = np.nonzero(served & (most > 0)[:, None, :])
    kept_location, kept_mode = np.nonzero(_may_be_kept(problem) & (most > 0))
    qps, rate = part.max_qps[request_class, mode], problem.rate_sums[location]
    is_split = np.bincount([need.request_class for need in needs], minlength=wanted_qps.size) > 1
    clipped = frugal & is_split[request_class] & (rate < 0)
    rate = np.where(clipped, 0.0, rate)
    by_load_w = problem.by_load_w(partition)[request_class, mode]

    builder = ModelBuilder()
    upper = most[location, mode].astype(np.float64)
    if frugal and not is_split.any():  # more could be dropped
        upper = np.minimum(upper, np.ceil(wanted_qps[request_class] / qps))
    always_w = part.power_w[request_class, mode] - by_load_w
    cost = np.zeros(qps.size) if shortfall else problem.step_s * rate * always_w
    x = builder.add_variables(location.size, upper=upper, cost=cost, integer=True)
    kept = _add_kept(builder, problem, kept_location, kept_mode, free=shortfall)
    held = (np.concatenate([location, kept_location]), np.concatenate([mode, kept_mode]), np.concatenate([x, kept]))
    _add_capacity(builder, problem, *held)
    _add_nodes(builder, problem, *held)
    _add_switches(builder, problem, *held, free=shortfall)
    lacking = x[:0]
    if shortfall:
        lacking = builder.add_variables(wanted_qps.size, upper=wanted_qps, cost=1 / np.maximum(wanted_qps, 1e-9))
    else:
        load_qps = np.minimum(part.load_qps, wanted_qps)
        _add_loads(builder, load_qps, x, request_class, qps, upper, problem.step_s * rate * by_load_w)
    if frugal and not shortfall:
        gains = (rate < 0) & ~is_split[request_class]
        _add_frugality(builder, wanted_qps, x, request_class, mode, qps, upper, gains)
    _add_needs(builder, needs, x, location, request_class, mode, qps, lacking)
    is_clipped = bool(clipped.any()) and not shortfall
    return PoolModel(builder.build(), location, request_class, mode, kept_location, kept_mode, lacking, is_clipped)


def _add_needs(
    builder: ModelBuilder,
    needs: Sequence[Coverage],
    x: Ints,
    location: Ints,
    request_class: Ints,
    mode: Ints,
    qps: Floats,
    lacking: Ints,
) -> None:
    """Add equation 1b: the throughput of those instances that a class's requests reach."""
    for need in needs:
        at = np.flatnonzero((request_class == need.request_class) & need.reached[location, mode])
        short = lacking[need.request_class : need.request_class + 1]
        builder.add_rows(1, (0, x[at], qps[at]), (0, short, 1.0), lower=need.needed_qps)


def _add_loads(
    builder: ModelBuilder, load_qps: Floats, x: Ints, request_class: Ints, qps: Floats, upper: Floats, cost: Floats
) -> None:
    """Divide the mean load of classes among instances whose power follows it; others take theirs at no cost."""
    follows = np.flatnonzero(cost)
    if not follows.size:
        return
    y = builder.add_variables(follows.size, upper=qps[follows] * upper[follows], cost=cost[follows] / qps[follows])
    rows = np.arange(follows.size)
    builder.add_rows(rows.size, (rows, y, 1.0), (rows, x[follows], -qps[follows]), upper=0.0)
    others, load = np.flatnonzero(cost == 0), (request_class[follows], y, 1.0)
    builder.add_rows(load_qps.size, load, upper=load_qps)
    builder.add_rows(load_qps.size, load, (request_class[others], x[others], qps[others]), lower=load_qps)


def switch_price(problem: PoolProblem) -> Floats:
    """Return each location's mean rate, never below 0, at which starts and stops are priced: (n_locations,)."""
    return np.maximum(problem.rates.mean(axis=1), 0.0)


def _may_be_kept(problem: PoolProblem) -> Bools:
    costs = (problem.start_j + problem.stop_j > 0)[None, :]
    return (problem.locked > 0) | (costs & (problem.running > 0))


def _add_kept(builder: ModelBuilder, problem: PoolProblem, location: Ints, mode: Ints, *, free: bool) -> Ints:
    """Add instances without requests; at negative rates, unless taken literally, only those that may not be stopped."""
    rate = problem.rate_sums[location]
    upper = problem.running[location, mode]
    if problem.negative_rates is NegativeRates.FRUGAL:
        upper = np.where(rate < 0, problem.locked[location, mode], upper)
    cost = 0.0 if free else problem.step_s * rate * problem.idle_w[mode]
    return builder.add_variables(location.size, upper=upper, cost=cost, integer=True)


def _add_capacity(builder: ModelBuilder, problem: PoolProblem, location: Ints, mode: Ints, columns: Ints) -> None:
    """Add equation 1c, and what it implies for whole instances.

    On ``b`` GPUs, instances of ``a`` each satisfy ``sum floor(a / g) x <= floor(b / g)`` for any ``g`` (Chvatal,
    Gomory). With every size of a mode as ``g`` this says that 7 GPUs hold one instance of 4 and one of 2. Where sizes
    divide each other, as powers of two do, this leaves no gap between fractions and whole numbers (Marcotte, 1985), so
    the relaxation is nearly as good as the optimum.
    """
    n_locations, n_types = problem.gpus.shape
    place: Ints = np.arange(n_locations, dtype=np.int64)
    for gpu_type in range(n_types):
        takes = problem.mode_gpus[mode, gpu_type]
        for size in np.unique(np.append(takes[takes > 0], 1)).tolist():
            at = np.flatnonzero(takes >= size)
            room = problem.gpus[:, gpu_type] // size
            builder.add_rows(n_locations, (place[location[at]], columns[at], takes[at] // size), upper=room)


def _add_nodes(builder: ModelBuilder, problem: PoolProblem, location: Ints, mode: Ints, columns: Ints) -> None:
    """Require instances to fit whole on the nodes of their location: a whole number of nodes is filled in each way."""
    kinds = sorted({(kind.location, kind.gpu_type) for kind in problem.node_kinds})
    for place, gpu_type in kinds:
        takes = np.where(location == place, problem.mode_gpus[mode, gpu_type], 0)
        sizes: list[int] = np.unique(takes[takes > 0]).tolist()
        held = np.flatnonzero(takes)
        terms: list[tuple[Ints, Ints, float | Floats]] = [(np.searchsorted(sizes, takes[held]), columns[held], 1.0)]
        for kind in problem.node_kinds:
            if (kind.location, kind.gpu_type) == (place, gpu_type):
                ways = np.array(patterns(sizes[::-1], kind.gpus), dtype=np.int64)[:, ::-1]
                y = builder.add_variables(len(ways), upper=kind.nodes, integer=True)
                builder.add_rows(1, (0, y, 1.0), upper=kind.nodes)
                way, size = np.nonzero(ways)
                terms.append((size, y[way], -ways[way, size].astype(np.float64)))
        builder.add_rows(len(sizes), *terms, upper=0.0)


def _add_switches(
    builder: ModelBuilder, problem: PoolProblem, location: Ints, mode: Ints, columns: Ints, *, free: bool
) -> None:
    place = location * problem.mode_gpus.shape[0] + mode
    locked, running = problem.locked.ravel(), problem.running.ravel()
    _add_totals(builder, locked > 0, place, columns, lower=locked)
    if free:
        return
    price = switch_price(problem)[:, None]
    starts, stops = (price * problem.start_j).ravel(), (price * problem.stop_j).ravel()
    occupied = np.isin(np.arange(running.size), place)
    _add_totals(builder, (starts > 0) & occupied, place, columns, lower=-running, sign=-1.0, cost=starts)
    _add_totals(builder, (stops > 0) & (running > 0), place, columns, lower=running, cost=stops)


def _add_totals(
    builder: ModelBuilder,
    which: Bools,
    place: Ints,
    columns: Ints,
    *,
    lower: Ints,
    sign: float = 1.0,
    cost: Floats | None = None,
) -> None:
    """Add ``sign * instances >= lower`` for places (location and mode), with slack at a cost where one is given.

    Args:
        which: (n_places,) those that get a row.
        place, columns: (n_columns,) the place of each variable that counts instances.
        lower: (n_places,) the lower bounds.
        sign: 1 or -1.
        cost: (n_places,) for each missing instance; None if none may be missing.
    """
    places = np.flatnonzero(which)
    row_of_place = np.full(which.size, -1)
    row_of_place[places] = np.arange(places.size)
    there = row_of_place[place] >= 0
    terms: list[tuple[Ints, Ints, float]] = [(row_of_place[place[there]], columns[there], sign)]
    if cost is not None:
        lacking = builder.add_variables(places.size, cost=cost[places])
        terms.append((np.arange(places.size), lacking, 1.0))
    builder.add_rows(places.size, *terms, lower=lower[places])


def _add_frugality(
    builder: ModelBuilder, wanted_qps: Floats, x: Ints, pool: Ints, mode: Ints, qps: Floats, upper: Floats, gains: Bools
) -> None:
    """Keep each class's throughput below its demand plus that of any instance for which drawing is a gain."""
    if not gains.any():
        return
    n_modes = int(mode.max()) + 1
    named: Ints = pool[gains] * n_modes + mode[gains]
    kinds, kind_of = np.unique(named, return_inverse=True)
    of_class, least_qps, most_qps = kinds // n_modes, np.zeros(kinds.size), np.zeros(wanted_qps.size)
    least_qps[kind_of] = qps[gains]
    np.maximum.at(most_qps, pool, qps)
    in_use = builder.add_variables(kinds.size, upper=1.0, integer=True)
    rows = np.arange(kind_of.size)
    builder.add_rows(rows.size, (rows, x[gains], 1.0), (rows, in_use[kind_of], -upper[gains]), upper=0.0)
    row, column = np.nonzero(of_class[:, None] == pool[None, :])
    without = wanted_qps[of_class] + (1 - STRICTLY) * most_qps[of_class]
    dropped = np.arange(kinds.size), in_use, (1 - STRICTLY) * (most_qps[of_class] - least_qps)
    builder.add_rows(kinds.size, (row, x[column], qps[column]), dropped, upper=without)
