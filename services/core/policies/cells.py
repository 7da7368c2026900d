"""Which of several installations is to run a job that may run in any of them: the cleanest that is in time.

A home installation asks each of its cells, and itself, what would become of the job there now. Nothing is reserved by
that, and queues change; so a job that waits may be asked about again, and moves if that pays (``is_worth_a_move``). So
does one that runs, if what is left of it pays for the way of its checkpoint too (``for_the_rest``).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.transfers import Transfer
from services.core.domain.units import J_PER_KWH, S_PER_HOUR

LEAST_GAIN = 0.1  #: Share of the emissions that the first move of a waiting job has to save; each further one, twice it
HANDED_OVER_S = 120.0  #: From when a job that runs is to move until it starts elsewhere, but for its checkpoint
LEAST_PROGRESS = 0.01  #: A job that has done less than this share says too little of what is left


@dataclass(frozen=True, slots=True)
class Offer:
    """What would become of a job in one cell."""

    cell: str
    start_s: float  #: When it would start there, UTC seconds; inf: it is not known when
    gco2_per_hour: float  #: While it runs there, by the forecast for that time
    duration_s: float | None = None  #: How long it would run; None: unknown
    gco2_per_kwh: float = math.nan  #: The intensity behind ``gco2_per_hour``; only moves of jobs that run ask for it

    @property
    def end_s(self) -> float:
        """When it would end, UTC seconds, where its length is known; else when it would start."""
        return self.start_s + (self.duration_s or 0.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """By when a job is to run."""

    now_s: float
    deadline_s: float = math.inf  #: When it must have ended
    flexibility_s: float | None = None  #: How long its start may be delayed; None: by its own length at most
    waited_s: float = 0.0  #: How much of that it has used


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a job that runs."""

    seconds: float
    energy_kwh: float

    @classmethod
    def of(cls, progress: float, gpus: int, gpu_s: float, energy_j: float) -> "Rest | None":
        """Return the rest by a job's progress, a share; None if it has done too little, or all.

        Args:
            gpus: What it has now.
            gpu_s, energy_j: What it has used so far, wherever.
        """
        if not (LEAST_PROGRESS <= progress < 1 and gpus and gpu_s > 0 and energy_j > 0):
            return None
        share = (1 - progress) / progress
        return cls(gpu_s * share / gpus, energy_j * share / J_PER_KWH)


def room_after_s(gpus: int, total: int, others_gpus: Ints, left_s: Floats) -> float:
    """Return after how long a cell has room for one more job, all having what they ask for; inf: it is not known.

    Where gangs shrink, each job would start soon anywhere, however many there are: this is what tells full cells from
    others, and a job that follows it is never slower than at the size that it asks for.

    Args:
        gpus, total: The GPUs that the job asks for, and those that suit it.
        others_gpus: (n,) what other jobs there hold or, where they may shrink or wait, ask for.
        left_s: (n,) how long each of them still needs, NaN or 0 if unknown; those that wait count as if they ran.
    """
    short = int(others_gpus.sum()) + gpus - total
    if short <= 0:
        return 0.0
    left_s = np.where(left_s > 0, left_s, np.inf)
    order = np.argsort(left_s, kind="stable")
    at = int(np.searchsorted(others_gpus[order].cumsum(), short))
    return float(left_s[order][at]) if at < order.size else math.inf


def ranked(offers: Iterable[Offer], terms: Terms) -> list[Offer]:
    """Return the offers, best first: those in time by their emissions, and then the others by their ends.

    An offer is in time if it ends by the deadline and its start is delayed, against that of the earliest offer, by no
    more than the job's flexibility or, where none is stated, than its own length, less what it has waited already.
    Emissions are those of the whole run, or of an hour unless all offers know the job's length. Equal ones go to the
    one that ends first, and then by name.
    """
    found = [*offers]
    emitted = emissions(found)
    earliest_s = min((offer.start_s for offer in found), default=math.inf)

    def order(offer: Offer) -> tuple[bool, float, float, str]:
        if is_in_time(offer, earliest_s, terms):
            return False, emitted[offer.cell], offer.end_s, offer.cell
        return True, offer.end_s, emitted[offer.cell], offer.cell

    return sorted(found, key=order)


def is_in_time(offer: Offer, earliest_s: float, terms: Terms) -> bool:
    """Return whether a job could run by an offer as ``ranked`` says; ``earliest_s``: the earliest start offered."""
    patience_s = (offer.duration_s or 0.0) if terms.flexibility_s is None else terms.flexibility_s
    latest_s = max(earliest_s, terms.now_s) + max(patience_s - terms.waited_s, 0.0)
    return offer.end_s <= terms.deadline_s and offer.start_s <= latest_s


def emissions(offers: Iterable[Offer]) -> dict[str, float]:
    """Return what the job would emit by each offer, by its cell, gCO2: of the whole run, or of an hour (``ranked``)."""
    found = [*offers]
    of_runs = all(offer.duration_s is not None for offer in found)
    return {each.cell: each.gco2_per_hour * ((each.duration_s or 0) / S_PER_HOUR if of_runs else 1) for each in found}


def for_the_rest(offers: Iterable[Offer], here: str, rest: Rest, now_s: float, transfer: Transfer) -> list[Offer]:
    """Return the offers as they are to a job that runs ``here``: of this cell, and of those that have room for it now.

    Elsewhere its gang also draws while it waits for its checkpoint, whose way has its price. What a job needs there is
    taken to be what it needs here.
    """
    found = {offer.cell: offer for offer in offers}
    if here not in found:
        return []
    own, lost_s = found[here], transfer.seconds + HANDED_OVER_S
    goes = [each for each in found.values() if each is not own and each.start_s <= now_s + HANDED_OVER_S]

    def as_it_is(offer: Offer, seconds: float, way_kwh: float) -> Offer:
        grams = rest.energy_kwh * seconds / rest.seconds * offer.gco2_per_kwh
        grams += way_kwh * (own.gco2_per_kwh + offer.gco2_per_kwh) / 2
        return Offer(offer.cell, now_s, grams * S_PER_HOUR / seconds, seconds, offer.gco2_per_kwh)

    there = (as_it_is(each, rest.seconds + lost_s, transfer.energy_kwh) for each in goes)
    return [as_it_is(own, rest.seconds, 0.0), *there]


def is_worth_a_move(here: Offer, there: Offer, terms: Terms, moves: int) -> bool:
    """Return whether a job that is where ``here`` is from is to be where ``there`` is from instead.

    It is if that saves a tenth of its emissions and is in time; twice that at its second move, and so on: a job moves
    four times at most, however forecasts and queues swing. One that is not in time where it waits moves, as often, to
    where it is.

    Args:
        moves: How often it has moved already.
    """
    least = LEAST_GAIN * 2**moves
    earliest_s = min(here.start_s, there.start_s)
    if least >= 1 or not is_in_time(there, earliest_s, terms):
        return False
    if not is_in_time(here, earliest_s, terms):
        return True
    emitted = emissions((here, there))
    return emitted[there.cell] < (1 - least) * emitted[here.cell]
