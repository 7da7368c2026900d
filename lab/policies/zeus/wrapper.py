"""Any policy, with Zeus' choice of power limits on top of it.

The wrapped policy decides what runs; then every gang that runs or starts is put to the power limit that costs least, as
``services.core.policies.limits`` does it. GREEN's and PowerFlow's baselines combine Zeus with Tiresias so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic

from lab.policies.zeus.cost import least_cost
from services.core.cycle.plan import Plan
from services.core.cycle.policy import Memory, Policy
from services.core.cycle.snapshot import Snapshot
from services.core.domain.ids import JobId
from services.core.policies.limits import with_limits
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class ZeusConfig:
    """Zeus' own parameters; those of the wrapped policy stand beside them."""

    eta: float = parameter(
        0.5, "Weight of energy against time: 1 saves energy alone, 0 time alone.", minimum=0.0, maximum=1.0
    )
    profile_window_s: float = parameter(
        5.0, "How long an unknown kind of job is measured at each power limit.", unit="s", minimum=0.1, maximum=3600.0
    )

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class ZeusMemory(Generic[Memory]):
    """The memory of the wrapper, with the wrapped policy's.

    Attributes:
        inner: Of the wrapped policy.
        measured: The gangs whose measurement was requested and that still hold their GPUs, by job.
    """

    inner: Memory
    measured: frozenset[JobId] = field(default_factory=frozenset[JobId])


class Zeus(Generic[Memory]):
    """A policy whose jobs run at the power limit of least cost."""

    def __init__(self, name: str, inner: Policy[Memory], config: ZeusConfig) -> None:
        self.name = name
        self.inner = inner
        self.config = config

    def initial(self) -> ZeusMemory[Memory]:
        """Return the wrapped policy's first memory, and no measurement."""
        return ZeusMemory(self.inner.initial())

    def decide(self, snapshot: Snapshot, memory: ZeusMemory[Memory]) -> tuple[Plan, ZeusMemory[Memory]]:
        """Return the wrapped policy's plan with the power limits of all that runs by it."""
        plan, inner = self.inner.decide(snapshot, memory.inner)
        plan, measured = with_limits(
            snapshot,
            plan,
            memory.measured,
            self.config.profile_window_s,
            lambda gangs, curve: [least_cost(curve, self.config.eta)] * len(gangs),
        )
        return plan, ZeusMemory(inner, measured)

    def dump(self, memory: ZeusMemory[Memory]) -> dict[str, Any]:
        """Return both memories as JSON values."""
        return {"inner": self.inner.dump(memory.inner), "measured": sorted(memory.measured)}

    def load(self, stored: dict[str, Any]) -> ZeusMemory[Memory]:
        """Return the memories that ``dump`` wrote; what is missing is empty."""
        measured = frozenset(JobId(job_id) for job_id in stored.get("measured", []))
        return ZeusMemory(self.inner.load(stored.get("inner", {})), measured)
