"""What a bridge is told of the grids of its clusters."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.engines import EngineMode, EngineReply, EngineReport
from services.kit.ids import utc_now
from tests.support.control_plane import OPERATOR, service_headers
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


async def test_odd_names_of_models_and_nodes_that_are_named_twice_harm_nobody(plane: Any) -> None:
    """Whatever a site calls its GPUs, everybody's nodes can be listed."""
    await an_engine(plane)
    names = ("NVIDIA A100 80GB", "A100:sxm", "\u00e9", "", "NVIDIA A100 80GB")
    nodes = [
        {"name": name, "gpus": 1, "gpu_model": model, "memory_gib": 80, "queues": []}
        for name, model in zip("abcda", names, strict=True)
    ]
    report = {"boot_id": "b", "kind": "slurm", "mode": "control", "nodes": nodes}
    headers = {"authorization": "Bearer token"}
    assert (await plane.http.post("/v1/nodes/slurm/engine", json=report, headers=headers)).status_code == 200
    listed = (await plane.http.get("/v1/nodes", headers=service_headers(OPERATOR))).json()["items"]
    models = {node["id"]: node["devices"][0]["model"] for node in listed if node["devices"]}
    for name, model in {"a": "NVIDIA-A100-80GB", "b": "A100-sxm", "c": "GPU", "d": "GPU"}.items():
        assert models[f"slurm.{name}"] == model
