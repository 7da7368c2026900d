"""What engines' users are told that their runs will emit."""

from __future__ import annotations

import pytest

from tests.engines.bridge import Bridge, a_job
from tests.scheduler.world import World


async def test_a_release_says_what_the_run_is_expected_to_emit(world: World) -> None:
    bridge = Bridge(world)
    await bridge.enrol(nodes=1, gpus=4)
    await bridge.say(a_job("1", gpus=2, time_limit_s=36_000.0), a_job("2", gpus=1, time_limit_s=36_000.0))
    pair, single = [(await bridge.decision(name))["gco2"] for name in ("1", "2")]
    assert single > 0
    assert pair == pytest.approx(2 * single, abs=1.0), "twice the GPUs, for as long"


async def test_what_is_not_known_is_not_said(world: World) -> None:
    bridge = Bridge(world, kind="ray")
    await bridge.enrol(nodes=1, gpus=4)
    await bridge.say(a_job("1", gpus=8, time_limit_s=36_000.0))
    decision = await bridge.decision("1")
    assert (decision["action"], "gco2" in decision) == ("hold", False), "no node has as many GPUs"
