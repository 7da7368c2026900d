"""Budgets from the shell."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.accounts import budgets
from services.cli.main import app
from tests.cli.conftest import NotingGateway


class FakeGateway(NotingGateway):
    """Answers with the budget that was set."""

    def answer(self, body: Any) -> dict[str, Any]:
        return {**(body or {}), "id": "budget_1", "used": 12.0, "month": "2026-11", "exceeded": True}

    def get(self, path: str) -> dict[str, Any]:
        spec = {"tenant_id": "vision", "project": None, "quantity": "gpu_h", "amount": 10.0, "action": "hold"}
        return {"items": [{**spec, "id": "budget_1", "used": 12.0, "month": "2026-11", "exceeded": True}]}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    fake = FakeGateway()
    monkeypatch.setattr(budgets, "Gateway", fake)
    return fake


def test_each_quantity_is_a_budget_of_its_own(gateway: FakeGateway) -> None:
    done = CliRunner().invoke(
        app, ["budgets", "set", "vision", "--tenant", "t", "--kwh", "500", "--gco2", "9e4", "--then", "warn"]
    )
    assert done.exit_code == 0, done.output
    common = {"tenant_id": "t", "project": "vision", "action": "warn"}
    assert [body for _, _, body in gateway.calls] == [
        {**common, "quantity": "kwh", "amount": 500.0},
        {**common, "quantity": "gco2", "amount": 90_000.0},
    ]
    assert "12 of 500 kWh used in 2026-11, then warn" in done.output


def test_budgets_are_listed_and_removed(gateway: FakeGateway) -> None:
    shown = CliRunner().invoke(app, ["budgets"]).output
    assert "(all)" in shown
    assert "exceeded" in shown
    CliRunner().invoke(app, ["budgets", "remove", "budget_1"])
    assert gateway.calls == [("DELETE", "/v1/budgets/budget_1", None)]


@pytest.mark.parametrize(
    ("words", "line"),
    [(("vision",), "give an amount: --gpu-hours, --kwh or --gco2"), (("--kwh", "1", "--then", "stop"), "--then stop:")],
)
def test_a_wrong_option_is_one_line_and_changes_nothing(
    gateway: FakeGateway, words: tuple[str, ...], line: str
) -> None:
    done = CliRunner().invoke(app, ["budgets", "set", *words])
    assert str(done.exception).startswith(line)
    assert gateway.calls == []
