"""How the power and speed of a simulated GPU depend on load and clock."""

from dataclasses import dataclass

from services.core.domain.gpus import GpuModel

POWER_EXPONENT = 2.0
"""Dynamic power over clock. Voltage falls with the clock but has a floor, so the exponent lies below the textbook 3."""
COMPUTE_SHARE = 0.75
"""Share of a step that stretches when the clock falls; the rest waits for memory and the network and does not."""
CLOCK_STEP_MHZ = 15


@dataclass(frozen=True, slots=True)
class Response:
    """What a board of one model does at a given load and clock; limits and idle draw are the model's."""

    model: GpuModel

    @property
    def clocks_mhz(self) -> list[int]:
        """The clocks the board can be locked to, in ascending order: steps down from the highest."""
        lowest, highest = self.model.lowest_clock_mhz, self.model.highest_clock_mhz
        return list(range(highest, lowest - 1, -CLOCK_STEP_MHZ))[::-1]

    def power_w(self, load: float, clock_mhz: float) -> float:
        """Return the draw at a load (0..1) and clock with no limit in force."""
        share = clock_mhz / self.model.highest_clock_mhz
        return self.model.idle_w + (self.model.peak_w - self.model.idle_w) * load * share**POWER_EXPONENT

    def clock_under_limit_mhz(self, load: float, clock_mhz: float, limit_w: float) -> float:
        """Return the clock to which the device drops so that it draws no more than its limit."""
        if self.power_w(load, clock_mhz) <= limit_w:
            return clock_mhz
        dynamic_w = (self.model.peak_w - self.model.idle_w) * load
        share = (max(limit_w - self.model.idle_w, 0.0) / dynamic_w) ** (1 / POWER_EXPONENT)
        return max(share * self.model.highest_clock_mhz, self.model.lowest_clock_mhz)

    def relative_speed(self, clock_mhz: float) -> float:
        """Return the speed at a clock as a fraction of the speed at the highest."""
        return 1 / (COMPUTE_SHARE * self.model.highest_clock_mhz / clock_mhz + (1 - COMPUTE_SHARE))
