"""Attributes the energy that an agent measures on an engine's node to the jobs that held its devices. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from services.contracts.nodes import EnergyInterval, Usage

ENERGIES = ("gpu_energy_j", "cpu_energy_j", "static_energy_j")


class Hold(NamedTuple):
    """A device that an allocation held, from when until when, UTC seconds; the end of a live one is infinite."""

    allocation_id: str
    device: int
    start_s: float
    end_s: float


def by_holder(interval: EnergyInterval, holds: Sequence[Hold]) -> EnergyInterval:
    """Return an interval with the usages of its devices attributed to the allocations that held them.

    Power is taken as even over the interval: whoever held a device for a part of it used that part of its energy. What
    several hold at once is theirs in equal parts; what nobody held stays idle. The sum stays as it was measured. A
    device counts among those of whoever held it for half of the interval or more, so that after an agent's long absence
    nobody is given all of its GPU time.
    """
    usages: list[Usage] = []
    for usage in interval.usages:
        parts = _parts(interval, [each for each in holds if each.device in usage.devices])
        idle = 1.0 - sum(parts.values())
        shares: Iterable[tuple[str | None, float]] = [*parts.items(), (None, idle)] if idle > 1e-9 else parts.items()
        usages += [part_of(usage, share, allocation_id=owner) for owner, share in shares]
    return interval.model_copy(update={"usages": usages})


def _parts(interval: EnergyInterval, holds: Sequence[Hold]) -> dict[str, float]:
    """Return the share of an interval for which each allocation held a device; at most 1 together."""
    start_s, end_s = interval.start_at.timestamp(), interval.end_at.timestamp()
    length_s = end_s - start_s
    if length_s <= 0:
        return {}
    found: defaultdict[str, float] = defaultdict(float)
    moments = sorted({start_s, end_s, *(at for each in holds for at in each[2:] if start_s < at < end_s)})
    for since_s, until_s in pairwise(moments):
        here = sorted({each.allocation_id for each in holds if each.start_s <= since_s and each.end_s >= until_s})
        for owner in here:
            found[owner] += (until_s - since_s) / length_s / len(here)
    return found


def part_of(usage: Usage, share: float, **changes: object) -> Usage:
    """Return a share of a usage; its devices count among those of whoever has half of it or more."""
    energies = {name: getattr(usage, name) * share for name in ENERGIES}
    return usage.model_copy(update={**energies, "devices": usage.devices if share >= 0.5 else [], **changes})
