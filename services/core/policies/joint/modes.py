"""The gangs that jobs may run as, and what each costs: ``(P(g) + w / c) / speed(g)``.

Time beyond what the gang that the user asked for would take counts ``JointConfig.lost_times`` times.

``P(g)`` follows from the mean draw of one of the job's GPUs so far. The part of a step in which the GPUs of a gang wait
for each other, inferred from how far its speed falls short of linear scaling from the smallest gang, is drawn at
``WAITING_SHARE``.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.core.cycle.capacity import Capacity, possible_sizes, powers_of_two
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.policies.batches import goodput_of
from services.core.policies.joint.config import JointConfig
from services.core.profiles.boards import board_of

HOST_SHARE = 1 / 6
"""Of its board's peak that the host of a busy GPU draws where no meter says: 58 W beside an RTX 3090, 67 W beside an
A100. GREEN's 28 kW peak on 64 boards of 350 W leaves a quarter at most (section 8.1)."""


def models_of(snapshot: Snapshot) -> Ints:
    """Return the index of the GPU model that each job has or, if it holds nothing, may have: (n_jobs,)."""
    jobs = snapshot.jobs
    if len(snapshot.gpu_models) == 1:
        return np.zeros(len(jobs), dtype=np.int64)
    held = Capacity(snapshot).model
    return np.where(held >= 0, held, jobs.eligible.argmax(axis=1))


def hosts_w(snapshot: Snapshot, config: JointConfig) -> Floats:
    """Return what hosts draw for each busy GPU: (n_gpu_models,) watts."""
    if config.host_w is not None:
        return np.full(len(snapshot.gpu_models), config.host_w)
    by_board_w = np.array([HOST_SHARE * board_of(name).peak_w for name in snapshot.gpu_models])
    return np.where(snapshot.host_w > 0, snapshot.host_w, by_board_w) if snapshot.host_w.size else by_board_w


WAITING_SHARE = 0.3  #: Of its draw at work that a GPU takes while it waits for others, idle draw included
LEAST_MORE = 1e-3
"""GPU seconds that a step takes more at least, per second of work: tuned batches may scale better than linearly."""
UNKNOWN_W = 250.0  #: Draw of a GPU of a job before any was measured


@dataclass(frozen=True)
class Modes:
    """The gangs that some jobs may have; 0 GPUs and infinite cost beyond a job's last size."""

    gpus: Ints  #: (n_jobs, n_sizes) gang sizes, ascending
    ratio: Floats  #: (n_jobs, n_sizes) speed relative to that at the smallest size
    watts: Floats  #: (n_jobs, n_sizes) draw, including the hosts
    cost: Floats  #: (n_jobs, n_sizes) watts plus the worth of time, per unit of speed

    @cached_property
    def best(self) -> Ints:
        """(n_jobs,) the column with the least cost; ties go to the smallest gang."""
        return self.cost.argmin(axis=1)

    @property
    def gain(self) -> Floats:
        """(n_jobs, n_sizes - 1) the cost that each step to the next size saves per additional GPU second.

        ``(cost(g) - cost(g')) / (g' / speed(g') - g / speed(g))``; -inf beyond the last.
        """
        held = np.where(self.gpus > 0, self.gpus / self.ratio, np.inf)
        some = self.gpus[:, 1:] > 0
        with np.errstate(invalid="ignore"):
            return np.where(some, -np.diff(self.cost, axis=1) / np.maximum(np.diff(held, axis=1), LEAST_MORE), -np.inf)

    def column_of(self, gpus: Ints) -> Ints:
        """Return the column whose size is nearest to each job's: (n_jobs,) to (n_jobs,)."""
        far = np.where(self.gpus > 0, np.abs(self.gpus - gpus[:, None]), np.iinfo(np.int64).max)
        return far.argmin(axis=1)


def modes_of(snapshot: Snapshot, which: Ints, hour_w: float | Floats, config: JointConfig) -> Modes:
    """Return the modes of these jobs.

    Args:
        which: (n_jobs,) indices into the job table, at least one.
        hour_w: ``Worth.hour_w`` for them: (n_jobs,) watts, or one number for all.
    """
    jobs = snapshot.jobs
    low = jobs.min_gpus[which]
    high = possible_sizes(snapshot, jobs.max_gpus[which], which)
    if config.widest_gpus is not None:
        high = np.minimum(high, np.maximum(config.widest_gpus, low))
    gpus = powers_of_two(low, high, jobs.step_gpus[which])
    some = gpus > 0
    ratio, watts = _speed_and_watts(snapshot, which, gpus, gpus[:, 0], config)
    worth = np.asarray(hour_w, dtype=np.float64).reshape(-1, 1)
    cost = (watts + worth) / ratio
    if config.lost_times > 1.0:
        lead = lead_of(snapshot, which, gpus[:, 0])[:, None]
        cost = cost + (config.lost_times - 1.0) * worth * np.maximum(1.0 / ratio - lead, 0.0)
    return Modes(gpus, ratio, watts, np.where(some, cost, np.inf))


def lead_of(snapshot: Snapshot, job: int | Ints, gpus: int | Ints) -> Floats:
    """Return the predicted speed of jobs at a size relative to that at the size and batch their users asked for.

    For one job, or for indices and sizes of one shape.
    """
    jobs, fixed, tuned = snapshot.jobs, snapshot.speed_curves, snapshot.goodput_curves
    asked, row, widest = jobs.asked_gpus[job], jobs.speed_curve[job], snapshot.nodes.widest
    lead = gpus / asked
    if fixed.size:
        most = fixed.shape[-1]
        predicted = fixed[row, np.minimum(gpus, most) - 1] / fixed[row, np.minimum(asked, most) - 1]
        lead = np.where(row >= 0, predicted, lead)
    if tuned.size:
        row, most, gains = jobs.goodput_curve[job], tuned.shape[-1], snapshot.goodput_gains
        to = row, (asked > widest) * 1, np.minimum(asked, most) - 1
        predicted = tuned[row, np.greater(gpus, widest) * 1, np.minimum(gpus, most) - 1] / tuned[to]
        lead = np.where(row >= 0, predicted * gains[to] if gains.size else predicted, lead)
    return lead


def asked_w(snapshot: Snapshot, which: Ints, config: JointConfig) -> Floats:
    """Return what each of these jobs would draw, with its hosts, at the size its user asked for: (n_jobs,) watts."""
    jobs = snapshot.jobs
    asked = possible_sizes(snapshot, jobs.asked_gpus[which], which)
    return _speed_and_watts(snapshot, which, asked[:, None], jobs.min_gpus[which], config)[1][:, 0]


def _speed_and_watts(
    snapshot: Snapshot, which: Ints, gpus: Ints, smallest: Ints, config: JointConfig
) -> tuple[Floats, Floats]:
    """Return the speed of gangs relative to the smallest, and their draw with hosts: (n_jobs, n_sizes), watts."""
    rows = np.arange(which.size)[:, None]
    of_node, _ = goodput_of(snapshot, which, int(max(gpus.max(), smallest.max())), snapshot.nodes.widest)
    at = np.maximum(gpus, 1)
    ratio = np.where(gpus > 0, of_node[rows, at - 1] / of_node[rows, smallest[:, None] - 1], 1.0)
    together = np.minimum(ratio * smallest[:, None] / at, 1.0)
    alone_w = _gpu_w(snapshot.jobs.gpu_power_w, which)[:, None]
    host_w = hosts_w(snapshot, config)[models_of(snapshot)[which]][:, None]
    return ratio, gpus * (alone_w * (together + (1.0 - together) * WAITING_SHARE) + host_w)


def _gpu_w(measured_w: Floats, which: Ints) -> Floats:
    """Return the draw of one GPU of each of these jobs; for those not measured, the mean of all measured jobs."""
    known = measured_w[np.isfinite(measured_w)]
    typical = float(known.mean()) if known.size else UNKNOWN_W
    return np.where(np.isfinite(measured_w[which]), measured_w[which], typical)
