"""What the hosts of busy GPUs draw: as measured, or as estimated from the board."""

import numpy as np

from services.core.cycle.capacity import Capacity
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
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
