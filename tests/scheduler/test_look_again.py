"""A plan that asks to be looked at again gets its round, though nothing changes until then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.cycle.plan import Plan
from services.core.cycle.snapshot import Snapshot
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from tests.scheduler.world import World


class Impatient(Fifo):
    """FIFO that asks to be asked again ``after_s``, and counts how often it was."""

    after_s = 3_600.0
    rounds = 0

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        """Decide as FIFO."""
        self.rounds += 1
        plan, memory = super().decide(snapshot, memory)
        return replace(plan, look_again_s=snapshot.now_s + self.after_s), memory


async def test_a_round_is_held_when_a_plan_asked_for_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Impatient(FifoConfig())
    monkeypatch.setattr("services.scheduler.loop.build_policy", lambda *_: policy)
    await world.node("n1", 1)
    for _ in range(3):
        await world.scheduler.turn()

    policy.rounds = 0
    for _ in range(3):
        await world.scheduler.turn()
    assert policy.rounds == 0

    policy.after_s = 0.0
    await world.job(1)
    for _ in range(5):
        await world.scheduler.turn()
    assert policy.rounds == 5
