"""Clocks that follow latency: multiplicative increase when a threshold is violated, additive decrease otherwise.

Called every second with what an instance's requests saw in the last one. All GPUs of a tensor-parallel instance run at
the same clock, since the slowest would hold up the rest.

Source: FREESH section 3.2, equation 5, appendix D.2 (thresholds) and D.7 (parameters).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.domain.errors import DomainError
from services.core.domain.serving import LatencyLimits, MiadConfig


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """What the requests of one instance saw in the last interval: means, seconds; None where there was none."""

    ttft_s: float | None = None  #: From arrival, for requests that got their first token
    tbt_s: float | None = None  #: For tokens that were produced
    e2e_s: float | None = None  #: From arrival, for requests that ended
    in_service: int = 0  #: Requests that the instance held at the end of the interval
    is_stale: bool = False  #: Whether part of it was seen before the clock was last changed

    def is_blind(self, limits: LatencyLimits) -> bool:
        """Return whether there are requests in service but no sign that the clock is high enough.

        TTFT or TBT must have been seen at this clock, if either has a threshold; the end-to-end time is only a
        backstop, and counts by itself only if no other has a threshold.
        """
        pairs = [(self.ttft_s, limits.ttft_s), (self.tbt_s, limits.tbt_s)]
        if limits.ttft_s is None and limits.tbt_s is None:
            pairs = [(self.e2e_s, limits.e2e_s)]
        is_seen = any(seen is not None and limit is not None for seen, limit in pairs)
        return self.in_service > 0 and (self.is_stale or not is_seen)

    def exceeds(self, limits: LatencyLimits) -> bool:
        """Return whether a mean is above its threshold.

        *Our reading*: the paper does not say whether one request or their mean must exceed a threshold. It calls the
        end-to-end one, which is a measured average, "a final backstop to detect significant overall request slowdown":
        that is a mean. A class has requests of very different lengths, and if single requests counted, the longest in
        every second would hold the clock at its highest: see
        ``tests/unit/freesh/test_miad.py::test_one_long_request_does_not_raise_the_clock``.
        """
        pairs = ((self.ttft_s, limits.ttft_s), (self.tbt_s, limits.tbt_s), (self.e2e_s, limits.e2e_s))
        return any(seen is not None and limit is not None and seen > limit for seen, limit in pairs)


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks that a device supports, MHz, ascending."""

    mhz: tuple[float, ...]

    def __post_init__(self) -> None:
        ascends = all(before < after for before, after in zip(self.mhz, self.mhz[1:], strict=False))
        if not self.mhz or not ascends or not (self.mhz[0] > 0 and math.isfinite(self.mhz[-1])):
            raise DomainError("supported clocks are above 0 MHz and ascend")

    @property
    def lowest(self) -> float:
        return self.mhz[0]

    @property
    def highest(self) -> float:
        return self.mhz[-1]

    def at_least(self, mhz: float) -> float:
        """Return the lowest supported clock that is not below ``mhz``; the highest if there is none."""
        return self.mhz[min(bisect_left(self.mhz, mhz), len(self.mhz) - 1)]

    def at_most(self, mhz: float) -> float:
        """Return the highest supported clock that is not above ``mhz``; the lowest if there is none."""
        return self.mhz[max(bisect_right(self.mhz, mhz) - 1, 0)]


def common_clocks(devices: Sequence[Clocks]) -> Clocks:
    """Return the clocks that all devices of a tensor-parallel instance support; ``DomainError`` if there are none."""
    shared = set(devices[0].mhz).intersection(*(each.mhz for each in devices[1:])) if devices else set[float]()
    return Clocks(tuple(sorted(shared)))


def miad_clock(
    clock_mhz: float, report: LatencyReport, limits: LatencyLimits, clocks: Clocks, config: MiadConfig = MiadConfig()
) -> float:
    """Return the next clock of an instance, MHz: one that its devices support.

    An instance without requests also steps down. One that has requests, but reports nothing about them, keeps its
    clock: silence is no sign that a lower one would do. A device that supports few clocks takes the next one above when
    it must be faster, and the next one below otherwise, so that it never stays put for want of a fine step.

    Source: FREESH equation 5. Keeping the clock of a blind instance is the project's own rule: the paper's servers see
    every token.
    """
    if report.exceeds(limits):
        return clocks.at_least(min(config.factor * clock_mhz, clocks.highest))
    if report.is_blind(limits):
        return clocks.at_least(clock_mhz)
    return clocks.at_most(max(clock_mhz - config.step_mhz, clocks.lowest))
