"""Reports of nodes that share transactions in telemetry, and callers whose keys are asked for once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from services.kit.edge.keys import KeyCache
from services.kit.problems import ProblemError, unavailable
from services.telemetry import batches
from tests.simulation.loop import Simulation


async def play(simulation: Simulation) -> None:
    """Nodes report, some leave before they are answered; whoever is answered is stored, in his own order."""
    draw = simulation.choices.below
    stored: list[tuple[str, int]] = []

    async def store(reports: Mapping[str, int]) -> Mapping[str, tuple[str, int]]:
        left_out = {node for node in reports if draw(6) == 1}

        def take() -> dict[str, tuple[str, int]]:
            done = {node: (node, item) for node, item in reports.items() if node not in left_out}
            stored.extend(done.values())
            return done

        return await simulation.boundary(take, ConnectionError("lost"))

    async def store_one(node: str, item: int) -> tuple[str, int]:
        await asyncio.sleep(0)
        stored.append((node, item))
        return node, item

    gathering = batches.Batches[int, tuple[str, int]](store, store_one)

    async def node(name: str) -> None:
        for item in range(1 + draw(3)):
            await asyncio.sleep(0.005 * draw(10))
            answer = await gathering.add(name, item)
            simulation.check("an answer is its own report's", answer == (name, item), f"{name} {item}: {answer}")
            simulation.check("accepted is kept", (name, item) in stored, f"{name} {item}")

    for number in range(1 + draw(20)):
        simulation.start(node(f"n{number % 12}"), may_be_cancelled=True)
    await simulation.everything()
    await simulation.quiet()
    simulation.check("nothing is under way for nobody", gathering._running is None and not gathering._waiting)


async def keys(simulation: Simulation) -> None:
    """Callers with the same key ask admission once; one that leaves takes nobody's answer along."""
    draw = simulation.choices.below
    asked: dict[str, int] = {}
    under_way: dict[str, int] = {}
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
        simulation.start(caller(number % 3), may_be_cancelled=True)
    await simulation.everything()
    await simulation.quiet()
    simulation.check("nothing is asked for nobody", not cache._asking, str(cache._asking))
