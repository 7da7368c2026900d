"""Storms and calms: faults while jobs flow, then a calm in which all must end well, until the time is up."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.kit.tasks import end_tasks
from tests.chaos.checks import breaches_of
from tests.chaos.client import User
from tests.chaos.faults import draw
from tests.chaos.watch import Watch
from tests.chaos.world import World, install_job

STORM_S = 40.0
PAUSE_S = 0.3
SETTLED_WITHIN_S = 120.0
LOOK_S = 0.5


@dataclass
class Outcome:
    """What a campaign saw.

    Attributes:
        faults: How many of each kind happened.
        jobs: How many jobs were accepted.
        breaches: What did not hold, a sentence each.
    """

    faults: Counter[str] = field(default_factory=Counter[str])
    jobs: int = 0
    breaches: list[str] = field(default_factory=list[str])


async def campaign(
    folder: Path, seed: int, minutes: float, *, storm_s: float = STORM_S, tell: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Run storms until ``minutes`` have passed, one at least; it ends with the first storm that leaves a breach.

    Args:
        folder: An empty folder that every account can pass through; what an installation leaves stays there.
        seed: Where faults, jobs and policies come from. What processes make of them is not repeatable to the moment.
        minutes: No storm begins later than this.
        storm_s: Length of a storm.
        tell: Called with a line after each storm.
    """
    outcome, began = Outcome(), time.monotonic()
    async with World(folder) as world:
        program = install_job(folder)
        watch = Watch(program)
        watching = asyncio.create_task(watch.keep_looking())
        headers = {"authorization": f"Bearer {world.key}"}
        async with httpx.AsyncClient(base_url=world.gateway_url, headers=headers, timeout=5) as http:
            for number in _numbers(began + 60 * minutes):
                dice = random.Random(f"{seed}/{number}")
                user = User(http, random.Random(f"{seed}/{number}/user"), program, world.notes, f"storm-{number}")
                faults = draw(dice, storm_s, PAUSE_S, world.targets())
                over = asyncio.Event()
                using = asyncio.create_task(user.use(over))
                while not await user.is_at_work():  # noqa: ASYNC110, no event tells of it
                    await asyncio.sleep(LOOK_S)
                before, since = world.done.total(), time.monotonic()
                async with asyncio.TaskGroup() as troubles:
                    for fault in faults:
                        await asyncio.sleep(max(since + fault.at_s - time.monotonic(), 0))
                        troubles.create_task(world.apply(fault))
                over.set()
                calm_since = time.monotonic()
                late = [f"{name} does not run again" for name in await world.calm()]
                outcome.breaches += late or await _settle(user, using, folder, world.notes, watch)
                outcome.jobs += len(user.jobs)
                outcome.faults = +world.done
                settled_s = time.monotonic() - calm_since
                tell(
                    f"storm {number}: {world.done.total() - before} faults, {len(user.jobs)} jobs, all over "
                    f"{settled_s:.0f} s after it, {len(outcome.breaches)} breaches"
                )
                if outcome.breaches:
                    break
        await end_tasks([watching])
    return outcome


async def _settle(user: User, using: asyncio.Task[None], folder: Path, notes: Path, watch: Watch) -> list[str]:
    """Wait until all jobs are over, or for too long none has ended, and return what does not hold."""
    loop, ended = asyncio.get_running_loop(), dict[str, Any]()
    try:
        async with asyncio.timeout(SETTLED_WITHIN_S) as patience:
            await using
            while len(found := await user.ended()) < len(user.jobs):
                if len(found) > len(ended):
                    patience.reschedule(loop.time() + SETTLED_WITHIN_S)
                ended = found
                await asyncio.sleep(LOOK_S)
            ended = found
    except TimeoutError:
        using.cancel()
        ended = await user.ended()
    found = [f"two gangs of {job} were alive at once: {gangs}" for job, gangs in watch.twins.items()]
    found += [f"{job} is over, and has processes" for job in await watch.left(ended.keys())]
    return found + await breaches_of(user, ended, folder / "data" / "checkpoints", notes)


def _numbers(until: float) -> Iterator[int]:
    number = 0
    while number == 0 or time.monotonic() < until:
        yield number
        number += 1
