"""Which of several installations is to run a job that may run in any of them: the cleanest that is in time.

A home installation asks each of its cells, and itself, what would become of the job there now. Nothing is reserved by
that, and queues change; so a job that waits may be asked about again, and moves if that pays (``is_worth_a_move``).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints

LEAST_GAIN = 0.1  #: Share of the emissions that the first move of a waiting job has to save; each further one, twice it


@dataclass(frozen=True, slots=True)
class Offer:
    """What would become of a job in one cell."""

    cell: str
    start_s: float  #: When it would start there, UTC seconds; inf: it is not known when
    gco2_per_hour: float  #: While it runs there, by the forecast for that time
    duration_s: float | None = None  #: How long it would run; None: unknown

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
    return {each.cell: each.gco2_per_hour * ((each.duration_s or 0.0) / 3_600 if of_runs else 1) for each in found}


def is_worth_a_move(here: Offer, there: Offer, terms: Terms, moves: int) -> bool:
    """Return whether a job that waits where ``here`` is from is to wait where ``there`` is from instead.

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
