"""Clocks of a pool's GPUs that follow latency: what an operator asks for, and what agents are sent with each report."""

from enum import StrEnum

from pydantic import Field

from services.contracts.schema import LEAST, Flag, Int, Message, Real, said
from services.core.domain.serving import LatencyLimits, MiadConfig


class ClockPolicy(StrEnum):
    """How the clocks of a pool's GPUs are set."""

    DEFAULT = "default"  #: They are not: devices choose their clocks, or follow the policy in force
    MIAD = "miad"
    """Every second: times `factor` after a second in which a limit was exceeded, else lower by `step_mhz`."""
    LEARNED = "learned"
    """The clock of least predicted power that keeps the limits; MIAD until enough is known, and where it fails."""


class PoolClocks(Message):
    """How the clocks of a pool's GPUs follow the latency that routers report."""

    policy: ClockPolicy = ClockPolicy.DEFAULT
    dry_run: Flag = said("Whether agents only say which clocks they would set.", default=False)
    factor: Real = said("MIAD multiplies the clock by this; the paper's is 2.", default=2, gt=1, le=100)
    step_mhz: Real = said(
        "MIAD lowers the clock by this each second; the paper's is 100.", default=100, ge=LEAST, le=10_000
    )

    @property
    def miad(self) -> MiadConfig:
        """The parameters of MIAD."""
        return MiadConfig(self.factor, self.step_mhz)


class ServerClocks(PoolClocks):
    """The clocks of one server's GPUs, with the latency limits of the class that it serves now."""

    max_ttft_ms: Real | None = Field(default=None, ge=LEAST)
    max_tbt_ms: Real | None = Field(default=None, ge=LEAST)
    max_e2e_s: Real | None = Field(default=None, ge=LEAST)
    capacity: Int = said("Requests that it is given at once.", default=64, ge=1)
    idle_w: Real = said("Its power without requests.", default=0, ge=0)

    @property
    def limits(self) -> LatencyLimits:
        """The latency limits, seconds."""
        return LatencyLimits(_seconds(self.max_ttft_ms), _seconds(self.max_tbt_ms), self.max_e2e_s)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else 1e-3 * ms
