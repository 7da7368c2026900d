"""The variables of serving, and the names that some of them had before."""

from __future__ import annotations

import pytest

from services.serving.settings import ServingSettings


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTSHIFT_SERVICE_TOKEN", "x" * 16)


def test_variables_that_were_the_optimizers_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMIZER_PLAN_LEAD_S", "60")
    monkeypatch.setenv("OPTIMIZER_KEEP_DAYS", "7")
    settings = ServingSettings()  # type: ignore[call-arg]
    assert (settings.plan_lead_s, settings.keep_days) == (60, 7)


def test_its_own_name_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMIZER_PLAN_LEAD_S", "60")
    monkeypatch.setenv("SERVING_PLAN_LEAD_S", "30")
    assert ServingSettings().plan_lead_s == 30  # type: ignore[call-arg]


def test_what_never_concerned_pools_is_not_taken_from_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMIZER_PORT", "1")
    monkeypatch.setenv("OPTIMIZER_LEASE_S", "99")
    settings = ServingSettings()  # type: ignore[call-arg]
    assert (settings.port, settings.lease_s) == (8090, 15)
