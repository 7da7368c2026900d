"""What a meter can have measured. Without NumPy, because agents are installed without it.

No board or package draws more than its limit for longer than its control loop takes to react, so every meter reading
has a bound: ``E(t1, t2) = integral of P dt <= P_max (t2 - t1)``. An increase beyond it, or a decrease where no counter
can have wrapped, was not measured, whatever the meter says. Modelled power x time is booked instead, and only once: if
the counter later carries on from where it was, what was modelled in the meantime is subtracted from its rise. A counter
that starts anew is believed once two of its readings are consistent with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from services.core.domain.gpus import likeliest_gpu_model

LIMIT_MARGIN = 1.2
"""A board's mean power over a limit that it enforces: the limit, and what its control loop and its sensor are off."""
CURVE_MARGIN = 1.5  #: A host's power over the peak of its configured curve, which is rarely measured
READ_SLACK_S = 1.0
"""By how much the moments of two readings can be off together: a counter that is refreshed, a thread that waits."""
UNKNOWN_HOST_W = 10_000.0  #: What no host draws beside its GPUs; the bound of one that does not say its own
LONGEST_GAP_S = 90.0  #: If two samples of power are further apart than this, the energy between them is modelled

CHECK_S, CHECK_PATIENCE_S = 10.0, 60.0
"""A counter is compared with integrated power over the first; one that disagrees has until the second to agree."""
CHECK_FACTOR = 2.0  #: By how much the two may differ: sampled power misses what happens between samples


class Fault(StrEnum):
    """Why a reading is not accepted as a measurement."""

    RISE = "rise"  #: More than the hardware can draw in the time
    FALL = "fall"  #: Less than before, and no wrap
    GAP = "gap"
    """So long after the one before that the counter may have wrapped more than once, or nobody knows the power."""
    POWER = "power"  #: A power that the hardware cannot draw


def board_most_w(model: str, limits_w: Sequence[float | None]) -> float:
    """Return the most that a GPU's board can draw, watts.

    Args:
        model: Its name; for a known board its peak is used where a limit is not stated.
        limits_w: The limit in force, and the highest that can be set; None where it is not stated.
    """
    known_w = [limit_w for limit_w in limits_w if limit_w is not None]
    if None in limits_w and (board := likeliest_gpu_model(model)) is not None:
        known_w.append(board.peak_w)
    return LIMIT_MARGIN * max(known_w, default=0.0)


@dataclass(frozen=True, slots=True)
class Bound:
    """What a meter's hardware can draw."""

    most_w: float  #: The most on average over a second or more; finite and >= 0
    wraps_at_j: float = math.inf
    """The value at which its counter starts again at 0; infinite for one that does not wrap."""

    def allows(self, energy_j: float, elapsed_s: float) -> bool:
        """Return whether this much can have been drawn in a time that is known to within ``READ_SLACK_S``."""
        return 0 <= energy_j <= self.most_w * (max(elapsed_s, 0.0) + READ_SLACK_S)

    def rise_j(self, before_j: float, after_j: float) -> float:
        """Return by how much a counter that wrapped at most once rose; below 0 if it fell for another reason."""
        rise_j = after_j - before_j
        return rise_j if rise_j >= 0 or math.isinf(self.wraps_at_j) else rise_j + self.wraps_at_j

    def clipped_w(self, power_w: float) -> float:
        """Return the power clipped to what can be drawn; 0 if it is not a finite number."""
        return min(max(power_w, 0.0), self.most_w) if math.isfinite(power_w) else 0.0


@dataclass(frozen=True, slots=True)
class Booked:
    """The energy since the previous reading; it was measured if there is no fault."""

    energy_j: float
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Counter:
    """An energy counter between two readings."""

    reading_j: float  #: The last reading that is believed
    read_at_s: float  #: When it was read, seconds of a clock that cannot be set
    at_s: float  #: When the last reading was taken, believed or not
    modelled_j: float = 0.0  #: What was booked since ``read_at_s``
    doubted_j: float | None = None  #: The last reading, if it is not believed
    spare_j: float | None = None
    """What may be drawn beyond ``most_w`` x time, because readings are not instantaneous. Once used up it is only
    refilled over time, so that the sum of everything booked keeps to the bound."""

    @classmethod
    def first(cls, reading_j: float, at_s: float) -> Counter:
        """Return the counter at its first reading, which yields no energy."""
        return cls(reading_j, at_s, at_s)


def advance(counter: Counter, bound: Bound, reading_j: float, at_s: float, modelled_w: float) -> tuple[Counter, Booked]:
    """Return a counter after its next reading, and the energy since the previous one.

    Args:
        reading_j: What the counter shows.
        at_s: When it was read; a time before the last reading counts as the time of that reading.
        modelled_w: Mean power since the previous reading by other means; anything beyond the bound is not counted.
    """
    at_s = max(at_s, counter.at_s)
    elapsed_s, since_s = at_s - counter.at_s, at_s - counter.read_at_s
    most_spare_j = bound.most_w * READ_SLACK_S
    room_j = (most_spare_j if counter.spare_j is None else counter.spare_j) + bound.most_w * elapsed_s
    modelled_j = bound.clipped_w(modelled_w) * elapsed_s
    is_readable = math.isfinite(reading_j) and reading_j >= 0

    def believed(energy_j: float, fault: Fault | None = None) -> tuple[Counter, Booked]:
        booked_j = max(energy_j, 0.0)
        spare_j = min(room_j - booked_j, most_spare_j)
        return Counter(reading_j, at_s, at_s, spare_j=spare_j), Booked(booked_j, fault)

    def doubted(fault: Fault) -> tuple[Counter, Booked]:
        after = replace(
            counter,
            at_s=at_s,
            modelled_j=counter.modelled_j + modelled_j,
            doubted_j=reading_j if is_readable else None,
            spare_j=room_j - modelled_j,  # all of it, so that what the counter shows in the end can be booked
        )
        return after, Booked(modelled_j, fault)

    if not is_readable:
        return doubted(Fault.FALL if reading_j < 0 else Fault.RISE)
    if bound.most_w * since_s >= bound.wraps_at_j:  # any reading would fit
        return believed(modelled_j, Fault.GAP)
    fitting_j = list[float]()
    rise_j = bound.rise_j(counter.reading_j, reading_j)
    if bound.allows(rise_j, since_s) and rise_j - counter.modelled_j <= room_j:
        fitting_j.append(rise_j - counter.modelled_j)
    if counter.doubted_j is not None:
        rise_j = bound.rise_j(counter.doubted_j, reading_j)
        if 0 < rise_j <= bound.most_w * elapsed_s:
            fitting_j.append(rise_j)
    if fitting_j:
        return believed(min(fitting_j, key=lambda energy_j: abs(energy_j - modelled_j)))
    return doubted(Fault.RISE if reading_j > counter.reading_j else Fault.FALL)


def sampled(bound: Bound, before_w: float, after_w: float, elapsed_s: float) -> Booked:
    """Return the energy between two power samples, by the trapezium rule; it is modelled where there is a fault.

    A sample that the hardware cannot draw is replaced by the other one, or by the bound if neither is possible.
    """
    can = [power_w for power_w in (before_w, after_w) if 0 <= power_w <= bound.most_w]
    mean_w = sum(can) / len(can) if can else bound.most_w
    fault = None if len(can) == 2 else Fault.POWER
    return Booked(mean_w * max(elapsed_s, 0.0), fault or (Fault.GAP if elapsed_s > LONGEST_GAP_S else None))


def agrees(ratio: float) -> bool:
    """Return whether a counter with this ratio to the integrated power may be used."""
    return 1 / CHECK_FACTOR <= ratio <= CHECK_FACTOR


@dataclass(frozen=True, slots=True)
class CounterCheck:
    """An energy counter compared with integrated power since an agent began; Zeus checks counters this way before use.

    Attributes:
        elapsed_s, counted_j, integrated_j: Totals so far.
        ratio: Counted over integrated energy, once it is known; None until then, and where nothing was drawn.
    """

    elapsed_s: float = 0.0
    counted_j: float = 0.0
    integrated_j: float = 0.0
    ratio: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the counter may be used: it agrees, or the ratio is not known yet."""
        return self.ratio is None or agrees(self.ratio)

    def after(self, elapsed_s: float, counted_j: float, integrated_j: float) -> CounterCheck:
        """Return the check after another pair of samples; it no longer changes once the ratio is known."""
        if self.ratio is not None:
            return self
        sums = CounterCheck(self.elapsed_s + elapsed_s, self.counted_j + counted_j, self.integrated_j + integrated_j)
        if sums.elapsed_s < CHECK_S or sums.integrated_j <= 0:
            return sums
        known = replace(sums, ratio=sums.counted_j / sums.integrated_j)
        return known if known.holds or sums.elapsed_s >= CHECK_PATIENCE_S else sums


def booked_j(reported_j: float, most_w: float, length_s: float) -> float:
    """Return the energy to book for an interval: what was reported, or the most that the hardware can draw in it.

    Args:
        reported_j: Energy; finite and >= 0.
        most_w: What all of the hardware can draw.
        length_s: Length of the interval; below 0 counts as 0.
    """
    return reported_j if Bound(most_w).allows(reported_j, length_s) else most_w * max(length_s, 0.0)
