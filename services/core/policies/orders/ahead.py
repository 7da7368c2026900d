"""What a stop costs that is known in advance: gangs that tell when they save lose nothing if they stop right then."""

import numpy as np

from services.core.cycle.runs import LATE
from services.core.cycle.snapshot import Saves, Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.policies.windows import SHORTEST_S

NEVER = Saves(np.nan, np.nan)


def saves_of(snapshot: Snapshot, which: Ints) -> tuple[Floats, Floats]:
    """Return when jobs last saved or else began, UTC seconds, and their interval, NaN where they do not tell: (n,)."""
    jobs: list[int] = which.tolist()
    found = [snapshot.saves.get(snapshot.jobs.ids[job], NEVER) for job in jobs]
    last_s, every_s = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return np.maximum(last_s, snapshot.jobs.waiting_since_s[which]), every_s


def unsaved_s(snapshot: Snapshot, which: Ints, at_s: float) -> Floats:
    """Return how long before a time gangs save last: (n,) seconds, 0 for those that do not tell."""
    last_s, every_s = saves_of(snapshot, which)
    since_s = at_s - last_s
    return np.nan_to_num(np.where((every_s > 0) & (at_s > snapshot.now_s), since_s % every_s, since_s))


def pays(snapshot: Snapshot, which: Ints, until_s: float) -> Bools:
    """Return which jobs it pays to start now if they are stopped then: they have saved their work once: (n,)."""
    every_s = np.nan_to_num(saves_of(snapshot, which)[1])
    return until_s - snapshot.now_s >= np.maximum(every_s * (1 + LATE), SHORTEST_S)
