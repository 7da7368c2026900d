"""``fair+``: any policy, with its GPUs shared between tenants by their weights.

The wrapped policy ranks the jobs as it always does; whose job comes next is decided between tenants
(``services.core.cycle.tenants``). What each tenant has used fades with a half-life and is the wrapper's memory. If all
jobs belong to one tenant, the wrapped policy decides alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic

from services.core.cycle.plan import Plan, Start
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.snapshot import JobTable, Snapshot, TenantShares
from services.core.domain.ids import JobId
from services.core.policies.levers import Effect, ExplainsLevers
from services.core.policies.memory import dumped, loaded
from services.core.policies.parameters import check_parameters, seconds

FORGOTTEN_GPU_S = 1.0  #: Usage below this is dropped
OPTIONAL = ("packs", "placement", "power_limit_w", "power_error_w")
"""What a policy may have besides ``Policy``: ``PacksJobs``, ``PlacesGangs`` and ``PowerLimited``."""


def mean_life_s(half_life_s: float) -> float:
    """Return how long usage counts on average, seconds."""
    return half_life_s / math.log(2.0)


@dataclass(frozen=True)
class Usage:
    """Tenants' GPU time that still counts."""

    at_s: float = 0.0  #: The time to which it applies, UTC seconds
    used_gpu_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """GPU seconds by tenant; each second counts half once a half-life has passed."""
    gpus: Mapping[str, int] = field(default_factory=dict[str, int])  #: What each tenant holds from then on
    starts: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    """The GPUs of the gangs among those that the round was to start."""

    def as_started(self, jobs: JobTable) -> Usage:
        """Return the usage with gangs as they did start: an order of the grid may have held or narrowed them."""
        gpus = dict(self.gpus)
        for job_id, planned in self.starts.items():
            if (job := jobs.index.get(job_id)) is not None:
                tenant = jobs.tenants[job]
                gpus[tenant] = max(gpus.get(tenant, 0) + jobs.gpus.item(job) - planned, 0)
        return replace(self, gpus=gpus)

    def at(self, now_s: float, half_life_s: float) -> Usage:
        """Return the usage at a later time, if all kept what they hold; an earlier time changes nothing."""
        passed_s = now_s - self.at_s
        if passed_s <= 0:
            return self
        life_s = mean_life_s(half_life_s)
        left = math.exp(-passed_s / life_s)
        used = {
            tenant: self.used_gpu_s.get(tenant, 0.0) * left + self.gpus.get(tenant, 0) * life_s * (1.0 - left)
            for tenant in {**self.used_gpu_s, **self.gpus}
        }
        return Usage(now_s, {tenant: gpu_s for tenant, gpu_s in used.items() if gpu_s >= FORGOTTEN_GPU_S}, self.gpus)


def held_after(snapshot: Snapshot, starts: Mapping[JobId, int]) -> dict[str, int]:
    """Return the GPUs that each tenant holds, here and in cells, once these gangs have started.

    Stopping gangs still hold theirs.
    """
    jobs = snapshot.jobs
    held = Counter(jobs.gpus_by_tenant()) + Counter(snapshot.tenant_gpus_in_cells)
    for job_id, gpus in starts.items():
        tenant = jobs.tenants[jobs.index[job_id]]
        held[tenant] += gpus
    return dict(sorted(held.items()))


def _starts(snapshot: Snapshot, plan: Plan) -> dict[JobId, int]:
    starts = (each for each in plan.actions if isinstance(each, Start))
    return {each.job_id: each.gpus for each in starts if each.job_id in snapshot.jobs.index}


@dataclass(frozen=True)
class FairConfig:
    """The wrapper's own parameters, next to those of the wrapped policy."""

    share_half_life_s: float = seconds(
        604_800.0,
        "After this long, GPU time that a tenant has used counts half against it. Default: a week, Slurm's "
        "PriorityDecayHalfLife.",
        minimum=60.0,
        maximum=3.2e8,
    )
    share_turn_s: float = seconds(
        1_800.0,
        "For how long a running job keeps its GPUs from a tenant that has used as much as its own: how often two "
        "tenants take turns on GPUs that they cannot divide. Default: ours.",
        maximum=3.2e8,
    )

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class FairMemory(Generic[Memory]):
    """The memory of the wrapper, including the wrapped policy's."""

    inner: Memory  #: The wrapped policy's memory
    usage: Usage = field(default_factory=Usage)  #: What tenants have used


class Fair(Generic[Memory]):
    """A policy that shares GPUs between tenants, and within each decides as the wrapped one does.

    ``config`` has the parameters of both.
    """

    def __init__(self, name: str, inner: Policy[Memory], config: FairConfig) -> None:
        self.name = name
        self.inner = inner
        self.config = config

    def initial(self) -> FairMemory[Memory]:
        return FairMemory(self.inner.initial())

    def decide(self, snapshot: Snapshot, memory: FairMemory[Memory]) -> tuple[Plan, FairMemory[Memory]]:
        """Return the wrapped policy's plan, with jobs reordered between tenants."""
        config = self.config
        usage = memory.usage.as_started(snapshot.jobs).at(snapshot.now_s, config.share_half_life_s)
        if len({*snapshot.jobs.tenants}) > 1:
            life_s = mean_life_s(config.share_half_life_s)
            snapshot = snapshot.again(shares=TenantShares(usage.used_gpu_s, life_s, config.share_turn_s))
        plan, inner = self.inner.decide(snapshot, memory.inner)
        starts = _starts(snapshot, plan)
        return plan, FairMemory(inner, Usage(snapshot.now_s, usage.used_gpu_s, held_after(snapshot, starts), starts))

    def dump(self, memory: FairMemory[Memory]) -> dict[str, Any]:
        return {"inner": self.inner.dump(memory.inner), "usage": dumped(memory.usage)}

    def load(self, stored: dict[str, Any]) -> FairMemory[Memory]:
        return FairMemory(self.inner.load(stored.get("inner", {})), loaded(Usage, stored.get("usage", {})))


def fair(name: str, inner: Policy[Any], config: FairConfig) -> Fair[Any]:
    """Return a policy with the wrapper around it; what it may do besides, it still does."""
    wrapped = Fair(name, inner, config)
    for optional in OPTIONAL:
        if hasattr(inner, optional):
            setattr(wrapped, optional, getattr(inner, optional))
    if isinstance(inner, ExplainsLevers):

        def levers(snapshot: Snapshot, memory: FairMemory[Any], job_id: JobId) -> tuple[Effect, ...]:
            return inner.levers(snapshot, memory.inner, job_id)

        setattr(wrapped, "levers", levers)  # noqa: B010
    return wrapped
