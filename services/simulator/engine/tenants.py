"""How much of their shares tenants get while they have jobs waiting."""

from collections.abc import Mapping

import numpy as np

from services.core.cycle.snapshot import QUEUED
from services.simulator.engine.live import IntRow, LiveJobs
from services.simulator.workload import Workload


class TenantTime:
    """GPU time of tenants with waiting jobs, compared with that of their weighted shares.

    Shares are divided among the tenants that have jobs at the time, waiting or running; none exceeds what its jobs can
    use at their smallest gangs. The state after a round is assumed to last until the next.
    """

    def __init__(self, workload: Workload, weights: Mapping[str, float], total_gpus: int) -> None:
        """Take the trace's tenants and their weights, 1 where none is given."""
        self.names = sorted(set(workload.tenants))
        code = {tenant: at for at, tenant in enumerate(self.names)}
        self._code = np.fromiter(map(code.__getitem__, workload.tenants), np.int64, len(workload))
        self._weight = np.array([weights.get(tenant, 1.0) for tenant in self.names])
        self._total_gpus = total_gpus
        self._held_s, self._due_s = np.zeros(len(self.names)), np.zeros(len(self.names))
        self._held, self._due = np.zeros(len(self.names)), np.zeros(len(self.names))
        self._since_s = 0.0

    def sample(self, now_s: float, live: LiveJobs) -> None:
        """Count the time since the last sample at that sample's state, and record the new state."""
        self._count(now_s)
        ints = live.ints[:, : live.count]
        tenant, most = self._code[ints[IntRow.ROW]], len(self.names)
        queued = ints[IntRow.PHASE] == QUEUED
        wanted = np.bincount(tenant[queued], ints[IntRow.MIN][queued], most)
        waits = wanted > 0
        weight = np.where(np.bincount(tenant, minlength=most) > 0, self._weight, 0.0)
        held = np.bincount(tenant, ints[IntRow.GPUS], most).astype(np.float64)
        share = self._total_gpus * weight / max(float(weight.sum()), 1e-9)
        self._held = np.where(waits, held, 0.0)
        self._due = np.where(waits, np.minimum(share, held + wanted), 0.0)

    def served(self, now_s: float) -> dict[str, float]:
        """Return each waiting tenant's GPU time as a fraction of that of its share: 1 is exactly its share."""
        self._count(now_s)
        known = np.flatnonzero(self._due_s > 0).tolist()
        return {self.names[at]: float(self._held_s[at] / self._due_s[at]) for at in known}

    def _count(self, now_s: float) -> None:
        self._held_s += self._held * (now_s - self._since_s)
        self._due_s += self._due * (now_s - self._since_s)
        self._since_s = now_s
