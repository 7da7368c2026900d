"""Clocks by a learned model of latency and power: the clock of least power that keeps the thresholds.

MIAD finds the lowest clock by violating thresholds, and pays for each violation with high clocks. This learns for each
phase how times and power follow the clock, and goes to the best one at once; until it knows enough, where its
predictions fail, and while a threshold is violated, MIAD decides.

- Prefill: ``TTFT = a + b / f``. Decode: ``TBT = a + b / f + c * batch + d * batch / f``.
  Power: ``P = p + q * f + r * f^3``. All coefficients are >= 0, so that the models cannot bend the wrong way outside
  what was seen.
- The energy of a token is the power times its time, which is U-shaped in the clock: slow tokens keep the GPU's floor
  power on for long. An instance that always has requests draws least at the lowest clock that serves them; one that
  often has none is cheapest at the bottom of the U. ``mean_power_w`` covers both.

Source: the project's own. GreenLLM (per-phase clocks for LLM serving) reports up to 34 % less energy than the default
governor at under 3.5 points more violations.

Without NumPy, because agents are installed without it.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.core.domain.errors import DomainError
from services.core.domain.serving import LatencyLimits, MiadConfig
from services.core.policies.freesh.miad import Clocks, LatencyReport, miad_clock

MEMORY = 600  #: Samples that are remembered
ENOUGH_SAMPLES, ENOUGH_CLOCKS = 30, 4  #: Samples, and different clocks among them, before the model is used
REFIT_EVERY = 30
MARGIN = 0.90  #: Predicted means are kept below so much of their thresholds
GOOD_ERROR = 0.15  #: Mean relative error of predicted TBT up to which the model is used
CANDIDATES = 25
"""About this many of the supported clocks are compared, from the highest down: power is flat near the best one."""
GHZ = 1e-3
SWEEPS = 400


@dataclass(frozen=True, slots=True)
class ClockSample:
    """What one instance did in one interval."""

    clock_mhz: float  #: Its clock
    batch: float  #: Mean number of requests that it decoded together
    report: LatencyReport  #: The latencies that they saw
    power_w: float = math.nan  #: Mean over the interval for all its GPUs together; NaN where unknown
    queued_s: float = 0.0
    """Mean time that requests waited before their prefill, a part of TTFT and of the end-to-end time."""
    tokens_per_request: float | None = None  #: Mean length of completed answers; None if there were none
    tokens_per_s: float = 0.0  #: Tokens produced per second
    busy_share: float = 1.0  #: Share of the interval with requests, 0 .. 1.


@dataclass(frozen=True, slots=True)
class FittedClocks:
    """Coefficients of the three models; clocks in GHz."""

    ttft: Sequence[float]
    tbt: Sequence[float]
    power: Sequence[float]
    error: float

    def ttft_s(self, clock_mhz: float) -> float:
        """Return the predicted time of a prefill, seconds, excluding the wait for it."""
        return _dot(self.ttft, _prefill(clock_mhz))

    def tbt_s(self, batch: float, clock_mhz: float) -> float:
        """Return the predicted time between tokens, seconds."""
        return _dot(self.tbt, _decode(batch, clock_mhz))

    def power_w(self, clock_mhz: float) -> float:
        """Return the predicted power of a busy instance, watts."""
        return _dot(self.power, _power(clock_mhz))


class Unused(StrEnum):
    """Why MIAD decides in place of the learned model."""

    FEW_SAMPLES = "few_samples"  #: Fewer than ``ENOUGH_SAMPLES`` seconds with requests are known
    FEW_CLOCKS = "few_clocks"
    """They were at fewer than ``ENOUGH_CLOCKS`` clocks, or without known power: nothing says what another one does."""
    ERROR = "error"  #: The model is off by more than ``GOOD_ERROR``
    EXCEEDED = "exceeded"  #: A limit is exceeded now
    NO_SIGNAL = "no_signal"  #: Requests are in service and nothing was seen of them at this clock; it is kept
    NO_REQUESTS = "no_requests"  #: The instance has none


class ClockLearner:
    """Remembers samples of one kind of instance (mode and class) and fits the models to them.

    Beyond ``MEMORY`` samples, the oldest one of the clock that has the most is dropped: an instance that stays at its
    best clock must not forget the others.
    """

    def __init__(self, samples: Iterable[ClockSample] = ()) -> None:
        self.fitted: FittedClocks | None = None
        self._by_clock: dict[float, deque[ClockSample]] = {}
        self.known = self._since_fit = 0
        for each in samples:
            self._remember(each)
        if self.known >= ENOUGH_SAMPLES:
            self.fitted = fit_clocks(self.samples)

    @property
    def samples(self) -> list[ClockSample]:
        """The remembered samples, by clock, oldest first within each."""
        return [each for _, found in sorted(self._by_clock.items()) for each in found]

    @property
    def clocks(self) -> int:
        """The number of distinct clocks among them."""
        return len(self._by_clock)

    def add(self, sample: ClockSample) -> bool:
        """Remember a sample with tokens at a single clock, refitting now and then; return whether it was remembered."""
        if not self._remember(sample):
            return False
        self._since_fit += 1
        if self.known >= ENOUGH_SAMPLES and (self.fitted is None or self._since_fit >= REFIT_EVERY):
            self.fitted, self._since_fit = fit_clocks(self.samples), 0
        return True

    def unused(self, sample: ClockSample, limits: LatencyLimits) -> Unused | None:
        """Return why the learned model does not decide the next clock after a sample; None if it does."""
        if self.fitted is None:
            return Unused.FEW_SAMPLES if self.known < ENOUGH_SAMPLES else Unused.FEW_CLOCKS
        if self.fitted.error > GOOD_ERROR:
            return Unused.ERROR
        if sample.report.exceeds(limits):
            return Unused.EXCEEDED
        if sample.report.is_blind(limits):
            return Unused.NO_SIGNAL
        return None if sample.batch > 0 else Unused.NO_REQUESTS

    def _remember(self, sample: ClockSample) -> bool:
        if sample.report.tbt_s is None or sample.report.is_stale or not sample.batch > 0:
            return False
        if self.known >= MEMORY:
            fullest = max(self._by_clock, key=lambda clock: len(self._by_clock[clock]))
            self._by_clock[fullest].popleft()
            if not self._by_clock[fullest]:
                del self._by_clock[fullest]
            self.known -= 1
        self._by_clock.setdefault(sample.clock_mhz, deque()).append(sample)
        self.known += 1
        return True


def fit_clocks(samples: Sequence[ClockSample]) -> FittedClocks | None:
    """Return the models fitted by non-negative least squares; None if too few clocks or power values were seen."""
    if len({each.clock_mhz for each in samples}) < ENOUGH_CLOCKS:
        return None
    decodes = [(_decode(each.batch, each.clock_mhz), each.report.tbt_s) for each in samples]
    prefills = [
        (_prefill(each.clock_mhz), max(each.report.ttft_s - each.queued_s, 0.0))
        for each in samples
        if each.report.ttft_s is not None
    ]
    powers = [
        (_power(each.clock_mhz), each.power_w)
        for each in samples
        if math.isfinite(each.power_w) and each.busy_share > 0.99
    ]
    seen = [(terms, tbt_s) for terms, tbt_s in decodes if tbt_s is not None and tbt_s > 0]
    if min(len(seen), len(prefills), len(powers)) < ENOUGH_CLOCKS:
        return None
    tbt = _fit(seen)
    error = sum(abs(_dot(tbt, terms) - tbt_s) / tbt_s for terms, tbt_s in seen) / len(seen)
    return FittedClocks(ttft=_fit(prefills), tbt=tbt, power=_fit(powers), error=error)


def mean_power_w(fitted: FittedClocks, sample: ClockSample, clock_mhz: float, idle_w: float) -> float:
    """Return the predicted mean power at another clock for the present requests, watts.

    The instance is busy for the share of time that its tokens take at that clock: the present share, stretched or
    shortened with the step time. ``idle_w`` is its power without requests.
    """
    now_s = fitted.tbt_s(max(sample.batch, 1.0), sample.clock_mhz)
    then_s = fitted.tbt_s(max(sample.batch, 1.0), clock_mhz)
    busy = min(sample.busy_share * then_s / now_s, 1.0) if now_s > 0 else 1.0
    return busy * fitted.power_w(clock_mhz) + (1.0 - busy) * idle_w


def best_clock(
    fitted: FittedClocks, sample: ClockSample, limits: LatencyLimits, clocks: Clocks, capacity: int, idle_w: float = 0.0
) -> float | None:
    """Return the supported clock of least predicted power that keeps the thresholds; None if none does.

    At a lower clock requests stay longer, so that the batch grows with the step (Little's law); a batch beyond the
    capacity would make requests wait.

    Args:
        capacity: The most requests that it decodes together.
        idle_w: Its power without requests at the lowest clock.
    """
    allowed: list[tuple[float, float]] = []
    for clock in clocks.mhz[:: -max(len(clocks.mhz) // CANDIDATES, 1)]:
        batch, tbt_s = _settled(fitted, sample, clock)
        ttft_s = fitted.ttft_s(clock) + sample.queued_s
        e2e_s = None if sample.tokens_per_request is None else ttft_s + tbt_s * sample.tokens_per_request
        predicted = LatencyReport(ttft_s / MARGIN, tbt_s / MARGIN, None if e2e_s is None else e2e_s / MARGIN)
        if batch <= capacity and not predicted.exceeds(limits):
            allowed.append((mean_power_w(fitted, sample, clock, idle_w), clock))
    return min(allowed)[1] if allowed else None


def learned_clock(
    learner: ClockLearner,
    sample: ClockSample,
    limits: LatencyLimits,
    clocks: Clocks,
    capacity: int,
    *,
    idle_w: float = 0.0,
    config: MiadConfig = MiadConfig(),
) -> float:
    """Return an instance's next clock, MHz: the model's, else MIAD's; ``DomainError`` if the capacity is below 1."""
    if capacity < 1:
        raise DomainError(f"an instance decodes at least one request, not {capacity}")
    if learner.fitted is None or learner.unused(sample, limits) is not None:
        return miad_clock(sample.clock_mhz, sample.report, limits, clocks, config)
    found = best_clock(learner.fitted, sample, limits, clocks, capacity, idle_w)
    return clocks.highest if found is None else found


def _settled(fitted: FittedClocks, sample: ClockSample, clock_mhz: float) -> tuple[float, float]:
    """Return (batch, TBT) at a clock in the steady state, where as many requests leave as arrive."""
    rate = sample.tokens_per_s
    batch = max(sample.batch, 1.0)
    for _ in range(4):
        tbt_s = fitted.tbt_s(batch, clock_mhz)
        batch = max(rate * tbt_s, 1.0) if rate > 0 else batch
    return batch, fitted.tbt_s(batch, clock_mhz)


def _prefill(clock_mhz: float) -> tuple[float, ...]:
    return (1.0, 1.0 / (GHZ * clock_mhz))


def _decode(batch: float, clock_mhz: float) -> tuple[float, ...]:
    slow = 1.0 / (GHZ * clock_mhz)
    return (1.0, slow, batch, batch * slow)


def _power(clock_mhz: float) -> tuple[float, ...]:
    fast = GHZ * clock_mhz
    return (1.0, fast, fast**3)


def _dot(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return sum(each * term for each, term in zip(coefficients, terms, strict=True))


def _fit(points: Sequence[tuple[Sequence[float], float]]) -> tuple[float, ...]:
    """Return the non-negative least-squares coefficients, by coordinate descent.

    Terms are scaled to a root mean square of 1. With few terms, and points within one octave of clocks, ``SWEEPS``
    suffice for predictions within the points, and no more is needed.
    """
    n = len(points[0][0])
    scale = [math.sqrt(sum(terms[i] ** 2 for terms, _ in points) / len(points)) or 1.0 for i in range(n)]
    gram = [[sum(t[i] * t[j] for t, _ in points) / (scale[i] * scale[j]) for j in range(n)] for i in range(n)]
    moment = [sum(t[i] * seen for t, seen in points) / scale[i] for i in range(n)]
    found = [0.0] * n
    for _ in range(SWEEPS):
        for i in range(n):
            rest = moment[i] - sum(gram[i][j] * found[j] for j in range(n) if j != i)
            found[i] = max(rest / gram[i][i], 0.0) if gram[i][i] > 0 else 0.0
    return tuple(value / size for value, size in zip(found, scale, strict=True))
