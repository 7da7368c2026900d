"""The GPU models that can be simulated, and how their power and speed follow load and clock."""

from __future__ import annotations

from dataclasses import dataclass

POWER_EXPONENT = 2.0
"""Dynamic power over clock. Voltage falls with the clock but has a floor, so the exponent lies below the textbook 3."""

COMPUTE_SHARE = 0.75
"""Share of a step that stretches when the clock falls; the rest waits for memory and the network and does not."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU model. ``peak_w`` is the board's power limit; H200 figures were measured, the others are data sheets'."""

    name: str
    idle_w: float
    peak_w: float
    lowest_limit_w: float
    memory_gib: float
    lowest_clock_mhz: int
    highest_clock_mhz: int
    clock_step_mhz: int = 15

    @property
    def clocks_mhz(self) -> list[int]:
        """The clocks the model can be locked to, ascending."""
        return list(range(self.lowest_clock_mhz, self.highest_clock_mhz + 1, self.clock_step_mhz))

    def power_w(self, load: float, clock_mhz: float) -> float:
        """Return the draw at a load (0..1) and clock, no limit in force."""
        share = clock_mhz / self.highest_clock_mhz
        return self.idle_w + (self.peak_w - self.idle_w) * load * share**POWER_EXPONENT

    def clock_under_limit_mhz(self, load: float, clock_mhz: float, limit_w: float) -> float:
        """Return the clock the device falls to so that it draws no more than its limit."""
        if self.power_w(load, clock_mhz) <= limit_w:
            return clock_mhz
        dynamic_w = (self.peak_w - self.idle_w) * load
        share = (max(limit_w - self.idle_w, 0.0) / dynamic_w) ** (1 / POWER_EXPONENT)
        return max(share * self.highest_clock_mhz, self.lowest_clock_mhz)

    def relative_speed(self, clock_mhz: float) -> float:
        """Return the speed at a clock as a share of the speed at the highest."""
        return 1 / (COMPUTE_SHARE * self.highest_clock_mhz / clock_mhz + (1 - COMPUTE_SHARE))


MODELS = {
    model.name: model
    for model in (
        GpuModel("A100-SXM4-40GB", 52, 400, 100, 40, 210, 1410),
        GpuModel("A100-SXM4-80GB", 60, 400, 100, 80, 210, 1410),
        GpuModel("H100-SXM5-80GB", 70, 700, 200, 80, 345, 1980),
        GpuModel("H200-SXM-141GB", 133, 700, 200, 141, 345, 1980),
        GpuModel("V100-SXM2-32GB", 42, 300, 150, 32, 135, 1530),
        GpuModel("RTX3090", 30, 350, 100, 24, 210, 2100),
        GpuModel("RTX-A6000", 22, 300, 100, 48, 210, 2100),
    )
}
