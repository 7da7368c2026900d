"""`wattshift policy` says what is in force in a few lines, and the rest where it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.cli.site import cluster

PARAMETER = {"name": "mu", "default": 1.5, "unit": "W", "meaning": "what mu means"}
POLICIES = [
    {"name": name, "active": name == "green", "summary": f"{name} in short", "source": "", "parameters": [PARAMETER]}
    for name in ("fifo", "green", "las")
]


@pytest.mark.parametrize("words", [[], ["--all"]])
def test_the_policy_in_force_is_shown_and_the_others_on_request(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    class Gateway:
        def get(self, path: str) -> Any:
            return {"name": "green", "parameters": {"mu": 2.5}} if path.endswith("active") else {"items": POLICIES}

    monkeypatch.setattr(cluster, "Gateway", Gateway)
    shown = CliRunner().invoke(app, ["policy", *words]).output
    for text in ("green in short", "mu", "2.5"):
        assert text in shown
    for text in ("fifo in short", "las in short", "what mu means"):
        assert (text in shown) == bool(words)
    assert ("others: fifo, las" in shown) != bool(words)
