"""How far long-running work has got, for whoever waits for it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a piece of work has got."""

    share: float
    """Share, 0 to 1, of the most that it may take: evaluations, steps, or a solver's time limit. It never falls, and
    work may end long before it reaches 1."""
    doing: str  #: What it is doing now, for people to read
    best: float | None = None  #: Objective of the best solution so far, None before there is one


Report = Callable[[Progress], None]  #: Called with the progress of work, often: it has to be quick


def unreported(progress: Progress) -> None:
    """Ignore a progress report."""


def part_of(report: Report, first: float, last: float) -> Report:
    """Return a report function for a part of the work, mapping shares 0 to 1 to ``first`` to ``last`` of the whole."""

    def of_part(progress: Progress) -> None:
        report(Progress(first + (last - first) * progress.share, progress.doing, progress.best))

    return of_part
