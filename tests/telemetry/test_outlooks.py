"""What a bridge is told of the grids of its clusters."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.engines import EngineMode, EngineReply, EngineReport
from services.kit.ids import utc_now
from tests.telemetry.test_measured import an_engine


async def asked(plane: Any, *zones: str) -> EngineReply:
    report = EngineReport(boot_id="b", kind="slurm", mode=EngineMode.CONTROL, wants_outlooks=list(zones))
    headers = {"authorization": "Bearer token"}
    answer = await plane.http.post("/v1/nodes/slurm/engine", json=report.model_dump(mode="json"), headers=headers)
    assert answer.status_code == 200, answer.text
    return EngineReply.model_validate_json(answer.content)


async def test_a_bridge_is_told_what_its_zones_will_emit(plane: Any) -> None:
    await an_engine(plane)
    now_s = utc_now().timestamp()
    plane.carbon.steps = [
        (now_s - 3_600, now_s + 1_800, 100.0, "measured"),
        (now_s + 1_800, now_s + 5_400, 500.0, "provider"),
    ]
    (outlook,) = (await asked(plane, plane.zone)).outlooks
    assert outlook.zone == plane.zone
    assert outlook.mean(now_s, now_s + 3_600) == pytest.approx(300, rel=1e-3)
    assert outlook.mean(now_s + 1_800, now_s + 90_000) == 500, "the last step holds on"
    assert (await asked(plane)).outlooks == [], "who asks for none is told none"


async def test_zones_of_which_nothing_is_known_are_left_out(plane: Any) -> None:
    await an_engine(plane)
    plane.carbon.is_down = True
    assert (await asked(plane, "NOWHERE")).outlooks == []
