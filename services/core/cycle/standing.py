"""What tenants are guaranteed of the GPUs that there are, and the most that they may hold; see ``cycle.tenants``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from services.core.cycle.capacity import Capacity
from services.core.cycle.snapshot import PREEMPTING, JobTable, Snapshot
from services.core.domain.arrays import Bools
from services.core.domain.reasons import Reason


class Standing(NamedTuple):
    """What there is to divide, and what of it tenants are guaranteed."""

    guaranteed: Mapping[str, int]  #: GPUs by tenant
    spare: int  #: GPUs that are guaranteed to nobody
    counts: Bools  #: (n_jobs,) whether what the job holds or asks for is divided

    @classmethod
    def of(cls, snapshot: Snapshot) -> Standing:
        """Return the standing of a snapshot; guarantees beyond the GPUs that take work are reduced in proportion."""
        nodes, jobs, total = snapshot.nodes, snapshot.jobs, snapshot.total_gpus
        counts = np.ones(len(jobs), dtype=np.bool_)
        if snapshot.undivided:
            apart = np.isin(np.arange(len(snapshot.gpu_models)), [*snapshot.undivided])
            total -= int(nodes.gpus[nodes.schedulable & apart[nodes.gpu_model]].sum())
            model = Capacity(snapshot).model
            counts = np.where(model >= 0, ~apart[model], ~(jobs.eligible[:, apart].any(axis=1)))
        promised = sum(snapshot.tenant_guarantees.values())
        guaranteed = {
            tenant: min(gpus * min(total, promised) // max(promised, 1), snapshot.tenant_gpu_quota.get(tenant, gpus))
            for tenant, gpus in snapshot.tenant_guarantees.items()
        }
        return cls(guaranteed, total - sum(guaranteed.values()), counts)

    def borrowed(self, jobs: JobTable, which: Bools) -> list[int]:
        """Return those of these gangs, (n_jobs,), that are borrowed; those that began last come first."""
        left, borrowed = dict(self.guaranteed), list[int]()
        since_s = jobs.waiting_since_s
        turns = sorted(
            np.flatnonzero(which & self.counts).tolist(),
            key=lambda job: (jobs.preemptible[job], since_s[job], jobs.ids[job]),
        )
        for job in turns:
            tenant, gpus = jobs.tenants[job], jobs.gpus.item(job)
            if left.get(tenant, 0) >= gpus:
                left[tenant] -= gpus
            else:
                borrowed.append(job)
        return sorted(borrowed, key=lambda job: (-since_s[job], jobs.ids[job]))


class Quota:
    """GPUs by tenant: the most each may hold, what it holds now, and what it will hold once the ranking is filled."""

    def __init__(self, snapshot: Snapshot, *, all_runs_on: bool) -> None:
        """Count what is held; ``all_runs_on`` is False if preemptible jobs are yet to be ranked."""
        jobs = snapshot.jobs
        self._jobs, self._limits = jobs, snapshot.tenant_gpu_quota
        self._held = jobs.gpus_by_tenant()
        stays = jobs.phase != PREEMPTING
        self._claimed = jobs.gpus_by_tenant(stays if all_runs_on else stays & ~jobs.preemptible)
        self._standing: Standing | None = None
        if any(snapshot.tenant_guarantees.values()):
            self._standing = Standing.of(snapshot)
            self._firm = jobs.gpus_by_tenant(stays & ~jobs.preemptible & self._standing.counts)
            self._lent = sum(max(gpus - self._guaranteed(tenant), 0) for tenant, gpus in self._firm.items())

    @classmethod
    def of(cls, snapshot: Snapshot, *, all_runs_on: bool) -> Quota | None:
        needed = snapshot.tenant_gpu_quota or snapshot.tenant_guarantees
        return cls(snapshot, all_runs_on=all_runs_on) if needed else None

    def may_refuse(self) -> Bools:
        """Return which jobs it could refuse: (n_jobs,)."""
        jobs = self._jobs
        limited = np.fromiter(map(self._limits.__contains__, jobs.tenants), np.bool_, len(jobs))
        return limited | ~jobs.preemptible

    def refusal(self, job: int, gpus: int) -> Reason | None:
        """Return why a job's tenant may not have so many more GPUs, given what was claimed before; None if it may."""
        tenant = self._jobs.tenants[job]
        limit = self._limits.get(tenant)
        if limit is not None and self._claimed.get(tenant, 0) + gpus > limit:
            return Reason.TENANT_QUOTA
        lent = self._to_lend(job, gpus)
        return Reason.GUARANTEED if lent > 0 and self._lent + lent > self._spare else None

    def claim(self, job: int, gpus: int) -> None:
        tenant = self._jobs.tenants[job]
        self._claimed[tenant] = self._claimed.get(tenant, 0) + gpus
        if self._standing is not None and not self._jobs.preemptible[job] and self._standing.counts[job]:
            self._lent += self._to_lend(job, gpus)
            self._firm[tenant] = self._firm.get(tenant, 0) + gpus

    def take_now(self, job: int, gpus: int) -> bool:
        """Count GPUs that the job holds from now on; return False if its tenant must release some first."""
        tenant = self._jobs.tenants[job]
        limit = self._limits.get(tenant)
        held = self._held.get(tenant, 0) + gpus
        if limit is not None and held > limit:
            return False
        self._held[tenant] = held
        return True

    @property
    def _spare(self) -> int:
        return 0 if self._standing is None else self._standing.spare

    def _guaranteed(self, tenant: str) -> int:
        return 0 if self._standing is None else self._standing.guaranteed.get(tenant, 0)

    def _to_lend(self, job: int, gpus: int) -> int:
        """Return how many GPUs a job would borrow for good, because it may not be stopped."""
        if self._standing is None or self._jobs.preemptible[job] or not self._standing.counts[job]:
            return 0
        tenant = self._jobs.tenants[job]
        firm, guaranteed = self._firm.get(tenant, 0), self._guaranteed(tenant)
        return max(firm + gpus - guaranteed, 0) - max(firm - guaranteed, 0)
