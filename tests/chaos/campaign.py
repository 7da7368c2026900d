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
from tests.chaos.checks import breaches_of, breaches_of_requests
from tests.chaos.client import Caller, User
from tests.chaos.faults import draw
from tests.chaos.models import Models
from tests.chaos.visitors import PATIENCE_S, Visitors
from tests.chaos.world import World

STORM_S = 40.0
PAUSE_S = 0.3
SETTLED_WITHIN_S = 120.0
MODELS_WITHIN_S = 300.0
"""To make a plan of a pool, a process first has to start that takes seconds of both cores, or minutes of busy ones."""
LOOK_S = 0.5


@dataclass
class Outcome:
    """What a campaign saw.

    Attributes:
        faults: How many of each kind happened.
        jobs: How many jobs were accepted.
        requests: How many requests were made to each model.
        breaches: What did not hold, a sentence each.
    """

    faults: Counter[str] = field(default_factory=Counter[str])
    jobs: int = 0
    requests: Counter[str] = field(default_factory=Counter[str])
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
        watching = asyncio.create_task(world.watch.keep_looking())
        headers = {"authorization": f"Bearer {world.key}"}
        async with (
            httpx.AsyncClient(base_url=world.gateway_url, headers=headers, timeout=5) as http,
            httpx.AsyncClient(base_url=world.router_url, headers=headers, timeout=PATIENCE_S) as door,
        ):
            models = Models(Caller(http), world.server, world.notes)
            await models.create()
            new = Visitors(door, random.Random(seed), "new")
            await new.are_known()
            outcome.requests += new.count()
            for number in _numbers(began + 60 * minutes):
                storm = Storm(world, models, door, f"{seed}/{number}", f"storm-{number}")
                before = world.done.total()
                outcome.breaches += await storm.pass_over(storm_s)
                outcome.jobs += len(storm.user.jobs)
                outcome.requests += storm.visitors.count()
                outcome.breaches += await breaches_of_requests(models.caller, outcome.requests)
                outcome.faults = +world.done
                tell(
                    f"storm {number}: {world.done.total() - before} faults, {len(storm.user.jobs)} jobs, "
                    f"{len(storm.visitors.visits)} requests ({_shown(storm.visitors.replies)}), all over "
                    f"{storm.settled_s:.0f} s after it, {len(outcome.breaches)} breaches"
                )
                if outcome.breaches:
                    break
        await end_tasks([watching])
    return outcome


class Storm:
    """One storm and the calm after it; ``settled_s`` is how long that took."""

    def __init__(self, world: World, models: Models, door: httpx.AsyncClient, seed: str, name: str) -> None:
        self.user = User(models.caller.http, random.Random(f"{seed}/user"), world.job, world.notes, name)
        self.visitors = Visitors(door, random.Random(f"{seed}/visitors"), name)
        self.settled_s = 0.0
        self._world, self._models, self._seed = world, models, seed
        self._over = asyncio.Event()

    async def pass_over(self, storm_s: float) -> list[str]:
        """Let it pass, and return what does not hold once all is settled, or has not settled in time."""
        faults = draw(random.Random(self._seed), storm_s, PAUSE_S, self._world.targets())
        if late := await self.visitors.are_served("before", MODELS_WITHIN_S):
            return late
        using = asyncio.create_task(self._use())
        try:
            while not await self.user.is_at_work():  # noqa: ASYNC110, no event tells of it
                await asyncio.sleep(LOOK_S)
            since = time.monotonic()
            async with asyncio.TaskGroup() as troubles:
                for fault in faults:
                    await asyncio.sleep(max(since + fault.at_s - time.monotonic(), 0))
                    troubles.create_task(self._world.apply(fault))
            self._over.set()
            since = time.monotonic()
            late = [f"{name} does not run again" for name in await self._world.calm()]
            found = late or await self._settle(using)
            self.settled_s = time.monotonic() - since
            return found
        finally:
            await end_tasks([using])

    async def _use(self) -> None:
        await asyncio.gather(
            self.user.use(self._over),
            self._models.change(random.Random(f"{self._seed}/models"), self._over),
            self.visitors.ask(self._over),
        )

    async def _settle(self, using: asyncio.Task[None]) -> list[str]:
        """Wait until all jobs are over, or for too long none has ended, and return what does not hold."""
        world, user, models, visitors = self._world, self.user, self._models, self.visitors
        loop, ended = asyncio.get_running_loop(), dict[str, Any]()
        try:
            async with asyncio.timeout(SETTLED_WITHIN_S) as patience:
                await using
                models_settle = asyncio.create_task(models.settle(world.watch, MODELS_WITHIN_S))
                while len(found := await user.ended()) < len(user.jobs):
                    if len(found) > len(ended):
                        patience.reschedule(loop.time() + SETTLED_WITHIN_S)
                    ended = found
                    await asyncio.sleep(LOOK_S)
                ended = found
        except TimeoutError:
            ended = await user.ended()
            models_settle = asyncio.create_task(models.settle(world.watch, MODELS_WITHIN_S))
        found = [f"two gangs of {job} were alive at once: {gangs}" for job, gangs in world.watch.twins.items()]
        found += [f"{gpu} was given away twice: {held}" for gpu, held in world.watch.overcommitted.items()]
        found += [f"{job} is over, and has processes" for job in await world.watch.left(ended.keys())]
        if not using.done() or using.cancelled():
            found.append("requests got no answer, or changes no end")
        found += await models_settle
        found += await visitors.are_served("after")
        found += [*visitors.faults, *visitors.repeated(world.notes)]
        found += [f"a request was refused: {refusal}" for refusal in models.caller.refused]
        return found + await breaches_of(user, ended, world.folder / "data" / "checkpoints", world.notes, world.slain)


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _numbers(until: float) -> Iterator[int]:
    number = 0
    while number == 0 or time.monotonic() < until:
        yield number
        number += 1
