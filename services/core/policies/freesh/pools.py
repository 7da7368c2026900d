"""The pools of a serving site for the next period: the problem, and the plan.

An *instance* is a running model server; a *mode* says on how many GPUs of which type it runs. A *partition* is one way
to divide requests into classes (by thresholds on their input and output lengths), and each class has a pool of its
own. FREESH decides every half hour how many instances of each mode each place runs for each class, and which
partition is in use.

Source: FREESH section 3.1, equation 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.serving import NegativeRates
from services.core.domain.solving import Backend, SolveStatus


@dataclass(frozen=True)
class Partition:
    """One way to divide requests into classes, and how each mode serves each class."""

    demand_qps: Floats  #: (n_classes, n_steps) requests per second, before head-room
    max_qps: Floats  #: (n_classes, n_modes) what one instance serves; 0 if it cannot serve the class
    power_w: Floats  #: (n_classes, n_modes) draw of the whole instance at that load
    eligible: Bools  #: (n_classes, n_modes) whether the class's latency limits hold (equation 1e, a filter)
    reach: Bools | None = None
    """(n_regions, n_locations, n_classes, n_modes) whether they hold for requests from a region, including the network;
    None where every region reaches every location."""
    mean_qps: Floats | None = None
    """(n_classes, n_steps) mean requests per second, for power below full load; None: ``demand_qps``."""

    @property
    def load_qps(self) -> Floats:
        """(n_classes,) mean requests per second, averaged over the steps."""
        return (self.demand_qps if self.mean_qps is None else self.mean_qps).mean(axis=1)

    @property
    def usable(self) -> Bools:
        """(n_classes, n_modes) whether a mode may serve a class at all."""
        return self.eligible & (self.max_qps > 0)


@dataclass(frozen=True)
class NodeKind:
    """Identical nodes at one location; ``location`` and ``gpu_type``: where they are, and the type of their GPUs."""

    location: int
    gpu_type: int
    nodes: int  #: How many nodes
    gpus: int  #: Number of GPUs of that type on each


@dataclass(frozen=True)
class PoolProblem:
    """The available GPUs, the demand, and the costs of instances; numbers are finite, as ``contracts.pools`` checks."""

    step_s: float  #: Length of a step, seconds
    rates: Floats
    """(n_locations, n_steps) cost of a kWh in that place and step, in the objective's unit: gCO2, money, or 1."""
    gpus: Ints  #: (n_locations, n_types) GPUs available
    mode_gpus: Ints  #: (n_modes, n_types) GPUs that an instance takes
    partitions: tuple[Partition, ...]  #: The partitions to choose from
    head_room: float  #: Alpha of equation 1b, > 0: the multiple of the demand to be served
    running: Ints  #: (n_locations, n_modes) instances running now
    locked: Ints  #: (n_locations, n_modes) those among them that are too young to be stopped; at most ``running``
    idle_w: Floats  #: (n_modes,) watts of an instance that is kept without requests
    start_j: Floats  #: (n_modes,) energy that a start takes; 0 if free
    stop_j: Floats  #: (n_modes,) energy that a stop takes
    negative_rates: NegativeRates = NegativeRates.FRUGAL  #: How negative rates are interpreted
    region_shares: Floats = field(default_factory=lambda: np.ones(1))
    """(n_regions,) share of each class's requests that comes from a region; they sum to 1."""
    follows_load: Bools | None = None
    """(n_modes,) whether an instance draws ``idle_w`` without requests and more in proportion to what it serves; None
    if all draw their full power whatever they serve."""
    node_kinds: tuple[NodeKind, ...] = ()
    """The nodes on which each instance must fit whole; if there are none for a location and type, only the sums in
    ``gpus`` count."""
    unserved_qps: Floats | None = None  #: (n_classes,) beside what is to be served; of whichever regions it is

    def __post_init__(self) -> None:
        if (self.locked @ self.mode_gpus > self.gpus).any():
            raise DomainError("instances that may not be stopped yet take more GPUs than there are")

    @property
    def rate_sums(self) -> Floats:
        """(n_locations,) rates summed over the steps."""
        return self.rates.sum(axis=1)

    @property
    def most(self) -> Ints:
        """(n_locations, n_modes) how many instances of a mode alone would fit."""
        needs = self.mode_gpus[None, :, :]
        fits = np.where(needs > 0, self.gpus[:, None, :] // np.maximum(needs, 1), np.iinfo(np.int64).max)
        return fits.min(axis=2)

    def reach_of(self, partition: int) -> Bools:
        """Return whether requests from a region are served in time: (n_regions, n_locations, n_classes, n_modes)."""
        part = self.partitions[partition]
        if part.reach is not None:
            return part.reach
        n_locations, n_modes = self.running.shape
        return np.ones((self.region_shares.size, n_locations, part.demand_qps.shape[0], n_modes), np.bool_)

    def by_load_w(self, partition: int) -> Floats:
        """Return what an instance at full load draws beyond ``idle_w``: (n_classes, n_modes) W; 0 if it always does."""
        power_w = self.partitions[partition].power_w
        if self.follows_load is None:
            return np.zeros_like(power_w)
        return np.where(self.follows_load, np.maximum(power_w - self.idle_w, 0.0), 0.0)

    def wanted_qps(self, partition: int) -> Floats:
        """Return what a pool must serve, (n_classes,): the greatest demand of any step, with head-room (equation 1b).

        Instances run for the whole period, so only the step with the most demand binds.
        """
        return self.head_room * self.partitions[partition].demand_qps.max(axis=1)


@dataclass(frozen=True)
class Shortfall:
    """Demand that no plan can serve."""

    qps: Floats  #: (n_classes,) unserved part of the demand with head-room
    unserved_alone: Bools  #: (n_classes,) whether the class cannot be served even with all GPUs to itself
    full: Bools  #: (n_locations, n_types) whether the plan with the least shortfall uses all GPUs that exist there


@dataclass(frozen=True)
class PoolPlan:
    """How many instances run where, and how good that is."""

    status: SolveStatus
    """``optimal`` within the requested gap, ``feasible`` with a wider gap, ``infeasible`` with the plan of least
    shortfall, ``time_limit`` without a plan."""
    solver: Backend  #: The solver that found the plan
    partition: int | None = None  #: The chosen one; None without a plan
    instances: Ints = field(default_factory=lambda: np.zeros((0, 0, 0), np.int64))
    """(n_locations, n_classes, n_modes) how many run."""
    kept: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """(n_locations, n_modes) instances kept running without requests."""
    objective: float | None = None
    """Sum over steps of rate x power x step, unit of ``rates`` times W s; includes starts and stops."""
    bound: float | None = None  #: No plan has a lower objective
    shortfall: Shortfall | None = None  #: Set if the demand cannot be served
    note: str = ""  #: Anything else a reader should know

    @property
    def gap(self) -> float | None:
        """``(objective - bound) / |objective|``; None if either is unknown."""
        if self.objective is None or self.bound is None:
            return None
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-9)

    def totals(self) -> Ints:
        """Return the instances of all classes, including those kept without requests: (n_locations, n_modes)."""
        return self.instances.sum(axis=1) + self.kept


def drawn_w(problem: PoolProblem, plan: PoolPlan) -> Floats:
    """Return what each instance draws on average: (n_locations, n_classes, n_modes) watts.

    Where power follows the load, requests go to the instances where one more costs least at the problem's rates.
    Instances whose power does not follow it take as many as they can, at no extra cost.
    """
    assert plan.partition is not None
    part, by_load_w = problem.partitions[plan.partition], problem.by_load_w(plan.partition)
    drawn = np.broadcast_to(part.power_w, plan.instances.shape).copy()
    if not by_load_w.any():
        return drawn
    for request_class, load_qps in enumerate(part.load_qps.tolist()):
        max_qps, slope_w = part.max_qps[request_class], by_load_w[request_class]
        capacity = plan.instances[:, request_class, :] * max_qps
        follows = np.broadcast_to(slope_w > 0, capacity.shape)
        needed = max(0.0, load_qps - float(capacity[~follows].sum()))
        prices = np.outer(problem.rate_sums, slope_w / np.maximum(max_qps, 1e-9))
        for at in np.argsort(np.where(follows, prices, np.inf), axis=None, kind="stable").tolist():
            location, mode = divmod(at, max_qps.size)
            if not follows[location, mode] or capacity[location, mode] <= 0:
                continue
            served = min(capacity[location, mode], load_qps if prices[location, mode] < 0 else needed)
            load_qps, needed = load_qps - served, max(0.0, needed - served)
            idle_w = part.power_w[request_class, mode] - slope_w[mode]
            drawn[location, request_class, mode] = idle_w + slope_w[mode] * served / capacity[location, mode]
    return drawn


def energy_j(problem: PoolProblem, plan: PoolPlan) -> Floats:
    """Return what each location's instances draw in one step, joules: (n_locations,). Excludes starts and stops."""
    serving_w = (plan.instances * drawn_w(problem, plan)).sum(axis=(1, 2))
    return problem.step_s * (serving_w + plan.kept @ problem.idle_w)


def switches(problem: PoolProblem, plan: PoolPlan) -> tuple[Ints, Ints]:
    """Return how many instances start and stop: two arrays of (n_locations, n_modes).

    An instance that changes its class keeps running: that affects only the router.
    """
    change = plan.totals() - problem.running
    return np.maximum(change, 0), np.maximum(-change, 0)


def switching_j(problem: PoolProblem, plan: PoolPlan) -> Floats:
    """Return the energy of each location's starts and stops, joules: (n_locations,)."""
    starts, stops = switches(problem, plan)
    return starts @ problem.start_j + stops @ problem.stop_j


@dataclass(frozen=True)
class Coverage:
    """Instances that together must have a given throughput."""

    request_class: int  #: Their class
    reached: Bools  #: (n_locations, n_modes) which instances
    needed_qps: float  #: Requests per second with head-room, from the regions that reach no others


def coverages(problem: PoolProblem, partition: int, wanted_qps: Floats) -> list[Coverage]:
    """Return what the instances of a partition must serve together; for each class, all of its demand comes first.

    Requests of a class come from *regions*, each with its share, and a region reaches the instances whose latency,
    including the network's, keeps the class's limits. Demand can be divided among the instances so that every region is
    served if and only if, for every set of regions, the instances that any of them reaches have the throughput for all
    of them (max flow, min cut: Gale, 1957; Hall's condition for fractions). That takes one row for each set, and no
    variable for each region and instance.

    Args:
        wanted_qps: (n_classes,) demand of all regions, with head-room.
    """
    part, unserved = problem.partitions[partition], problem.unserved_qps
    reach, found = problem.reach_of(partition), list[Coverage]()
    for request_class, wanted in enumerate(wanted_qps.tolist()):
        usable = part.usable[request_class][None, :]
        regions = {
            region: reach[region, :, request_class, :] & usable
            for region, share in enumerate(problem.region_shares.tolist())
            if share > 0
        }
        lacks = 0.0 if unserved is None else float(unserved[request_class])
        for each in _of_class(request_class, wanted + lacks, regions, problem.region_shares.tolist()):
            found.append(replace(each, needed_qps=max(each.needed_qps - lacks, 0.0)))
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
