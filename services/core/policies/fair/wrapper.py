"""Any policy, with its GPUs shared between tenants."""

from dataclasses import dataclass, field
from typing import Any, Generic

from services.core.cycle.plan import Plan
from services.core.cycle.policy import Memory, PacksJobs, PlacesGangs, Policy, PowerLimited
from services.core.cycle.snapshot import Snapshot, TenantShares
from services.core.policies.fair.config import FairConfig
from services.core.policies.fair.usage import Usage, held_after, mean_life_s


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

    @property
    def packs(self) -> bool:
        """Whether the wrapped policy lets jobs share GPUs."""
        return isinstance(self.inner, PacksJobs) and self.inner.packs

    def initial(self) -> FairMemory[Memory]:
        """Return the wrapped policy's initial memory, and no usage."""
        return FairMemory(self.inner.initial())

    def decide(self, snapshot: Snapshot, memory: FairMemory[Memory]) -> tuple[Plan, FairMemory[Memory]]:
        """Return the wrapped policy's plan, with jobs reordered between tenants."""
        config = self.config
        usage = memory.usage.at(snapshot.now_s, config.share_half_life_s)
        if len({*snapshot.jobs.tenants}) > 1:
            life_s = mean_life_s(config.share_half_life_s)
            snapshot = snapshot.again(shares=TenantShares(usage.used_gpu_s, life_s, config.share_turn_s))
        plan, inner = self.inner.decide(snapshot, memory.inner)
        return plan, FairMemory(inner, Usage(snapshot.now_s, usage.used_gpu_s, held_after(snapshot, plan)))

    def dump(self, memory: FairMemory[Memory]) -> dict[str, Any]:
        """Return both memories as JSON values."""
        return {"inner": self.inner.dump(memory.inner), "usage": memory.usage.dump()}

    def load(self, stored: dict[str, Any]) -> FairMemory[Memory]:
        """Return the memories that ``dump`` wrote; missing parts are empty."""
        return FairMemory(self.inner.load(stored.get("inner", {})), Usage.load(stored.get("usage", {})))


class PlacingFair(Fair[Memory]):
    """The wrapper for a policy that chooses its own way of placing gangs."""

    inner: Any

    @property
    def placement(self) -> str:
        """The wrapped policy's way of placing gangs."""
        return self.inner.placement


class LimitedFair(Fair[Memory]):
    """The wrapper for a policy that keeps the cluster within a power limit."""

    inner: Any

    def power_limit_w(self, snapshot: Snapshot) -> float:
        """Return what the cluster may draw according to the wrapped policy, watts."""
        return self.inner.power_limit_w(snapshot)

    def power_error_w(self, snapshot: Snapshot) -> float:
        """Return the error that the wrapped policy states, watts."""
        return self.inner.power_error_w(snapshot)


class LimitedPlacingFair(LimitedFair[Memory], PlacingFair[Memory]):
    """The wrapper for a policy that does both."""


def fair(name: str, inner: Policy[Any], config: FairConfig) -> Fair[Any]:
    """Return a policy with its GPUs shared between tenants."""
    kinds: dict[tuple[bool, bool], type[Fair[Any]]] = {
        (False, False): Fair,
        (True, False): PlacingFair,
        (False, True): LimitedFair,
        (True, True): LimitedPlacingFair,
    }
    return kinds[isinstance(inner, PlacesGangs), isinstance(inner, PowerLimited)](name, inner, config)
