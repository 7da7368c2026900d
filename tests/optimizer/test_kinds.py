"""The kind that the lab computes, where the lab is not installed."""

from __future__ import annotations

import pytest

from optimizer_service import kinds
from services.contracts.optimize import CarbonBoundRequest
from services.kit.problems import ProblemError


async def test_without_the_lab_a_carbon_bound_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "load_plugins", lambda group, kind: iter(()))
    asked = {"zone": "GB", "capacity_gpus": 4, "work": [{"name": "a", "gpu_hours": 1, "power_w": 300}]}

    with pytest.raises(ProblemError, match=r"wattshift-lab, .*pip install \./lab") as caught:
        await kinds.KINDS["carbon-bound"].resolve(CarbonBoundRequest.model_validate(asked), None)

    assert caught.value.status == 422
