"""The energy of the host's CPUs: measured by RAPL where the host lets us, else modelled from their utilisation.

Either way, the part that is due to activity belongs to the ranks that used the CPUs; the idle rest belongs to none. A
counter is trusted only within what its package can draw (``services.core.accounting.meters``).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from services.contracts.nodes import EnergySource
from services.core.accounting.host_power import CpuPowerModel
from services.core.accounting.meters import CURVE_MARGIN, LIMIT_MARGIN, Bound, Counter, Fault, advance
from services.kit.logging import Log

log = Log(__name__)

POWERCAP = Path("/sys/class/powercap")
_LIKELY_PACKAGE_W = 600.0  #: What no CPU package is built for, for hosts of which nobody says what theirs are
_MOST_LIMIT_W = 1_000.0  #: A limit above it means that there is none
_LIMITS = ("_max_power_uw", "_power_limit_uw")


@dataclass(frozen=True, slots=True)
class HostEnergy:
    """CPU energy of a period, and how many joules of it are charged per used CPU second.

    ``faults`` are those of the counters whose energy was modelled instead.
    """

    total_j: float
    j_per_cpu_s: float
    faults: tuple[Fault, ...] = ()


class HostPower:
    """A source of CPU energy. Its counters continue while the agent is away, and are resumed from ``state``."""

    source: EnergySource

    def __init__(self, model: CpuPowerModel) -> None:
        """Take the watts of all CPUs by their utilisation."""
        self._model = model
        self.most_w = model.at(1.0)  #: The highest CPU power that it can report
        self._cpus = psutil.cpu_count() or 1
        self._busy_s = _busy_cpu_s()

    def advance(self, elapsed_s: float, ranks_cpu_s: float) -> HostEnergy:
        """Return the energy since the last call; ``ranks_cpu_s``: the CPU time that this node's ranks have used."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what another process needs to continue from here."""
        return {"busy_s": self._busy_s}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from where another process of this boot stopped."""
        self._busy_s = float(state.get("busy_s", self._busy_s))

    def _used_s(self) -> float:
        """Return the CPU time that the host has used since the last call."""
        before_s, self._busy_s = self._busy_s, _busy_cpu_s()
        return max(self._busy_s - before_s, 0.0)

    def _utilisation(self, used_s: float, elapsed_s: float) -> float:
        return min(used_s / (self._cpus * elapsed_s), 1.0) if elapsed_s > 0 else 0.0

    def _per_cpu_s(self, total_j: float, utilisation: float, used_s: float) -> float:
        """Return the energy above idle per used CPU second; the model gives its share of the total, measured or not."""
        power_w = self._model.at(utilisation)
        return total_j * (1 - self._model.at(0) / power_w) / used_s if used_s > 0 and power_w > 0 else 0.0


class ModelledPower(HostPower):
    """CPU power from utilisation."""

    source = EnergySource.MODELLED

    def __init__(self, model: CpuPowerModel, *, ranks_only: bool) -> None:
        super().__init__(model)
        self._ranks_only = ranks_only  #: Simulated nodes share a machine: each would else count everything on it

    def advance(self, elapsed_s: float, ranks_cpu_s: float) -> HostEnergy:
        busy_s = self._used_s()
        used_s = ranks_cpu_s if self._ranks_only else busy_s
        utilisation = self._utilisation(used_s, elapsed_s)
        total_j = self._model.at(utilisation) * elapsed_s
        return HostEnergy(total_j, self._per_cpu_s(total_j, utilisation, max(used_s, ranks_cpu_s)))


class RaplPower(HostPower):
    """CPU packages' own energy counters.

    Args:
        model: Watts of all CPUs by utilisation: what is booked where a counter is not trusted.
        is_stated: Whether the model is this host's own. Its peak then bounds packages that do not report their limits.

    Raises:
        OSError: The host has none, or this process may not read them.
    """

    source = EnergySource.COUNTER

    def __init__(self, model: CpuPowerModel, root: Path = POWERCAP, *, is_stated: bool = True) -> None:
        super().__init__(model)
        self._packages = [
            zone for zone in sorted(root.glob("intel-rapl:*")) if (zone / "name").read_text().startswith("package")
        ]
        if not self._packages:
            raise FileNotFoundError(f"no CPU package with an energy counter in {root}")
        most_w = CURVE_MARGIN * model.at(1.0)
        self._bounds = {zone.name: _bound(zone, most_w if is_stated else _LIKELY_PACKAGE_W) for zone in self._packages}
        self.most_w = sum(bound.most_w for bound in self._bounds.values())
        self._now_s = 0.0
        self._counters = {name: Counter.first(value, 0.0) for name, value in self._read().items()}
        if len(self._counters) < len(self._packages):
            raise OSError(f"not every CPU package's energy counter can be read in {root}")

    def advance(self, elapsed_s: float, ranks_cpu_s: float) -> HostEnergy:
        """Return the energy since the last call; an unreadable package's is added once it can be read again."""
        self._now_s += elapsed_s
        used_s = max(self._used_s(), ranks_cpu_s)
        utilisation = self._utilisation(used_s, elapsed_s)
        modelled_w = self._model.at(utilisation) / len(self._packages)
        total_j, faults = 0.0, list[Fault]()
        for name, reading_j in self._read().items():
            known, bound = self._counters[name], self._bounds[name]
            self._counters[name], booked = advance(known, bound, reading_j, self._now_s, modelled_w)
            total_j += booked.energy_j
            if booked.fault:
                faults.append(booked.fault)
        return HostEnergy(total_j, self._per_cpu_s(total_j, utilisation, used_s), tuple(faults))

    def state(self) -> dict[str, Any]:
        counters_uj = {name: round(counter.reading_j * 1e6) for name, counter in self._counters.items()}
        return {"counters_uj": counters_uj, **super().state()}

    def restore(self, state: dict[str, Any]) -> None:
        known_uj: dict[str, int] = state.get("counters_uj", {})
        counters = {str(name): Counter.first(int(value) / 1e6, 0.0) for name, value in known_uj.items()}
        super().restore(state)
        self._counters |= counters
        self._now_s = 0.0

    def _read(self) -> dict[str, float]:
        """Return the counters that can be read, in joules."""
        found: dict[str, float] = {}
        for zone in self._packages:
            try:
                found[zone.name] = int((zone / "energy_uj").read_text()) / 1e6
            except (OSError, ValueError) as error:
                log.warning("rapl.unreadable", package=zone.name, error=str(error))
        return found


def _bound(zone: Path, otherwise_w: float) -> Bound:
    """Return the most that a package can draw, from the limits that it enforces, and where its counter wraps."""
    limits_w = [_number(path) / 1e6 for path in zone.glob("constraint_*_uw") if path.name.endswith(_LIMITS)]
    known_w = max((limit_w for limit_w in limits_w if limit_w <= _MOST_LIMIT_W), default=0.0)
    wraps_at_j = _number(zone / "max_energy_range_uj") / 1e6
    return Bound(LIMIT_MARGIN * known_w or otherwise_w, wraps_at_j or math.inf)


def _number(path: Path) -> float:
    """Return the number in a file; 0 if there is none."""
    try:
        return float(max(int(path.read_text()), 0))
    except (OSError, ValueError):
        return 0.0


def host_power(kind: str, model: CpuPowerModel, *, simulated: bool, is_stated: bool = True) -> HostPower:
    """Return the best source; ``auto`` measures where possible, on hosts that are not simulated.

    ``is_stated``: whether the model is this host's own, not a default assumed for any host.
    """
    if kind == "rapl" or (kind == "auto" and not simulated):
        try:
            return RaplPower(model, is_stated=is_stated)
        except OSError as error:
            if kind == "rapl":
                raise
            log.info("rapl.missing", error=str(error))
    return ModelledPower(model, ranks_only=simulated)


def _busy_cpu_s() -> float:
    times = psutil.cpu_times()._asdict()
    idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))  # guest is in user as well
    return sum(times.values()) - idle
