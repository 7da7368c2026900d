"""GPUs, control values and places for given jobs within a power limit: PowerFlow's greedy, then Heavy-Edge.

One round of PowerFlow without a cluster around it. GPUs go to jobs by marginal return (``powerflow.allocate``). Gangs
are placed in the order of the jobs, those already running where they are, each by its graph (``cycle.graph_placing``).
Control values use the power that is left (``powerflow.controls``). The first step only counts GPUs and assumes that
gangs are packed, so what it cannot know is settled here: a size whose tensor groups do not fit whole on any nodes is
ruled out and the GPUs are given out anew, and if free GPUs draw more than assumed, the last gangs wait.

Source: PowerFlow Algorithm 1; A-SRPT section IV.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.core.cycle.graph_placing import mapper_of, seats, servers_for
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.solving import Method, Progress, Report, Wait, part_of, unreported
from services.core.parallel.graph import JobGraph
from services.core.parallel.iteration import Network
from services.core.policies.powerflow.allocate import Choices, Room, allocate_gpus, known_work_s
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.controls import allocate_controls

_W = 1e-6  #: Watts by which sums of watts may differ from one another

Shares = tuple[tuple[int, int], ...]  #: Where a gang sits: (node, how many of its GPUs), in the order of its ranks


@dataclass(frozen=True)
class GivenJobs:
    """Jobs, in order of precedence."""

    choices: Choices  #: What each could have
    gpu_model: Ints  #: (n_jobs,) index of the GPU model each runs on
    work_s: Floats  #: (n_jobs,) seconds of work left at speed 1, NaN where unknown
    graphs: tuple[JobGraph | None, ...]
    """Each job's graph, which ``JobGraph.sized`` fits to its gang; None where nothing is known about it."""
    held: tuple[Shares, ...]
    """Where each job already runs, empty if it does not; such a job has one size, that of its gang."""

    def __post_init__(self) -> None:
        n_jobs = len(self.choices)
        if not self.gpu_model.size == self.work_s.size == len(self.graphs) == len(self.held) == n_jobs:
            raise DomainError("each job has a GPU model, work, a graph or none, and places or none")
        for job, shares in enumerate(self.held):
            if shares and self.choices.gpus[job].tolist() != [_gpus(shares), *[0] * (self.choices.gpus.shape[1] - 1)]:
                raise DomainError("a job that runs has the size of its gang and no other")

    @property
    def keeps(self) -> Bools:
        """(n_jobs,) which are already running."""
        return np.array([bool(shares) for shares in self.held])


@dataclass(frozen=True)
class GivenNodes:
    """Nodes, and the power that they may draw."""

    gpus: Ints  #: (n_nodes,) GPUs of each, including those of running jobs
    gpu_model: Ints  #: (n_nodes,) index of the GPU model of each
    idle_w: Floats  #: (n_gpu_models,) draw of a free GPU on a node that is on, watts
    limit_w: float = np.inf  #: What jobs, free GPUs and ``other_w`` may draw together, watts; inf for no limit
    other_w: float = 0.0  #: What else draws power under the limit, watts
    power_down: bool = False  #: Whether a node without a gang is off and draws nothing
    network: Network = field(default_factory=Network)  #: What connects the GPUs

    def held_by(self, jobs: GivenJobs) -> Ints:
        """Return the GPUs that running jobs hold: (n_nodes,); ``DomainError`` if there are no such GPUs."""
        held = np.zeros_like(self.gpus)
        for job, shares in enumerate(jobs.held):
            for node, count in shares:
                if self.gpu_model[node] != jobs.gpu_model[job]:
                    raise DomainError(f"running job {job} (from 0) holds GPUs of another model than its own")
                held[node] += count
        if (held > self.gpus).any():
            node = int((held > self.gpus).argmax())
            raise DomainError(f"running jobs hold {held[node]} GPUs of node {node} (from 0) with {self.gpus[node]}")
        return held

    def idle_draw_w(self, free: Ints) -> float:
        """Return the draw of these free GPUs (n_nodes,), watts."""
        draws_w = free * self.idle_w[self.gpu_model]
        return float(draws_w[free < self.gpus].sum() if self.power_down else draws_w.sum())

    def room(self, held: Ints) -> Room:
        """Return the GPUs and power that the greedy shares out, given the GPUs that running jobs hold (n_nodes,)."""
        models = self.idle_w.size
        on = held > 0 if self.power_down else np.ones(held.size, dtype=np.bool_)
        gpus = np.bincount(self.gpu_model, self.gpus, models).astype(np.int64)
        stays_on = np.bincount(self.gpu_model, self.gpus * on, models).astype(np.int64)
        return Room(gpus, self.idle_w, int(self.gpus.max(initial=1)), self.limit_w, self.other_w, stays_on)


@dataclass(frozen=True)
class Allocation:
    """What each job gets, and how much power it draws."""

    gpus: Ints  #: (n_jobs,) the size of its gang, 0 if it waits
    control: Ints  #: (n_jobs,) index of its control value in ``choices``, -1 if it waits
    speed: Floats  #: (n_jobs,) seconds of work done per second
    power_w: Floats  #: (n_jobs,) draw of its gang, watts
    places: tuple[Shares, ...]  #: Where each job's gang sits; empty if it waits
    iteration_s: Floats  #: (n_jobs,) iteration time by the job's graph, NaN without one
    waits: tuple[Wait | None, ...]  #: Why each job gets nothing, None if it runs
    idle_w: float  #: Draw of the free GPUs, watts
    total_w: float  #: Draw of everything under the limit, watts

    def keeps_limit(self, nodes: GivenNodes) -> bool:
        """Return whether the total draw is within the limit; only running jobs can exceed it."""
        return self.total_w <= nodes.limit_w + _W

    def check(self, jobs: GivenJobs, nodes: GivenNodes) -> None:
        """Check the allocation against the problem, using none of the numbers that led to it.

        Raises:
            AssertionError: a node gives more GPUs than it has or GPUs of the wrong model, a gang is not whole, a
                running job moved, a job has a size or control value that is not among its choices, or the sums of watts
                are wrong.
        """
        taken = np.zeros_like(nodes.gpus)
        drawn_w = 0.0
        for job, (gpus, shares) in enumerate(zip(self.gpus.tolist(), self.places, strict=True)):
            assert _gpus(shares) == gpus, f"job {job} has {gpus} GPUs and places for {_gpus(shares)}"
            assert (self.waits[job] is None) == (gpus > 0), f"job {job} neither runs nor waits"
            assert not jobs.held[job] or sorted(shares) == sorted(jobs.held[job]), f"job {job} was moved"
            for node, count in shares:
                assert count > 0, f"job {job} takes nothing of node {node}"
                assert nodes.gpu_model[node] == jobs.gpu_model[job], f"job {job} has GPUs of another model"
                taken[node] += count
            if not gpus:
                continue
            size, control = np.flatnonzero(jobs.choices.gpus[job] == gpus), int(self.control[job])
            assert size.size == 1, f"job {job} has no size of {gpus} GPUs"
            found = jobs.choices.speed[job, size[0], control], jobs.choices.power_w[job, size[0], control]
            assert found == (self.speed[job], self.power_w[job]), f"job {job} has another speed or power"
            assert found[0] > 0, f"job {job} has no control value {control}"
            drawn_w += float(found[1])
        assert (taken <= nodes.gpus).all(), "a node gives more GPUs than it has"
        drawn_w += nodes.idle_draw_w(nodes.gpus - taken) + nodes.other_w
        assert abs(drawn_w - self.total_w) <= _W * max(1.0, drawn_w), "the total is not the sum of its parts"
        assert self.keeps_limit(nodes) or not (self.gpus[~jobs.keeps] > 0).any(), "a start exceeds the power limit"


def allocate(
    jobs: GivenJobs,
    nodes: GivenNodes,
    config: PowerflowConfig = PowerflowConfig(),
    method: Method = Method.HEAVY_EDGE,
    report: Report = unreported,
) -> Allocation:
    """Return GPUs, control values and places for the jobs; ``DomainError`` as of ``held_by``."""
    held, choices, misfits = nodes.held_by(jobs), jobs.choices, np.zeros(jobs.choices.gpus.shape, dtype=np.bool_)
    passed = 0.0
    while True:
        open_choices = _without(choices, misfits)
        sizes = allocate_gpus(
            open_choices,
            nodes.room(held),
            gpu_model=jobs.gpu_model,
            keeps=jobs.keeps,
            work_s=jobs.work_s,
            config=config,
        )
        gpus = np.where(sizes >= 0, open_choices.gpus[np.arange(sizes.size), np.maximum(sizes, 0)], 0)
        following = (1 + passed) / 2  # how many rounds there are is not known: each counts as half of what is left
        places, failed = _placed(jobs, nodes, gpus, held, method, part_of(report, passed, following))
        passed = following
        if not failed:
            break
        for job in failed:
            misfits[job] |= choices.gpus[job] == gpus[job]
    fits_nowhere: Bools = (choices.gpus > 0).any(axis=1) & (misfits | (choices.gpus == 0)).all(axis=1)
    return _within(jobs, nodes, gpus, places, fits_nowhere, config, method)


def _without(choices: Choices, misfits: Bools) -> Choices:
    """Return the choices without these sizes, (n_jobs, n_sizes), with the rest of each row packed to the left."""
    if not misfits.any():
        return choices
    gpus = np.where(misfits, 0, choices.gpus)
    packed = np.argsort(gpus == 0, axis=1, kind="stable")
    gpus = np.take_along_axis(gpus, packed, axis=1)
    tables = (np.take_along_axis(table, packed[:, :, None], axis=1) for table in (choices.speed, choices.power_w))
    speed, power_w = (np.where((gpus > 0)[:, :, None], table, 0.0) for table in tables)
    return Choices(gpus, speed, power_w)


def _placed(
    jobs: GivenJobs, nodes: GivenNodes, gpus: Ints, held: Ints, method: Method, report: Report
) -> tuple[list[Shares], list[int]]:
    """Return where gangs of these sizes (n_jobs,) sit, and the jobs whose tensor groups fit nowhere."""
    free = nodes.gpus - held
    places, failed = list(jobs.held), list[int]()
    for job, size in enumerate(gpus.tolist()):
        report(Progress(job / gpus.size, f"placing job {job + 1} of {gpus.size}"))
        if not size or places[job]:
            continue
        mapper = mapper_of(jobs.graphs[job], size, nodes.network)
        model = int(jobs.gpu_model[job])
        found = seats(nodes.gpu_model, mapper, model, free, method, servers_for(mapper))
        if found is None:
            failed.append(job)
            continue
        places[job] = found.shares
        for node, count in found.shares:
            free[node] -= count
    return places, failed


def _within(
    jobs: GivenJobs,
    nodes: GivenNodes,
    gpus: Ints,
    places: list[Shares],
    fits_nowhere: Bools,
    config: PowerflowConfig,
    method: Method,
) -> Allocation:
    """Return the allocation with control values that keep the limit, without the last gangs it has no power for.

    ``gpus`` and ``places`` are changed accordingly.
    """
    choices, n_jobs, free = jobs.choices, gpus.size, nodes.gpus.copy()
    for shares in places:
        for node, count in shares:
            free[node] -= count
    size = (choices.gpus == gpus[:, None]).argmax(axis=1)
    speed, power_w = choices.at(size)
    lowest_w = np.where(speed > 0, power_w, np.inf).min(axis=1, initial=np.inf)
    out_of_power = np.zeros(n_jobs, dtype=np.bool_)
    last_first: list[int] = np.flatnonzero((gpus > 0) & ~jobs.keeps)[::-1].tolist()
    for job in last_first:
        if float(lowest_w[gpus > 0].sum()) <= nodes.limit_w - nodes.other_w - nodes.idle_draw_w(free):
            break
        for node, count in places[job]:
            free[node] += count
        gpus[job], places[job], out_of_power[job] = 0, (), True
    runs = np.flatnonzero(gpus)
    idle_w = nodes.idle_draw_w(free)
    weights = known_work_s(jobs.work_s)[runs] if config.marginal == "power" else None
    control = np.full(n_jobs, -1, dtype=np.int64)
    left_w = nodes.limit_w - nodes.other_w - idle_w
    control[runs] = allocate_controls(speed[runs], power_w[runs], left_w, weights)
    at = runs, control[runs]
    drawn_w, reached = np.zeros(n_jobs), np.zeros(n_jobs)
    drawn_w[runs], reached[runs] = power_w[at], speed[at]
    free_by_model = np.bincount(nodes.gpu_model, free, nodes.idle_w.size)
    least = np.where(choices.gpus > 0, choices.gpus, np.iinfo(np.int64).max).min(axis=1)
    waits = tuple(
        None
        if gpus[job]
        else Wait.TENSOR_GROUPS
        if fits_nowhere[job]
        else Wait.POWER_LIMIT
        if out_of_power[job] or (np.isfinite(nodes.limit_w) and free_by_model[jobs.gpu_model[job]] >= least[job])
        else Wait.GPUS
        for job in range(n_jobs)
    )
    iteration_s = _iterations_s(jobs, nodes, places, method)
    total_w = float(drawn_w.sum()) + idle_w + nodes.other_w
    return Allocation(gpus, control, reached, drawn_w, tuple(places), iteration_s, waits, idle_w, total_w)


def _iterations_s(jobs: GivenJobs, nodes: GivenNodes, places: Sequence[Shares], method: Method) -> Floats:
    """Return the iteration time of each gang that has a graph: (n_jobs,)."""
    found = np.full(len(places), np.nan)
    for job, (graph, shares) in enumerate(zip(jobs.graphs, places, strict=True)):
        if graph is not None and shares:
            mapper = mapper_of(graph, _gpus(shares), nodes.network)
            counts = mapper.counts(np.array([count for _, count in shares], dtype=np.int64), method)
            found[job] = np.nan if counts is None else float(mapper.model.time_s(counts))
    return found


def _gpus(shares: Shares) -> int:
    return sum(count for _, count in shares)
