"""Small parts: reports that share transactions, keys that are asked for once, and tasks that end as they should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

from services.kit.edge import keys as edge_keys
from services.kit.edge.keys import KeyCache
from services.kit.problems import ProblemError, unavailable
from services.kit.tasks import end_tasks, merged, to_the_end
from services.telemetry import batches
from tests.simulation.loop import Simulation

MOST_ASKED = 2
"""Keys that may be asked for at once: little, so that it is reached."""


class _UnknownError(Exception):
    """A node is not known."""


class _Telemetry:
    """The transactions that store reports.

    Attributes:
        stored: Reports, as often as they were stored.
        begun: How many transactions have begun and not ended.
        lost: Reports that may be stored although their transaction failed.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.stored: list[tuple[str, int]] = []
        self.begun = 0
        self.lost: set[tuple[str, int]] = set()
        self.gathering = batches.Batches[int, tuple[str, int]](self._store, _UnknownError)
        self.unknown: set[str] = set()
        self._gathers_until_s = float("-inf")

    async def _store(self, reports: Mapping[str, int], waits: bool) -> Mapping[str, tuple[str, int]]:
        if waits:  # one that comes alone
            await asyncio.sleep(0)
            if self._simulation.choices.below(8) == 1:  # nodes that were removed
                self.unknown |= reports.keys()
                return {}
            self.stored.extend(reports.items())
            return {node: (node, item) for node, item in reports.items()}
        draw, now_s = self._simulation.choices.below, self._simulation.loop.time
        left_out = {node for node in reports if draw(6) == 1}
        waiting = self.gathering._waiting
        is_early = now_s() < self._gathers_until_s and len(reports) + len(waiting) < batches.ENOUGH
        self._simulation.check("few reports gather for a while", not is_early, f"{len(reports)} at {now_s()}")

        def take() -> dict[str, tuple[str, int]]:
            done = {node: (node, item) for node, item in reports.items() if node not in left_out}
            self.stored.extend(done.values())
            return done

        self.begun += 1
        try:
            return await self._simulation.boundary(take, ConnectionError("lost"))
        except ConnectionError:
            self.lost |= set(reports.items())
            raise
        finally:
            self.begun -= 1
            is_few = 0 < len(waiting) < batches.ENOUGH
            self._gathers_until_s = now_s() + batches.GATHER_S if is_few else float("-inf")

    def waits(self) -> str | None:
        """Say who waits though nothing is under way, and there is enough to begin."""
        waiting = len(self.gathering._waiting)
        if self.begun or 0 < waiting < batches.ENOUGH:
            return None
        return f"{waiting} reports" if waiting or self.gathering._running is not None else None


async def play(simulation: Simulation) -> None:
    """Nodes report, some leave before they are answered; whoever is answered is stored, in his own order."""
    draw = simulation.choices.below
    telemetry = _Telemetry(simulation)
    stored, gathering = telemetry.stored, telemetry.gathering
    simulation.holds("one transaction at a time", lambda: str(telemetry.begun) if telemetry.begun > 1 else None)
    simulation.rests("nobody waits for nothing", telemetry.waits)

    async def node(name: str) -> None:
        for item in range(1 + draw(3)):
            await asyncio.sleep(0.005 * draw(10))
            try:
                answer = await gathering.add(name, item)
            except _UnknownError:
                simulation.check("who is known is not told otherwise", name in telemetry.unknown, name)
                return
            simulation.check("an answer is its own report's", answer == (name, item), f"{name} {item}: {answer}")
            simulation.check("accepted is kept", (name, item) in stored, f"{name} {item}")

    nodes = 1 + draw(20 + 20 * draw(2))
    for number in range(nodes):
        simulation.start(node(f"n{number}"), may_be_cancelled=True)
    await simulation.everything()
    await simulation.quiet()
    simulation.check("nothing is under way for nobody", gathering._running is None and not gathering._waiting)
    for each in set(stored) - telemetry.lost:
        simulation.check("nothing is stored twice", stored.count(each) == 1, str(each))


def _too_many(under_way: Mapping[str, int]) -> str | None:
    asked = sum(under_way.values())
    return f"{asked} keys" if asked > MOST_ASKED else None


async def keys(simulation: Simulation) -> None:
    """Callers with the same key ask admission once; one that leaves takes nobody's answer along."""
    draw = simulation.choices.below
    asked: dict[str, int] = {}
    under_way: dict[str, int] = {}
    simulation.instead(edge_keys, MOST_REQUESTS=MOST_ASKED)
    simulation.holds("no more is asked at once than may be", lambda: _too_many(under_way))
    simulation.holds(
        "a key is asked for once at a time", lambda: next((k for k, n in under_way.items() if n > 1), None)
    )

    async def resolve(digest: str) -> Any:
        asked[digest] = asked.get(digest, 0) + 1
        under_way[digest] = under_way.get(digest, 0) + 1
        try:
            known = SimpleNamespace(identity=SimpleNamespace(key_id=digest), expires_at=None)
            return await simulation.boundary(lambda: known if draw(3) else None, unavailable("Admission"))
        finally:
            under_way[digest] -= 1

    cache = KeyCache(cast(Any, resolve), max_age_s=1.0, grace_s=3.0, size=2, clock_s=simulation.loop.time)

    async def caller(key: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0.2 * draw(8))
            try:
                await cache.caller(b"Bearer ws_" + str(key).encode().rjust(43, b"x"), {})
            except ProblemError as problem:
                simulation.check("a caller is refused or told to wait", problem.status in (401, 503), str(problem))

    for number in range(1 + draw(6)):
        simulation.start(caller(number % 4), may_be_cancelled=True)
    await simulation.everything()
    await simulation.quiet()
    simulation.check("nothing is asked for nobody", not cache._asking, str(cache._asking))


async def tasks(simulation: Simulation) -> None:
    """Work is done to its end though whoever waits for it is cancelled; what is ended ends; nothing merged is lost."""
    draw, check = simulation.choices.below, simulation.check
    full, over = OSError("full"), set[int]()

    async def work(number: int) -> int:
        try:
            return await simulation.boundary(lambda: number, full)
        finally:
            over.add(number)

    async def waits(number: int) -> None:
        try:
            check("work has its result", await to_the_end(work(number)) == number)
        except OSError as error:
            check("work fails as it did", error is full)
        finally:
            check("work is done to its end", number in over, str(number))
        check("who is cancelled goes no further", not cast(Any, asyncio.current_task()).cancelling(), str(number))

    async def stubborn(times: int) -> None:
        for _ in range(times):
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def numbers(of: int) -> AsyncIterator[tuple[int, int]]:
        for number in range(3):
            await asyncio.sleep(0.01 * draw(3))
            yield of, number

    for number in range(1 + draw(4)):
        simulation.start(waits(number), may_be_cancelled=True)
    ending = [simulation.loop.create_task(stubborn(1 + draw(3))) for _ in range(draw(3))]
    await asyncio.sleep(0.01 * draw(3))
    await end_tasks(ending)
    check("what is ended has ended", all(each.done() for each in ending))
    found = [each async for each in merged(numbers(0), numbers(1))]
    lines = [[number for of, number in found if of == one] for one in (0, 1)]
    check("what is merged is all there, in its order", lines == [[0, 1, 2]] * 2, str(found))
    await simulation.everything()
