"""What can go wrong in a storm, when and for how long: a list that follows from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.links import TROUBLES

SHARES: Mapping[str, float] = {
    "kill": 3.0,
    "freeze": 3.0,
    "lose": 1.0,
    "part": 1.0,
    **dict.fromkeys(TROUBLES, 3.0),
    "repeat": 4.0,
    "reorder": 2.0,
    "wipe": 0.5,
    "fill": 1.0,
    "jump": 1.0,
    "slay": 1.0,
    "orphan": 1.0,
}
"""How often each kind comes, relative to the others: ``kill`` -9; ``freeze``: SIGSTOP, then SIGCONT; ``lose``: an agent
is frozen until its jobs have begun again elsewhere, while what it runs goes on; ``part``: a node reaches nothing for as
long as that; troubles of links;
``repeat`` and ``reorder``: commands that a node has had already are sent again; ``wipe``: Valkey forgets everything;
``fill``: no room is left on a node's disk; ``jump``: the wall clock of a host is set, and later set right;
``slay``: `kill -9` of a process of a job or of a model server; ``orphan``: of the shim above one."""

JUMPS_S = (-3_600, -40, 40, 3_600)
"""Some within what tokens allow, some not."""
JUMP_LASTS_S = (2.0, 12.0)
SHORT_S = (0.1, 1.5)
LONG_S = (5.0, 9.0)
"""Longer than a lease, so that nodes count as lost."""
LONG_SHARE = 0.12
MOMENTS = ("kill", "repeat", "reorder", "wipe", "slay", "orphan")
AWAY = ("lose", "part")
AWAY_S = (12.0, 24.0)
"""So long that, with the margin, a node's jobs are queued again and begin elsewhere before it returns. One node at a
time is away, so that there is an elsewhere, and nothing else happens to its agent meanwhile: to be killed would wake
it."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_s: When, in seconds after the storm began.
        kind: One of ``SHARES``.
        target: A process, a link, a node, or a host.
        lasts_s: How long; 0 for what happens in a moment.
        by_s: How far from the true time a clock is set.
    """

    at_s: float
    kind: str
    target: str
    lasts_s: float
    by_s: int = 0


def draw(dice: random.Random, storm_s: float, pause_s: float, targets: Mapping[str, Sequence[str]]) -> list[Fault]:
    """Return a storm's faults in the order of their moments.

    Args:
        dice: Where they come from.
        storm_s: How long the storm lasts.
        pause_s: Mean time from one fault to the next.
        targets: Of each kind; kinds that cannot be had here are missing.
    """
    kinds = [kind for kind in SHARES if targets.get(kind)]
    shares = [SHARES[kind] for kind in kinds]
    faults: list[Fault] = []
    away, away_until_s = "", 0.0
    at_s = dice.expovariate(1 / pause_s)
    while at_s < storm_s:
        (kind,) = dice.choices(kinds, shares)
        target = dice.choice(targets[kind])
        span_s = LONG_S if dice.random() < LONG_SHARE else SHORT_S
        if kind in AWAY:
            span_s = AWAY_S
        elif kind == "jump":
            span_s = JUMP_LASTS_S
        lasts_s = dice.uniform(*span_s)
        moment = kind in MOMENTS
        if at_s >= away_until_s or (kind not in AWAY and target != f"agent-{away}"):
            by_s = dice.choice(JUMPS_S) if kind == "jump" else 0
            faults.append(Fault(at_s, kind, target, 0.0 if moment else lasts_s, by_s))
            if kind in AWAY:
                away, away_until_s = target.removeprefix("agent-"), at_s + lasts_s
        at_s += dice.expovariate(1 / pause_s)
    return faults
