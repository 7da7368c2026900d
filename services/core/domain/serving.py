"""Names, limits and parameters shared by the code that plans, routes to and clocks model servers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.core.domain.errors import DomainError

CLASSES = ("SS", "SL", "LS", "LL")  #: Of requests: input length first: ``SL`` is a short input with a long output

MAX_REGIONS = 6  #: Of clients: one more would make a plan's model 127 rows for each class (``freesh.pools``)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """The thresholds of a request class, seconds; None: no threshold."""

    ttft_s: float | None = None
    tbt_s: float | None = None
    e2e_s: float | None = None


TABLE_7: Mapping[str, LatencyLimits] = {
    "SS": LatencyLimits(0.300, 0.150, 7.0),
    "SL": LatencyLimits(0.300, 0.150, 27.0),
    "LS": LatencyLimits(0.600, 0.150, 10.0),
    "LL": LatencyLimits(0.600, 0.150, 30.0),
}
"""Source: FREESH Table 7."""


@dataclass(frozen=True, slots=True)
class MiadConfig:
    """M and delta of equation 5; the defaults are the paper's (Table 10)."""

    factor: float = 2.0
    step_mhz: float = 100.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 1 and math.isfinite(self.step_mhz) and self.step_mhz > 0):
            raise DomainError(f"MIAD needs a factor above 1 and a step above 0 MHz, not {self.factor} {self.step_mhz}")


class NegativeRates(StrEnum):
    """How negative rates, at which drawing power counts as a gain, are treated."""

    PAPER = "paper"  # taken literally: an optimum starts instances that the demand does not need
    FRUGAL = "frugal"  # no instance whose requests the others of its class could serve


WINDOW_S, STEP_S = 5.0, 300.0  #: Routers count requests by windows; pools are planned by steps, each of 60 windows

STEPS_AHEAD = 6  #: Steps that a plan looks ahead

SERVICE = 0.95
"""A query short waits or is lost, one spare costs the power of an idle share of an instance: 0.95 says that the
first is 19 times as bad. A higher level asks for more past than a new service has: 0.99 learns from 99 errors."""

LEAST_SERVICE, MOST_SERVICE = 0.5, 0.99

SLO_LATENCIES = 5.0
"""A request violates its SLO if it takes longer than this many times ``Lat``. Source: FREESH section 3.3."""

WINDOW_LATENCIES = 1.4  #: Tokens are in time within this many times ``Lat``, alpha_LLF. Source: FREESH appendix C.2.
