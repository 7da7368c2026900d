"""What tenants have used, fading with a half-life."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.core.cycle.plan import Plan, Start
from services.core.cycle.snapshot import Snapshot

FORGOTTEN_GPU_S = 1.0  #: Usage below this is dropped


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

    def dump(self) -> dict[str, Any]:
        """Return the usage as JSON values."""
        return {"at_s": self.at_s, "used_gpu_s": dict(self.used_gpu_s), "gpus": dict(self.gpus)}

    @classmethod
    def load(cls, stored: Mapping[str, Any]) -> Usage:
        """Return the usage that ``dump`` wrote; missing parts are empty."""
        return cls(
            float(stored.get("at_s", 0.0)),
            {tenant: float(gpu_s) for tenant, gpu_s in stored.get("used_gpu_s", {}).items()},
            {tenant: int(gpus) for tenant, gpus in stored.get("gpus", {}).items()},
        )


def held_after(snapshot: Snapshot, plan: Plan) -> dict[str, int]:
    """Return the GPUs that each tenant holds once a plan's gangs have started; stopping gangs still hold theirs."""
    jobs = snapshot.jobs
    held: dict[str, int] = {}
    for job in jobs.gpus.nonzero()[0].tolist():
        held[jobs.tenants[job]] = held.get(jobs.tenants[job], 0) + int(jobs.gpus[job])
    index = jobs.index
    for start in plan.actions:
        if isinstance(start, Start) and start.job_id in index:
            tenant = jobs.tenants[index[start.job_id]]
            held[tenant] = held.get(tenant, 0) + start.gpus
    return dict(sorted(held.items()))
