"""An instance in virtual time: requests that are decoded together, its clock, and the energy it takes.

All its requests get a token in each step, so that one count of steps since the beginning, ``steps``, says for all of
them how far they are: a request ends when the count reaches a number that was known when it joined. Events are needed
only where the batch or the clock changes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from lab.serving.site import ServerKind
from services.core.domain.units import J_PER_KWH
from services.core.policies.freesh.dispatch import InstanceLoad
from services.core.policies.freesh.miad import LatencyReport
from services.core.policies.freesh.server_choice import EnergyProfile, ServerCosts

EPSILON_STEPS = 1e-6


@dataclass(slots=True)
class Seen:
    """What an instance's requests saw since the last look, as sums."""

    busy_s: float = 0.0
    batch_s: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0
    ttft_s: float = 0.0
    queued_s: float = 0.0
    first_tokens: int = 0
    e2e_s: float = 0.0
    ended: int = 0
    ended_tokens: int = 0

    def report(self, in_service: int) -> LatencyReport:
        """Return the means, of an instance that holds so many requests now."""
        return LatencyReport(
            ttft_s=self.ttft_s / self.first_tokens if self.first_tokens else None,
            tbt_s=self.busy_s / self.steps if self.steps > 0 else None,
            e2e_s=self.e2e_s / self.ended if self.ended else None,
            in_service=in_service,
        )


@dataclass(slots=True, eq=False)
class SimulatedInstance:
    """One model server.

    Attributes:
        id: Unique.
        place: The index of its place.
        mode: Its mode.
        kind: The servers it is one of, by the class that it serves now.
        request_class: That class; None if it serves none.
        rate: Intensity of its place now, gCO2/kWh.
        clock_mhz: Of its GPUs.
        at_s: The moment up to which everything below is counted.
        is_leaving: Whether it takes no more requests and ends when it is empty.
        kv_held: Tokens that its requests will have when they end, prompts and answers.
        costs: What the choice of a server knows of it; with its cache of beginnings of prompts.
    """

    id: str
    place: int
    mode: str
    kind: ServerKind
    request_class: str | None
    rate: float
    clock_mhz: float
    at_s: float
    is_leaving: bool = False
    steps: float = 0.0
    prefilling: int = 0
    energy_j: float = 0.0
    carbon_g: float = 0.0
    clock_mhz_s: float = 0.0
    up_s: float = 0.0
    version: int = 0
    kv_held: int = 0
    costs: ServerCosts = field(default_factory=ServerCosts)
    seen: Seen = field(default_factory=Seen)
    members: dict[int, float] = field(default_factory=dict[int, float])
    ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    step_s: float = 1.0
    power_w: float = 0.0
    accuracy_pct: float | None = None

    def __post_init__(self) -> None:
        self.changed()

    @property
    def location(self) -> str:
        """Its place, as the choice of a server names it."""
        return str(self.place)

    @property
    def limit(self) -> int:
        """Requests that it may hold."""
        return self.kind.server.capacity

    @property
    def gco2_per_kwh(self) -> float:
        """Intensity of its place now."""
        return self.rate

    @property
    def energy(self) -> EnergyProfile | None:
        """What requests add there, by its profile."""
        return self.kind.energy

    @property
    def held(self) -> int:
        """Requests that it prefills or decodes."""
        return self.prefilling + len(self.members)

    @property
    def has_room(self) -> bool:
        """Whether it may take another request."""
        return not self.is_leaving and self.held < self.kind.server.capacity

    def has_memory(self, tokens: int) -> bool:
        """Whether its memory holds a request of so many tokens besides what it holds."""
        return self.kind.server.has_memory(self.kv_held, tokens)

    def load(self, tokens: int = 0) -> InstanceLoad:
        """Return it as the dispatcher sees it, who has a request of so many tokens."""
        capacity = self.kind.server.capacity if self.has_memory(tokens) else self.held
        return InstanceLoad(self.id, capacity, self.held, weight=self.kind.weight)

    def advance(self, now_s: float) -> None:
        """Count steps, energy and carbon up to now."""
        passed_s = now_s - self.at_s
        if passed_s <= 0:
            return
        self.at_s = now_s
        self.up_s += passed_s
        self.clock_mhz_s += passed_s * self.clock_mhz
        energy_j = self.power_w * passed_s
        self.energy_j += energy_j
        self.carbon_g += energy_j * self.rate / J_PER_KWH
        if batch := len(self.members):
            steps = passed_s / self.step_s
            self.steps += steps
            seen = self.seen
            seen.busy_s += passed_s
            seen.batch_s += passed_s * batch
            seen.steps += steps
            seen.tokens += steps * batch

    def changed(self) -> None:
        """Take a new batch, clock or kind into account; ``advance`` comes first."""
        server, batch = self.kind.server, len(self.members)
        self.step_s = server.step_s(batch, self.clock_mhz)
        self.power_w = server.power_w(self.clock_mhz, is_busy=bool(self.held))
        self.version += 1

    def join(self, request: int, tokens: float) -> None:
        """Let a request take part that needs so many more tokens, > 0."""
        end = self.steps + tokens
        self.members[request] = end
        heapq.heappush(self.ends, (end, request))
        self.changed()

    def leave(self, request: int) -> float:
        """Take a request out, and return how many tokens it lacks."""
        end = self.members.pop(request)
        self.changed()
        return max(end - self.steps, 0.0)

    def lacks(self, request: int) -> float:
        """Return how many tokens a request lacks."""
        return max(self.members[request] - self.steps, 0.0)

    def next_end_s(self) -> float | None:
        """Return when the next request ends if nothing changes; None if it decodes none."""
        while self.ends and self.members.get(self.ends[0][1]) != self.ends[0][0]:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        return self.at_s + max(self.ends[0][0] - self.steps, 0.0) * self.step_s

    def ended(self) -> list[int]:
        """Take out the requests whose last token is there, and return them."""
        found: list[int] = []
        while self.ends and self.ends[0][0] <= self.steps + EPSILON_STEPS:
            end, request = heapq.heappop(self.ends)
            if self.members.get(request) == end:
                del self.members[request]
                found.append(request)
        self.changed()
        return found
