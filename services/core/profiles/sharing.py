"""What two jobs do on one GPU, and what each of them draws.

Each keeps the GPU busy for a share of the time. Shares of two jobs that sum to 1 or less fit side by side; beyond that
both are slowed down in proportion. In addition, sharing itself costs both of them ``SHARING_COST`` of their speed. The
form and the figure come from Gavel's measurements of 26 jobs in pairs on one V100 (Narayanan et al., OSDI'20): with one
share per job and one cost fitted to 330 pairs, the form is off by 22 % of a pair's joint speed on average; on a P100 by
4 % and on a K80 by 6 %, with costs of 0.29 and 0.28 (``lab/results/powerflow.md``). What is not measured there is how
busy one of our jobs keeps a GPU. **We take it to be the share of the board's power range that it draws**, so that a
pair never draws more than the board's limit.
"""

import math
from dataclasses import dataclass

from services.core.domain.errors import DomainError

SHARING_COST = 0.19
"""The share of its speed that each of two jobs loses by not being alone, apart from what the other one's work takes."""


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """A job on a GPU that it shares."""

    pace: float  #: Its speed relative to its speed alone, above 0
    gpu_w: float  #: Its part of what the GPU draws, watts; the two jobs' parts add up to all of it


def pace_beside(busy: float, others_busy: float) -> float:
    """Return the speed of two jobs on one GPU relative to each alone, given how busy each keeps it alone, 0 to 1."""
    return (1.0 - SHARING_COST) / max(1.0, busy + others_busy)


def shared_gpu(alone_w: float, other_w: float, *, idle_w: float, limit_w: float) -> SharedGpu:
    """Return what a job does when it shares a GPU with another. Its work takes the same energy above idle as alone.

    Args:
        alone_w, other_w: What the GPU draws with either job alone, watts; at least ``idle_w`` is assumed.
        idle_w: What it draws idle; each job is charged half.
        limit_w: What it may draw.

    Raises:
        DomainError: a power is not finite, or the limit is not above the idle draw.
    """
    if not all(math.isfinite(power_w) for power_w in (alone_w, other_w, idle_w, limit_w)) or not limit_w > idle_w >= 0:
        raise DomainError("powers of a shared GPU are finite, and its limit is above its idle draw")
    work_w = [min(max(power_w - idle_w, 0.0), limit_w - idle_w) for power_w in (alone_w, other_w)]
    pace = pace_beside(*(each / (limit_w - idle_w) for each in work_w))
    return SharedGpu(pace, idle_w / 2 + work_w[0] * pace)
