"""The energy of the host's CPUs: measured by RAPL where the host lets us, else modelled from their utilisation.

In both cases a part of it is due to activity and belongs to the ranks that used the CPUs; the rest is drawn anyway and
belongs to none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from services.contracts.nodes import EnergySource
from services.core.accounting.host_power import CpuPowerModel
from services.kit.logging import Log

log = Log(__name__)

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class HostEnergy:
    """CPU energy of a period, and how many joules of it each used CPU second counts for."""

    total_j: float
    j_per_cpu_s: float


class HostPower(Protocol):
    """A source of CPU energy. Its counters continue while the agent is away, and are resumed from ``state``."""

    source: EnergySource

    def advance(self, elapsed_s: float, ranks_cpu_s: float) -> HostEnergy:
        """Return the energy since the last call.

        Args:
            elapsed_s: Seconds since then.
            ranks_cpu_s: CPU time that this node's ranks used since then.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what another process needs to continue from here."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from where another process stopped."""
        ...


class ModelledPower:
    """CPU power from utilisation.

    Args:
        model: Watts of all CPUs by utilisation. ranks_only: Count only the node's ranks: simulated nodes share one
        machine, and each would otherwise count everything on it.
    """

    source = EnergySource.MODELLED

    def __init__(self, model: CpuPowerModel, *, ranks_only: bool) -> None:
        self._model = model
        self._ranks_only = ranks_only
        self._cpus = psutil.cpu_count() or 1
        self._busy_s = _busy_cpu_s()

    def advance(self, elapsed_s: float, ranks_cpu_s: float) -> HostEnergy:
        """Return the energy since the last call."""
        busy_s = _busy_cpu_s()
        used_s = ranks_cpu_s if self._ranks_only else max(busy_s - self._busy_s, 0.0)
        self._busy_s = busy_s
        utilisation = min(used_s / (self._cpus * elapsed_s), 1.0) if elapsed_s > 0 else 0.0
        total_j = self._model.at(utilisation) * elapsed_s
        return HostEnergy(total_j, _per_cpu_s(self._model, total_j, utilisation, max(used_s, ranks_cpu_s)))

    def state(self) -> dict[str, Any]:
        """Return the CPU time of the host so far."""
        return {"busy_s": self._busy_s}

    def restore(self, state: dict[str, Any]) -> None:
        """Count from an earlier CPU time of this boot."""
        self._busy_s = float(state.get("busy_s", self._busy_s))


class RaplPower:
    """CPU packages' own energy counters.

    Raises:
        OSError: The host has none, or this process may not read them.
    """

    source = EnergySource.COUNTER

    def __init__(self, model: CpuPowerModel, root: Path = POWERCAP) -> None:
        self._model = model
        self._packages = [
            zone for zone in sorted(root.glob("intel-rapl:*")) if (zone / "name").read_text().startswith("package")
        ]
        if not self._packages:
            raise FileNotFoundError(f"no CPU package with an energy counter in {root}")
        self._ranges_uj = {zone.name: int((zone / "max_energy_range_uj").read_text()) for zone in self._packages}
        self._counters_uj = self._read()
        self._cpus = psutil.cpu_count() or 1
        self._busy_s = _busy_cpu_s()

    def advance(self, elapsed_s: float, ranks_cpu_s: float) -> HostEnergy:
        """Return the energy since the last call; a counter that has wrapped is assumed to have done so once."""
        try:
            now_uj = self._read()
        except OSError as error:
            log.warning("rapl.unreadable", error=str(error))
            now_uj = self._counters_uj
        total_uj = 0
        for name, value in now_uj.items():
            step = value - self._counters_uj.get(name, value)
            total_uj += step if step >= 0 else step + self._ranges_uj[name]
        self._counters_uj = now_uj
        busy_s = _busy_cpu_s()
        used_s = max(busy_s - self._busy_s, ranks_cpu_s, 0.0)
        self._busy_s = busy_s
        utilisation = min(used_s / (self._cpus * elapsed_s), 1.0) if elapsed_s > 0 else 0.0
        return HostEnergy(total_uj / 1e6, _per_cpu_s(self._model, total_uj / 1e6, utilisation, used_s))

    def state(self) -> dict[str, Any]:
        """Return the counters."""
        return {"counters_uj": self._counters_uj, "busy_s": self._busy_s}

    def restore(self, state: dict[str, Any]) -> None:
        """Count from earlier readings of this boot."""
        self._counters_uj |= {str(name): int(value) for name, value in state.get("counters_uj", {}).items()}
        self._busy_s = float(state.get("busy_s", self._busy_s))

    def _read(self) -> dict[str, int]:
        return {zone.name: int((zone / "energy_uj").read_text()) for zone in self._packages}


def host_power(kind: str, model: CpuPowerModel, *, simulated: bool) -> HostPower:
    """Return the best source; ``auto`` measures where possible, on hosts that are not simulated."""
    if kind == "rapl" or (kind == "auto" and not simulated):
        try:
            return RaplPower(model)
        except OSError as error:
            if kind == "rapl":
                raise
            log.info("rapl.missing", error=str(error))
    return ModelledPower(model, ranks_only=simulated)


def _per_cpu_s(model: CpuPowerModel, total_j: float, utilisation: float, used_s: float) -> float:
    """Share out what activity adds to the idle draw; the model says how much of the total that is, measured or not."""
    power_w = model.at(utilisation)
    if used_s <= 0 or power_w <= 0:
        return 0.0
    return total_j * (1 - model.at(0) / power_w) / used_s


def _busy_cpu_s() -> float:
    times = psutil.cpu_times()._asdict()
    idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))  # guest is in user as well
    return sum(times.values()) - idle
