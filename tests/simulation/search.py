"""Look for schedules that breach something, and shorten one that was found to a token that repeats it."""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.loop import BreachError, Choices, Simulation

Play = Callable[[Simulation], Coroutine[Any, Any, None]]
"""A scenario: it starts tasks, says what must hold, and ends when all is over."""

MOST_TRIES, MOST_CPU_S, MOST_S = 600, 20.0, 240.0
"""Runs, CPU seconds and seconds (of a database, too, which may hang) that shortening a schedule may take."""


@dataclass(frozen=True)
class Found:
    """A schedule that breaches something.

    Attributes:
        token: Repeats it: ``python -m tests.simulation --token TOKEN``.
        breach: What was breached.
        steps: Of the shortened schedule.
    """

    token: str
    breach: BreachError
    steps: int


@dataclass
class Tally:
    """What a search has done: schedules run, steps of the loop, CPU seconds."""

    runs: int = 0
    steps: int = 0
    cpu_s: float = 0.0


def play_once(play: Play, source: int | Sequence[int] | Choices) -> tuple[Simulation, BreachError | None]:
    """Run a scenario with a seed, a record or choices; return the run, and its breach if there was one."""
    choices = source if isinstance(source, Choices) else Choices(source)
    # How wild a schedule is differs from run to run: most faults need one unlikely choice, not many.
    disorder, haste, cancels, cuts = (
        each[choices.below(len(each))]
        for each in ((0.1, 0.0, 0.5, 1.0), (0.02, 0.0, 0.2), (0.01, 0.0, 0.05, 0.2), (0.0, 0.02, 0.1))
    )
    simulation = Simulation(choices, disorder=disorder, haste=haste, cancels=cancels, cuts=cuts)
    try:
        simulation.run(play(simulation))
    except BreachError as error:
        return simulation, error
    except Exception as error:
        return simulation, BreachError("nothing fails unseen", repr(error))
    return simulation, None


def search(
    name: str, play: Play, seeds: Iterable[int], tally: Tally | None = None, *, cpu_s: float = 1e9
) -> Found | None:
    """Run a scenario with each seed until one breaches something, or the CPU time is over."""
    tally = tally if tally is not None else Tally()
    began_s = time.process_time()
    try:
        for seed in seeds:
            simulation, breach = play_once(play, seed)
            tally.runs += 1
            tally.steps += simulation.loop.steps
            if breach is not None:
                return shorten(name, play, simulation.choices.made)
            if time.process_time() - began_s > cpu_s:
                return None
    finally:
        tally.cpu_s += time.process_time() - began_s
    return None


def shorten(name: str, play: Play, made: Sequence[int]) -> Found:
    """Return the shortest schedule that can be made of one that breaches something: less of it, and smaller choices."""
    best = list(made)
    simulation, breach = play_once(play, best)
    assert breach is not None, "a schedule has to repeat what it did"
    tries, span = 0, max(len(best) // 2, 1)
    end_cpu_s, end_s = time.process_time() + MOST_CPU_S, time.monotonic() + MOST_S

    def goes_on() -> bool:
        return tries < MOST_TRIES and time.process_time() < end_cpu_s and time.monotonic() < end_s

    while span and goes_on():
        is_shorter, at = False, 0
        while at < len(best) and goes_on():
            changes = [best[:at] + best[at + span :]]
            if any(best[at : at + span]):
                changes.append(best[:at] + [0] * span + best[at + span :])
            for change in changes:
                tries += 1
                again, same = play_once(play, change)
                if same is not None and same.name == breach.name:
                    kept = _without_zeros(again.choices.made)
                    if (len(kept), sum(kept)) < (len(best), sum(best)):
                        best, simulation, breach, is_shorter = kept, again, same, True
                        break
            else:
                at += span
        if not is_shorter:
            span //= 2
    return Found(f"{name}:{pack(best)}", breach, simulation.loop.steps)


def pack(made: Sequence[int]) -> str:
    """Return choices as text."""
    return base64.urlsafe_b64encode(zlib.compress(" ".join(map(str, made)).encode(), 9)).decode().rstrip("=")


def unpack(text: str) -> list[int]:
    """Return the choices of a text.

    Raises:
        ValueError: It is none.
    """
    try:
        packed = zlib.decompress(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except zlib.error as error:
        raise ValueError(f"{text!r} is no record of choices") from error
    return [int(each) for each in packed.split()]


def _without_zeros(made: Sequence[int]) -> list[int]:
    kept = list(made)
    while kept and not kept[-1]:
        kept.pop()
    return kept
