"""GPUs by marginal return: the first half of Algorithm 1.

Every job starts without a GPU, at the clock or power limit that is most efficient for its size. The job with the
largest marginal return takes the next step, until GPUs run out or the cluster draws its limit. Three things differ from
the paper:

- Gangs are powers of two (section 5.3), so a step doubles a gang instead of adding one GPU. A job whose next step is
  larger than what is left is done; the others go on.
- JCT and energy of the whole cluster, by which eq. 20 divides, are the same for every job at any moment, so they do not
  affect the order and are left out. So is the work a job has left, which is in both numerator and denominator.
- A job without a GPU has an infinite JCT and so an infinite return: such jobs come first, in order of precedence.

The limit is checked at node boundaries as printed (lines 18-20); what the last node took beyond it is given back, last
step first, so that the allocation is a prefix of the greedy order that keeps the limit. A job whose smallest gang
exceeds the limit on an otherwise idle cluster even at its lowest control value is passed over; in the algorithm as
printed it would hold up all behind it.

Source: PowerFlow section 5.2, eq. 20, Algorithm 1 lines 2-20.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.policies.powerflow.config import PowerflowConfig


@dataclass(frozen=True)
class Choices:
    """What each job could have: speed and power by gang size and control value.

    Rows are jobs in order of precedence (users' priorities, then submission), which breaks every tie.
    """

    gpus: Ints  #: (n_jobs, n_sizes) gang sizes, ascending along a row; 0 beyond a job's last size
    speed: Floats  #: (n_jobs, n_sizes, n_values) seconds of work done per second; 0 where the job has no such choice
    power_w: Floats
    """The same shape: the whole gang's draw with its share of the hosts, watts; above 0 where ``speed`` is."""

    def __post_init__(self) -> None:
        if self.gpus.ndim != 2 or self.speed.shape[:2] != self.gpus.shape or self.speed.shape != self.power_w.shape:
            raise DomainError(
                "choices need one size per job and level, and a speed and a power per control value of each"
            )
        runs = self.speed > 0
        if not (np.isfinite(self.speed).all() and (self.power_w[runs] > 0).all()):
            raise DomainError("speeds are finite, and whatever runs draws power")
        if bool((runs.any(axis=2) != (self.gpus > 0)).any()):
            raise DomainError("a gang size has at least one control value, and none beyond a job's last size")

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def sizes(self) -> Ints:
        """How many gang sizes each job has: (n_jobs,)."""
        return np.count_nonzero(self.gpus, axis=1)

    @cached_property
    def most_efficient(self) -> Ints:
        """The control value with the least energy per work at each size (f0 of Algorithm 1): (n_jobs, n_sizes)."""
        energy = np.divide(self.power_w, self.speed, out=np.full(self.speed.shape, np.inf), where=self.speed > 0)
        return energy.argmin(axis=2)

    def at(self, sizes: Ints) -> tuple[Floats, Floats]:
        """Return speed and power by control value at one size of each job: (n_jobs,) to (n_jobs, n_values) each."""
        rows = np.arange(len(self))
        return self.speed[rows, sizes], self.power_w[rows, sizes]


FIRST, FREE, PAID, NEVER = range(4)
"""Kinds of steps, best first: to a first gang; faster for no more energy; faster for more energy; not faster."""


@dataclass(frozen=True)
class Room:
    """The devices and the power to share out."""

    gpus: Ints  #: (n_gpu_models,) number of devices of each GPU model
    idle_w: Floats  #: (n_gpu_models,) draw of a free device while its node is on, watts
    gpus_per_node: int  #: The limit is checked at multiples of this number of GPUs
    limit_w: float  #: What the cluster may draw, watts; inf for no limit
    other_w: float  #: What it draws in addition to the jobs and those devices, watts
    stays_on: Ints  #: (n_gpu_models,) how many of the devices are on nodes that stay on when unused

    def idle_draw_w(self, gpu_model: int, held: int) -> float:
        """Return what a model's free devices draw while this many are held, watts.

        Gangs are assumed to be packed: first onto nodes that stay on, then onto others, filling each; only the last has
        free devices.
        """
        gpus, on, idle_w = self._by_model[gpu_model]
        free = on - held if held < on else min((on - held) % max(self.gpus_per_node, 1), gpus - held)
        return free * idle_w

    @property
    def depends_on_placement(self) -> bool:
        """Whether some nodes stay on and others do not, so that it matters where a gang is placed."""
        return bool(((self.stays_on > 0) & (self.stays_on < self.gpus)).any())

    def wherever_placed(self) -> Room:
        """Return a room in which no node stays on: an upper bound on the draw, wherever gangs are placed."""
        other_w = self.other_w + float(self.stays_on @ self.idle_w)
        return replace(self, other_w=other_w, stays_on=np.zeros_like(self.stays_on))

    @cached_property
    def _by_model(self) -> list[tuple[int, int, float]]:
        return list(zip(self.gpus.tolist(), self.stays_on.tolist(), self.idle_w.tolist(), strict=True))


def allocate_gpus(
    choices: Choices, room: Room, *, gpu_model: Ints, keeps: Bools, work_s: Floats, config: PowerflowConfig
) -> Ints:
    """Return the size each job should have: (n_jobs,) index into its row of ``choices.gpus``, -1 for none.

    Args:
        room: Devices and power, including those of ``keeps``.
        gpu_model: (n_jobs,) index of the GPU model the job would run on.
        keeps: (n_jobs,) which jobs have their first size whatever happens to the others; counted before all steps, even
            where that exceeds the room.
        work_s: (n_jobs,) seconds of work left at speed 1, NaN where unknown; the greedy as printed does not use it.
        config: Says how the greedy differs from the paper: ``marginal``, ``queue`` and ``at_limit``.
    """
    kind, order, draw_w = _steps(choices, work_s, config)
    left_w = _left_alone_w(choices.gpus[:, 0], gpu_model, room)
    lowest_w = np.where(choices.speed[:, 0] > 0, choices.power_w[:, 0], np.inf).min(axis=1)
    draw_w[:, 0] = np.where(draw_w[:, 0] <= left_w, draw_w[:, 0], lowest_w)
    possible = lowest_w <= left_w
    walk = _Walk(choices.gpus, draw_w, gpu_model, room, stops=config.at_limit == "stop")
    for job in np.flatnonzero(keeps).tolist():
        walk.take(job)
    walk.begin()
    sizes: list[int] = choices.sizes.tolist()
    kinds, orders = kind.tolist(), order.tolist()
    at = walk.size
    heap = [
        (kinds[job][at[job] + 1], orders[job][at[job] + 1], job)
        for job in np.flatnonzero(possible | keeps).tolist()
        if at[job] + 1 < sizes[job]
    ]
    heapify(heap)
    while heap and heap[0][0] != NEVER:
        _, _, job = heappop(heap)
        if not walk.fits(job):
            continue
        if walk.take(job):
            break
        following = at[job] + 1
        if following < sizes[job]:
            heappush(heap, (kinds[job][following], orders[job][following], job))
    walk.give_back()
    return np.array(at, dtype=np.int64)


class _Walk:
    """The steps taken so far, and what they leave."""

    def __init__(self, gpus: Ints, draw_w: Floats, gpu_model: Ints, room: Room, *, stops: bool) -> None:
        self.size = [-1] * len(gpus)  #: The index of each job's present size, -1 for none
        self._more: list[list[int]] = np.diff(gpus, axis=1, prepend=0).tolist()
        self._more_w: list[list[float]] = np.diff(draw_w, axis=1, prepend=0.0).tolist()
        self._gpu_model: list[int] = gpu_model.tolist()
        self._room = room
        self._gpus: list[int] = room.gpus.tolist()
        self._per_node = max(room.gpus_per_node, 1)
        self._held = [0] * len(self._gpus)
        self._idle_w = [room.idle_draw_w(each, 0) for each in range(len(self._gpus))]
        self._limit_w, self._power_w = room.limit_w, room.other_w + sum(self._idle_w)
        self._stops = stops
        self._all_held = 0
        self._trail: list[int] = []

    def begin(self) -> None:
        """Forget the steps so far, so that they cannot be given back."""
        self._trail.clear()

    def fits(self, job: int) -> bool:
        """Whether there are devices for the job's next step, and power if every step is checked."""
        at, gpu_model = self.size[job] + 1, self._gpu_model[job]
        held = self._held[gpu_model] + self._more[job][at]
        if held > self._gpus[gpu_model]:
            return False
        if self._stops:
            return True
        idle_w = self._room.idle_draw_w(gpu_model, held) - self._idle_w[gpu_model]
        return self._power_w + self._more_w[job][at] + idle_w <= self._limit_w

    def take(self, job: int) -> bool:
        """Take the job's next step; return whether the allocation ends at this node boundary (lines 18-20)."""
        at = self.size[job] = self.size[job] + 1
        more = self._more[job][at]
        crosses = self._all_held % self._per_node + more >= self._per_node
        self._all_held += more
        self._count(self._gpu_model[job], more, self._more_w[job][at])
        self._trail.append(job)
        return crosses and self._stops and self._power_w >= self._limit_w

    def give_back(self) -> None:
        """Undo steps, last first, until the limit holds."""
        while self._trail and self._power_w > self._limit_w:
            job = self._trail.pop()
            at = self.size[job]
            self._count(self._gpu_model[job], -self._more[job][at], -self._more_w[job][at])
            self.size[job] -= 1

    def _count(self, gpu_model: int, gpus: int, gang_w: float) -> None:
        self._held[gpu_model] += gpus
        idle_w = self._room.idle_draw_w(gpu_model, self._held[gpu_model])
        self._power_w += gang_w + idle_w - self._idle_w[gpu_model]
        self._idle_w[gpu_model] = idle_w


def known_work_s(work_s: Floats) -> Floats:
    """Return the work, with the median in place of unknown values; 1 if nothing is known; (n,) to (n,)."""
    known = np.isfinite(work_s)
    return np.where(known, work_s, np.median(work_s[known]) if known.any() else 1.0)


def _left_alone_w(gpus: Ints, gpu_model: Ints, room: Room) -> Floats:
    """Return the power that the limit leaves for a gang that is alone on the cluster: (n_jobs,) watts."""
    nobody_w = [room.idle_draw_w(each, 0) for each in range(room.gpus.size)]
    base_w = room.other_w + sum(nobody_w)
    kinds: list[tuple[int, int]] = list(zip(gpu_model.tolist(), gpus.tolist(), strict=True))
    idle_w = {(each, held): room.idle_draw_w(each, held) - nobody_w[each] for each, held in set(kinds)}
    return room.limit_w - base_w - np.fromiter(map(idle_w.__getitem__, kinds), np.float64, len(kinds))


def _steps(choices: Choices, work_s: Floats, config: PowerflowConfig) -> tuple[Ints, Floats, Floats]:
    """Return the kind of each step, its order within that kind, smaller first, and its draw: all (n_jobs, n_sizes).

    Step k leads to size k, at its most efficient control value, watts. Eq. 20 for the steps beyond the first, with
    n + 1 read as the next size.
    """
    best = choices.most_efficient[:, :, None]
    speed = np.take_along_axis(choices.speed, best, axis=2)[:, :, 0]
    power_w = np.take_along_axis(choices.power_w, best, axis=2)[:, :, 0]
    exists = choices.gpus > 0
    time_s = np.divide(1.0, speed, out=np.zeros(speed.shape), where=exists)
    energy_j = power_w * time_s
    gain, cost = -np.diff(time_s, axis=1, prepend=0.0), np.diff(energy_j, axis=1, prepend=0.0)
    if config.marginal == "energy_and_gpu":
        gain = gain / np.maximum(np.diff(choices.gpus, axis=1, prepend=0), 1)
    elif config.marginal == "power":
        gain, cost = gain * known_work_s(work_s)[:, None], np.diff(power_w, axis=1, prepend=0.0)
    kind = np.where(gain <= 0, NEVER, np.where(cost <= 0, FREE, PAID))
    order = np.divide(-gain, cost, out=-gain, where=kind == PAID)
    kind[:, 0] = FIRST
    left_s = work_s * time_s[:, 0] if config.queue == "shortest" else np.zeros(len(choices))
    order[:, 0] = np.where(np.isnan(left_s), np.inf, left_s)
    return kind, order, power_w
