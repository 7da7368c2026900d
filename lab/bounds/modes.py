"""The least carbon any run of given jobs could have emitted, by the levers that its policy may pull.

A lever is a set of modes: a job that may grow has a mode for each width, one whose power limits may be set a mode for
each limit, one whose batch may follow its gang a mode for each gang with that batch; and so on for all of them
together. Where idle nodes may sleep, an unused GPU draws nothing; where not, it draws its idle power over the whole
window of the run. The linear programme, over jobs ``i``, modes ``m``, GPU models ``d`` and steps ``t`` of the grid:

    minimise    sum_t c[t]/1000 (sum_{i,m} P[m] x[i,m,t] + sum_d a[t] I[d] (G[d] h[t] - sum_{i, m on d} n[m] x[i,m,t]))
    subject to  sum_{t, m of stage j} s[m] x[i,m,t] >= W[i] / J     every stage of every job is done; of the first,
                                                                    U[i] min_m s[m] more
                sum_m x[i,m,t] <= h[i,t]                            a job is one gang at a time, and in its window
                sum_{i, m on d} n[m] x[i,m,t] <= G[d] h[t]          no more GPUs than there are
                x >= 0

======== ============================================================================ =========
symbol   here                                                                         unit
======== ============================================================================ =========
x[i,m,t] for how long job i runs in mode m within step t (the variables)              h
c[t]     ``curve``, from the beginning of the run to its end                          gCO2/kWh
P[m]     ``Modes.power_w``: the whole gang with its share of the hosts                W
s[m]     ``Modes.speed``                                                              work/h
n[m], d  ``Modes.gpus``, on ``Modes.model``                                           GPUs
j, J     ``Modes.stage``, ``Modes.stages``: of a job that tunes its batch
G[d]     ``gpus``                                                                     GPUs
I[d]     ``idle_w``, of one unused GPU with its share of the host                     W
a[t]     1 where unused GPUs draw that, 0 where they sleep (``sleeps``)
h[t]     length of a step                                                             h
h[i,t]   the part of a step between ``release_s`` and ``deadline_s`` of a job         h
W[i]     ``work``                                                                     work
U[i]     ``Modes.start_h``, once                                                      h
======== ============================================================================ =========

**Why no run is below it.** Take any run in which every job ends by its deadline, and let ``x[i,m,t]`` be for how long
job i held GPUs in mode m within step t, starts, checkpoints and whatever was later lost included. A job holds one gang
at a time, between its submission and its end, and ends when its work is done, stage by stage; nobody holds a GPU that
is not there. So x is feasible. The objective is no more than the run emitted. What gangs drew is in it as it was. Where
nodes do not sleep, every unused GPU drew its idle power, from the first submission to the run's end, as here. Where
they may, an unused GPU of a node that is awake, and a node that boots, drew at least nothing (in hours of negative
intensity, where drawing more emits less, ``a`` is 1). Of what binds a run besides, the programme minds nothing: work is
cut and stopped at no cost (but a first start where ``start_h`` is given), stages come in any order, gangs fit anywhere,
lengths and the grid are known.

**Deadlines** are the caller's. For a run some of whose jobs ended late, those may be no earlier than these ends.

**How it is found.** By weak duality any prices give a bound: ``lambda[d,t] >= 0`` for a GPU-hour, and ``mu[i] >= 0``
for a unit of a job's work:

    sum_i (mu[i] W'[i] - sum_t h[i,t] max(0, max_m(mu[i] s'[m] - c[t] P[m]/1000 - (lambda - c a I/1000)[d,t] n[m])))
      + sum_{d,t} (c[t] a[t] I[d]/1000 - lambda[d,t]) G[d] h[t]

Stages are added up by weights ``r[j]``: ``s' = r[j] s``, ``W' = W * mean(r)``. Any weights give a bound; taken is the
least energy that a unit of a stage's work takes, ``min_m (P[m] - a I n[m]) / s[m]``. The best ``mu`` of each job is
found by cutting planes, exactly; ``lambda`` rises along what the jobs would use beyond the GPUs that there are. However
far that gets, and however it rounds, the value is a bound; for jobs of one stage the highest is the optimum of the
programme.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.errors import DomainError
from services.core.domain.units import S_PER_HOUR

W_PER_KW = 1_000.0
CLOSE = 1e-7
"""Relative error at which prices of work are good enough."""
CUTS = 60
ROUNDS = 60
"""Steps of the GPUs' prices, at most. A step goes along what jobs would use beyond the GPUs that there are, as far as a
value above the best so far would need (Polyak's step): by a share, ``HOPE``, that is halved when nothing is gained."""
LEAST_ROUNDS, MOST_PAIRS = 6, 30_000_000
"""Where there are many pairs of a job and a step, steps are fewer."""
HOPE, LEAST_HOPE, BETTER, PATIENCE, MOMENTUM = 0.3, 2e-3, 1e-4, 3, 0.7
CHUNK = 200_000
"""Pairs of a job and a step that are looked at together, to bound memory."""


@dataclass(frozen=True)
class Modes:
    """The ways in which jobs of one kind may run; every column is (n_modes,).

    Attributes:
        speed: Work per hour; > 0.
        power_w: Draw of the whole gang with its share of the hosts; >= 0.
        gpus: Size of the gang; >= 1.
        model: Index of the GPU model it runs on.
        stage: The stage of the job's work it is a mode of, from 0.
        stages: Equal shares of the work, done one after the other.
        start_h: How long a gang draws power before it works, hours; counted once a job.
    """

    speed: Floats
    power_w: Floats
    gpus: Floats
    model: Ints
    stage: Ints
    stages: int = 1
    start_h: float = 0.0

    def __post_init__(self) -> None:
        columns = (self.power_w, self.gpus, self.model, self.stage)
        if any(column.shape != self.speed.shape for column in columns):
            raise DomainError("every column of modes has one row per mode")
        if not (np.isfinite(self.speed).all() and (self.speed > 0).all() and (self.gpus >= 1).all()):
            raise DomainError("a mode has a speed above 0 and at least one GPU")
        if not (np.isfinite(self.power_w).all() and (self.power_w >= 0).all()):
            raise DomainError("a mode's power is finite and not negative")
        if set(self.stage.tolist()) != set(range(self.stages)):
            raise DomainError("every stage of a kind of job has a mode")

    def take(self, rows: Ints | Bools) -> Modes:
        """Return some of the modes."""
        return replace(
            self,
            speed=self.speed[rows],
            power_w=self.power_w[rows],
            gpus=self.gpus[rows],
            model=self.model[rows],
            stage=self.stage[rows],
        )


@dataclass(frozen=True)
class ModesProblem:
    """Jobs, what they may do, and what they may do it on.

    Attributes:
        curve: The grid over the window of the run, from the moment from which idle power is charged to its end.
        gpus: (n_models,) of each model; > 0.
        idle_w: (n_models,) draw of one unused GPU with its share of the host; >= 0.
        sleeps: Whether unused GPUs may sleep and then draw nothing.
        kinds: The kinds of jobs.
        kind: (n_jobs,) index into them.
        work: (n_jobs,) in the unit of its kind's speeds; > 0.
        release_s, deadline_s: (n_jobs,) the window of each job, UTC seconds.
    """

    curve: CarbonCurve
    gpus: Floats
    idle_w: Floats
    sleeps: bool
    kinds: tuple[Modes, ...]
    kind: Ints
    work: Floats
    release_s: Floats
    deadline_s: Floats

    def __post_init__(self) -> None:
        if any(column.shape != self.kind.shape for column in (self.work, self.release_s, self.deadline_s)):
            raise DomainError("every column of jobs has one row per job")
        if not (np.isfinite(self.work).all() and (self.work > 0).all()):
            raise DomainError("every job has work above 0")
        if self.gpus.shape != self.idle_w.shape or not ((self.gpus > 0).all() and (self.idle_w >= 0).all()):
            raise DomainError("every model has GPUs, and an idle power that is not negative")


@dataclass(frozen=True)
class LeastCarbon:
    """A bound, and what stands behind it.

    Attributes:
        carbon_gco2: No run emits less.
        used_gpu_hours: (n_models, n_steps) what jobs would use at the prices.
        price_gco2: (n_models, n_steps) what a GPU-hour is worth beyond its own carbon: above 0 where GPUs are scarce.
    """

    carbon_gco2: float
    used_gpu_hours: Floats
    price_gco2: Floats


def least_carbon(problem: ModesProblem, price_gco2: Floats | None = None) -> LeastCarbon:
    """Return a lower bound on the carbon of every run in which all jobs end by their deadlines.

    Args:
        problem: The jobs and the cluster.
        price_gco2: (n_models, n_steps) to begin from, such as those of a similar problem; None: 0.

    Raises:
        DomainError: a job cannot be done within its window at any speed.
    """
    capacity = problem.gpus[:, None] * problem.curve.lengths_s / S_PER_HOUR
    price = np.zeros_like(capacity) if price_gco2 is None else np.maximum(price_gco2, 0.0)
    jobs = _Jobs(problem)
    best, best_at, used = -np.inf, price, np.zeros_like(capacity)
    hope, direction, failed = HOPE, np.zeros_like(capacity), 0
    for _ in range(jobs.rounds):
        value, uses = jobs.priced(price)
        value -= float((price * capacity).sum())
        failed = 0 if value - best > BETTER * abs(value) else failed + 1
        if value > best:
            best, best_at, used = value, price, uses
        if failed == PATIENCE:
            hope, failed, direction = hope / 2, 0, np.zeros_like(capacity)
            price, uses, value = best_at, used, best
        excess = uses - capacity
        excess = np.where((price <= 0) & (excess < 0), 0.0, excess)
        if hope < LEAST_HOPE or np.abs(excess).max() <= 1e-3 * capacity.max():
            break
        direction = excess + MOMENTUM * direction
        length = (best + hope * abs(best) - value) / max(float((direction**2).sum()), 1e-12)
        price = np.maximum(price + length * direction, 0.0)
    return LeastCarbon(best + jobs.idle_gco2, used, best_at)


@dataclass
class _Kind:
    """Jobs of one kind, and their modes with speeds in the weighted unit of their work."""

    modes: Modes
    rows: Ints
    work: Floats
    mu: Floats


class _Jobs:
    """All jobs of a problem, at prices of GPUs."""

    def __init__(self, problem: ModesProblem) -> None:
        self._problem = problem
        curve = problem.curve
        self._intensity = curve.intensity_gco2_per_kwh
        sunk = np.broadcast_to(not problem.sleeps, self._intensity.shape) | (self._intensity < 0)
        idle = self._intensity * sunk / W_PER_KW * problem.idle_w[:, None]
        self._idle_price = idle
        hours = curve.lengths_s / S_PER_HOUR
        self.idle_gco2 = float((idle * hours * problem.gpus[:, None]).sum())
        self._first = np.searchsorted(curve.edges_s[1:], problem.release_s, side="right")
        self._last = np.searchsorted(curve.times_s, problem.deadline_s, side="left")
        pairs = int(np.maximum(self._last - self._first, 0).sum())
        self.rounds = min(max(MOST_PAIRS // max(pairs, 1), LEAST_ROUNDS), ROUNDS)
        self._kinds: list[_Kind] = []
        prune = bool((self._intensity >= 0).all())
        for at, modes in enumerate(problem.kinds):
            rows = np.flatnonzero(problem.kind == at)
            rows = rows[np.argsort(self._first[rows], kind="stable")]
            if rows.size:
                weighted, unit, started = _weighted(modes, problem, prune=prune)
                self._kinds.append(_Kind(weighted, rows, problem.work[rows] * unit + started, np.zeros(rows.size)))

    def priced(self, price: Floats) -> tuple[float, Floats]:
        """Return the least cost of all jobs at these prices of GPUs, gCO2, and the GPU-hours they would use then."""
        total, used = 0.0, np.zeros_like(price)
        for kind in self._kinds:
            modes = kind.modes
            cost = self._intensity[:, None] * modes.power_w / W_PER_KW
            cost += (price - self._idle_price).T[:, modes.model] * modes.gpus
            for part in self._chunks(kind):
                value, uses = self._best(kind, part, cost)
                total += value
                used += uses
        return total, used

    def _chunks(self, kind: _Kind) -> Iterator[slice]:
        pairs = np.cumsum(np.maximum(self._last[kind.rows] - self._first[kind.rows], 0))
        begin = 0
        while begin < kind.rows.size:
            done = pairs[begin - 1] if begin else 0
            end = max(int(np.searchsorted(pairs, done + CHUNK, side="right")), begin + 1)
            yield slice(begin, end)
            begin = end

    def _best(self, kind: _Kind, part: slice, cost: Floats) -> tuple[float, Floats]:
        """Return the least cost of these jobs at the best price of their work, and the GPU-hours that they use then."""
        problem, modes = self._problem, kind.modes
        pairs = _Pairs(problem, modes, kind.rows[part], kind.work[part], self._first, self._last, cost)
        low, high = pairs.around(kind.mu[part])
        for _ in range(CUTS):
            bends = (low.slope > 0) & (low.slope > high.slope + 1e-12 * pairs.work)
            fall = np.where(bends, low.slope - high.slope, 1.0)
            cut = (high.value - high.slope * high.mu - low.value + low.slope * low.mu) / fall
            mu = np.where(bends, np.clip(cut, low.mu, high.mu), high.mu)
            above = np.where(bends, low.value + low.slope * (mu - low.mu), np.maximum(low.value, high.value))
            found = pairs.at(mu)
            gap = above - np.maximum(np.maximum(low.value, high.value), found.value)
            low = low.replaced(found, found.slope > 0, pairs.job)
            high = high.replaced(found, found.slope <= 0, pairs.job)
            if gap.sum() <= CLOSE * np.abs(above).sum():
                break
        kind.mu[part] = high.mu
        fall = low.slope - high.slope
        share = np.clip(np.where(fall > 0, -high.slope / np.where(fall > 0, fall, 1.0), 0.0), 0.0, 1.0)
        used = np.zeros((problem.gpus.size, problem.curve.times_s.size))
        for side, weight in ((low, share), (high, 1.0 - share)):
            runs = side.chosen >= 0
            mode, hours = side.chosen[runs], (pairs.hours * weight[pairs.job])[runs]
            np.add.at(used, (modes.model[mode], pairs.step[runs]), hours * modes.gpus[mode])
        return float(np.maximum(low.value, high.value).sum()), used


@dataclass(frozen=True)
class _Priced:
    """Jobs at a price of their work.

    Attributes:
        mu: (n_jobs,) the prices.
        value: (n_jobs,) of the bound, gCO2.
        slope: (n_jobs,) of it: the work that is not done at this price.
        chosen: (n_pairs,) the mode each job runs in within each step, -1 for none.
    """

    mu: Floats
    value: Floats
    slope: Floats
    chosen: Ints

    def replaced(self, by: _Priced, which: Bools, job: Ints) -> _Priced:
        """Return this with some of the jobs, (n_jobs,), as they are there."""
        return _Priced(
            np.where(which, by.mu, self.mu),
            np.where(which, by.value, self.value),
            np.where(which, by.slope, self.slope),
            np.where(which[job], by.chosen, self.chosen),
        )


class _Pairs:
    """Some jobs and the steps of their windows: a row per pair of both."""

    def __init__(
        self, problem: ModesProblem, modes: Modes, rows: Ints, work: Floats, first: Ints, last: Ints, cost: Floats
    ) -> None:
        counts = np.maximum(last[rows] - first[rows], 0)
        self.job = np.repeat(np.arange(rows.size), counts)
        self.step = first[rows][self.job] + np.arange(self.job.size) - (np.cumsum(counts) - counts)[self.job]
        edges = problem.curve.edges_s
        until_s = np.minimum(edges[self.step + 1], problem.deadline_s[rows][self.job])
        self.hours = np.maximum(until_s - np.maximum(edges[self.step], problem.release_s[rows][self.job]), 0.0)
        self.hours /= S_PER_HOUR
        most = np.bincount(self.job, self.hours, rows.size) * modes.speed.max()
        if impossible := int(np.count_nonzero(most < work * (1 - 1e-6))):
            raise DomainError(f"{impossible} jobs cannot be done in their windows")
        self.work = np.minimum(work, most * (1 - 1e-9))  # what rounding takes from a window is given back
        self._modes, self._cost = modes, cost[self.step]

    def at(self, mu: Floats) -> _Priced:
        """Return the jobs at these prices of their work."""
        speed = self._modes.speed
        net = mu[self.job][:, None] * speed - self._cost
        chosen = net.argmax(axis=1)
        most = np.take_along_axis(net, chosen[:, None], axis=1)[:, 0]
        chosen = np.where(most > 0, chosen, -1)
        gained = np.bincount(self.job, self.hours * np.maximum(most, 0.0), mu.size)
        done = np.bincount(self.job, self.hours * np.where(chosen >= 0, speed[chosen], 0.0), mu.size)
        return _Priced(mu, mu * self.work - gained, self.work - done.astype(np.float64), chosen)

    def around(self, mu: Floats) -> tuple[_Priced, _Priced]:
        """Return the jobs at prices at which not all, and at which all of their work is done, from ``mu`` upwards."""
        if not mu.any():
            mu = np.full(mu.size, float((self._cost / self._modes.speed).max(initial=0.0)) or 1.0)
        low, high = self.at(np.zeros(mu.size)), self.at(mu)
        for _ in range(CUTS):
            short = high.slope > 1e-9 * self.work
            if not short.any():
                break
            low, high = low.replaced(high, short, self.job), self.at(np.where(short, 1.5 * high.mu, high.mu))
        return low, high


def _weighted(modes: Modes, problem: ModesProblem, *, prune: bool) -> tuple[Modes, float, float]:
    """Return the modes that are of use, with speeds in weighted work; its unit per unit of work; that of a start."""
    idle_w = np.zeros_like(problem.idle_w) if problem.sleeps else problem.idle_w
    above_w = modes.power_w - idle_w[modes.model] * modes.gpus
    per_work = np.maximum(above_w if bool((above_w > 0).all()) else modes.power_w, 1.0) / modes.speed
    least = np.full(modes.stages, np.inf)
    np.minimum.at(least, modes.stage, per_work)
    speed = modes.speed * least[modes.stage]
    started = modes.start_h * float(speed[modes.stage == 0].min())
    modes = replace(modes, speed=speed, stage=np.zeros_like(modes.stage), stages=1)
    if prune:
        columns = np.stack([-speed, above_w, modes.gpus, modes.model, -modes.model], dtype=np.float64)
        kept = np.arange(speed.size)
        for size in np.unique(modes.gpus):  # first among equal sizes, as pairs of all modes are many
            own = np.flatnonzero(modes.gpus == size)
            kept = np.setdiff1d(kept, own[_beaten(columns[:, own])])
        modes = modes.take(kept[~_beaten(columns[:, kept])])
    return modes, float(least.mean()), started


def _beaten(columns: Floats) -> Bools:
    """Return which columns another is nowhere above, and below somewhere or equal and before it."""
    no_worse: Bools = np.all(columns[:, :, None] <= columns[:, None, :], axis=0)
    equal = no_worse & no_worse.T
    before = np.tri(columns.shape[1], k=-1, dtype=np.bool_).T
    return np.any(no_worse & (~equal | before), axis=0)
