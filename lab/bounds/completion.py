"""The least sum of completion times any schedule could reach, and what A-SRPT promises over it.

A cluster of G GPUs does no more than one machine as fast as all of them that may cut work at will. On that machine
shortest remaining first is optimal; and no job ends before its submission plus its own shortest time.

The theorem is stated for a virtual machine that always runs. It also holds for one that stands still while the head of
the queue is held up. Let ``c`` be when a job ends on that machine by the machine's own clock, which stops with it:

- By that clock no job arrives later than it really did. So the sum of ``c`` is at most that of a machine that always
  runs: shortest remaining first is optimal, and earlier arrivals do not make the optimum longer. Lemma 3 holds as
  printed.
- The jobs that end on the machine no later than this one have a length of at most ``c``, taken together. While the
  machine stands still, or this job waits in the queue, one of them either waits for better servers, which they do for
  at most ``tau c`` in all, or lacks GPUs; then more than ``G - g_max`` GPUs are busy with the others, for at most
  ``rho G c / (G - g_max)`` in all, and longer only by what was predicted too short. So a job starts within
  ``(1 + tau + rho G / (G - g_max)) c`` plus the term of the error; summed over all jobs that is Lemma 2.

As in the paper, this leaves aside priorities, quotas and tensor groups that find no server with enough room.

Source: A-SRPT, Lemma 1 (without its factor rho, since lengths here are lower bounds) and Theorem 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.policies.asrpt.virtual_machine import VirtualJob, VirtualMachine


def least_total_completion_s(submitted_s: Floats, shortest_s: Floats, gpus: Ints, cluster_gpus: int) -> float:
    """Return a lower bound on the sum of completion times, counted from the first submission.

    Args:
        submitted_s: (n_jobs,) ascending.
        shortest_s: (n_jobs,) what each takes at least, wherever it is placed.
        gpus: (n_jobs,) sizes of the gangs.
        cluster_gpus: Of the cluster.
    """
    first_s = float(submitted_s[0])
    rows = zip((submitted_s - first_s).tolist(), (shortest_s * gpus / cluster_gpus).tolist(), strict=True)
    jobs = [(at_s, VirtualJob(0, length_s, at_s, JobId(str(at)), length_s)) for at, (at_s, length_s) in enumerate(rows)]
    _, ended = VirtualMachine().run(jobs, float(np.finfo(np.float64).max))
    machine_s = sum(job.ended_s for job in ended)
    return max(machine_s, float((submitted_s - first_s + shortest_s).sum()))


@dataclass(frozen=True)
class Promise:
    """What Theorem 1 goes by.

    Attributes:
        rho: The largest ``alpha_max / alpha~min`` of any job.
        widest: The largest gang, ``g_max``.
        spread: The largest ``alpha_max`` over the smallest ``alpha_min``.
        error: Mean absolute error of the predictions, iterations.
        tau: As the policy's.
    """

    rho: float
    widest: int
    spread: float
    error: float
    tau: float

    def ratio(self, cluster_gpus: int) -> float:
        """Return the competitive ratio of Theorem 1.

        Raises:
            DomainError: a gang takes the whole cluster.
        """
        left = cluster_gpus - self.widest
        if left <= 0:
            raise DomainError("Theorem 1 says nothing where a gang takes the whole cluster")
        share = cluster_gpus / left
        perfect = (2 + self.tau + self.rho * share) * self.rho
        return perfect + 2 * self.rho * self.widest * self.spread * (1 + self.tau + (1 + self.rho) * share) * self.error
