"""The kinds that the lab computes, where the lab is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer_service import kinds
from services.contracts.optimize import LabRequest, Solve
from services.core.domain.errors import DomainError
from services.kit.problems import ProblemError


async def test_without_the_lab_its_kinds_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "load_plugins", lambda group, kind: iter(()))
    carbon: Any = None

    for name in kinds.REQUESTS.keys() - kinds.KINDS:
        with pytest.raises(DomainError, match=r"wattshift-lab, .*pip install \./lab"):
            kinds.kind_of(name)
        with pytest.raises(ProblemError, match="wattshift-lab") as caught:
            await kinds.problem_of(name, LabRequest.model_validate({"zone": "GB"}), carbon)
        assert caught.value.status == 422


def test_a_stored_solve_of_the_labs_is_shown_as_it_is() -> None:
    stored = {"kind": "carbon-bound", "work": [], "capacity_gpus": 4}

    found = Solve.model_validate(
        {
            **{"id": "solve_1", "kind": "carbon-bound", "tenant_id": "acme", "state": "queued"},
            **{"submitted_at": "2026-03-01T12:00:00Z", "problem": stored},
        }
    )

    assert found.model_dump(mode="json")["problem"] == stored
