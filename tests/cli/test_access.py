"""Tenants, keys and the audit log from the shell."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.accounts import access
from services.cli.accounts.access import key_state
from services.cli.commands import CliError
from services.cli.main import app
from services.contracts.identity import KeyLimits
from tests.cli.conftest import NotingGateway

NOW = datetime.now(UTC)
KEY = {
    "id": "key_1",
    "tenant_id": "vision",
    "role": "read_only",
    "user": "ada",
    "project": None,
    "label": "CI",
    "created_at": NOW.isoformat(),
    "revoked_at": None,
    "expires_at": None,
    "last_used_at": NOW.isoformat(),
    "limits": KeyLimits(
        aliases={"chat": {"llama": 95, "next": 5}, "small": {"llama": 1}}, requests_per_min=60, month_gco2=5.0
    ).model_dump(),
    "used": {"month": "2026-11", "tokens": 9, "gco2": 1.5, "cost": 0.0},
}


class FakeGateway(NotingGateway):
    """Answers with one key or one entry."""

    def answer(self, body: Any) -> dict[str, Any]:
        return {**KEY, "secret": "ws_secret"}

    def newest(self, path: str, limit: int, **params: Any) -> list[dict[str, Any]]:
        return self.pages(path, **params)

    def pages(self, path: str, **params: Any) -> list[dict[str, Any]]:
        self.calls.append(("GET", path, params))
        revoked = {**KEY, "id": "key_2", "revoked_at": NOW.isoformat()}
        entry = {"at": NOW.isoformat(), "tenant_id": "", "key_id": "", "action": "node.zone_changed", "target": "n1"}
        return [{**entry, "data": {"before": "SE", "after": "DE"}}] if path == "/v1/audit" else [KEY, revoked]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    fake = FakeGateway()
    monkeypatch.setattr(access, "Gateway", fake)
    return fake


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_a_key_is_created_with_its_role_and_its_end(gateway: FakeGateway) -> None:
    done = run("keys", "create", "--tenant", "vision", "--role", "read-only", "--label", "CI", "--expires", "90d")
    assert done.exit_code == 0, done.output
    assert "ws_secret" in done.output
    ((method, path, body),) = gateway.calls
    assert (method, path, body["role"], body["tenant_id"]) == ("POST", "/v1/keys", "read_only", "vision")
    days = (datetime.fromisoformat(body["expires_at"]) - NOW) / timedelta(days=1)
    assert days == pytest.approx(90, abs=0.1)


def test_a_key_is_created_for_a_user_and_a_project(gateway: FakeGateway) -> None:
    done = run("keys", "create", "--tenant", "vision", "--user", "ada", "--project", "birds")
    ((_, _, body),) = gateway.calls
    assert (body["user"], body["project"]) == ("ada", "birds")
    assert "read-only key of ada, tenant vision" in done.output


def test_keys_are_rotated_expired_and_revoked(gateway: FakeGateway) -> None:
    run("keys", "rotate", "key_1", "--overlap", "1h")
    run("keys", "expire", "key_1", "never")
    run("keys", "expire", "key_1", "2099-01-01T00:00:00+00:00")
    run("keys", "revoke", "key_1")
    assert gateway.calls == [
        ("POST", "/v1/keys/key_1/rotate", {"overlap_s": 3_600.0, "expires_at": None}),
        ("PATCH", "/v1/keys/key_1", {"expires_at": None}),
        ("PATCH", "/v1/keys/key_1", {"expires_at": "2099-01-01T00:00:00+00:00"}),
        ("DELETE", "/v1/keys/key_1", None),
    ]


def test_limits_of_keys_are_given_changed_and_shown(gateway: FakeGateway) -> None:
    run("keys", "create", "--models", "llama, small", "--alias", "gpt-4o=llama=95,small=5", "--requests-per-min", "60")
    done = run("keys", "set", "key_1", "--month-gco2", "2.5", "--priority", "none", "--models", "none")
    assert [body["limits"] for _, _, body in gateway.calls] == [
        {"models": ["llama", "small"], "aliases": {"gpt-4o": {"llama": 95, "small": 5}}, "requests_per_min": 60},
        {"models": None, "month_gco2": 2.5, "priority": None},
    ]
    shown = "chat = llama=95, next=5; small = llama; 60 requests/min; 1.5 of 5 gCO2 a month"
    assert shown in " ".join(done.output.split())
    for words in (["--alias", "a=b=c"], ["--alias", "=b"], ["--requests-per-min", "many"], []):
        assert isinstance(run("keys", "set", "key_1", *words).exception, CliError)
    assert len(gateway.calls) == 2


@pytest.mark.parametrize("command", [("keys", "create"), ("keys", "set", "key_1")])
@pytest.mark.parametrize(
    ("words", "twice"),
    [
        (["--alias", "x=a,a"], "a"),
        (["--alias", "x=a=95,b=4,a=1"], "a"),
        (["--alias", "x=a, a=2"], "a"),
        (["--alias", "x=a", "--alias", "y=a", "--alias", "x=b"], "x"),
        (["--models", "llama, small,llama"], "llama"),
    ],
)
def test_what_is_given_twice_is_not_dropped(
    gateway: FakeGateway, command: tuple[str, ...], words: list[str], twice: str
) -> None:
    error = run(*command, *words).exception
    assert isinstance(error, CliError)
    assert str(error).endswith(f": {twice} is given twice")
    assert gateway.calls == []


def test_only_valid_keys_are_listed_unless_all_are_wanted(gateway: FakeGateway) -> None:
    assert [key["id"] for key in json.loads(run("keys", "--json").output)] == ["key_1"]
    assert [key["id"] for key in json.loads(run("keys", "--all", "--json").output)] == ["key_1", "key_2"]
    shown = run("keys", "--all").output
    assert "read-only" in shown
    assert "revoked" in shown
    assert key_state({**KEY, "expires_at": "2020-01-01T00:00:00Z"}) == "expired"


def test_tenants_are_created_and_changed(gateway: FakeGateway) -> None:
    run("tenants", "create", "vision", "--max-gpus", "64")
    run("tenants", "set", "vision", "--max-gpus", "none", "--max-jobs", "10")
    run("tenants", "set", "vision", "--weight", "2.5")
    assert [body for _, _, body in gateway.calls] == [
        {"id": "vision", "limits": {"max_gpus": 64}},
        {"limits": {"max_gpus": None, "max_active_jobs": 10}},
        {"limits": {"share_weight": 2.5}},
    ]


def test_shares_of_tenants_are_shown(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = {"tenant_id": "vision", "weight": 3.0, "share": 0.75, "gpus": 6, "waiting_jobs": 2, "used_gpu_hours": 12.5}
    found = {"policy": "fair+las", "active": True, "jain": 0.9, "items": [tenant]}
    monkeypatch.setattr(gateway, "get", lambda path: found, raising=False)
    done = run("tenants", "shares")
    assert "75.0 %" in done.output
    assert "12.5" in done.output
    assert "Jain's index of the tenants that wait: 0.900" in done.output
    found |= {"policy": "las", "active": False, "jain": None, "items": [{**tenant, "used_gpu_hours": None}]}
    assert "the policy las does not share between tenants" in run("tenants", "shares").output


def test_the_audit_log_is_read_since_a_time(gateway: FakeGateway) -> None:
    done = run("audit", "--since", "2d", "--action", "node.")
    assert "node.zone_changed" in done.output
    assert "before SE, after DE" in done.output
    ((_, _, params),) = gateway.calls
    assert params["action"] == "node."
    assert (NOW - datetime.fromisoformat(params["since"])) / timedelta(days=1) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("keys", "create", "--role", "root"), "--role root: must be one of grid, read-only, user, operator, admin"),
        (("keys", "create", "--expires", "soon"), "--expires: 'soon' is not a duration"),
        (("keys", "create", "--expires", "2020-01-01"), "--expires 2020-01-01: must be in the future"),
        (("tenants", "set", "vision"), "give a limit: --max-gpus"),
        (("tenants", "set", "vision", "--max-gpus", "many"), "--max-gpus many: must be a whole number, or none"),
        (("audit", "--since", "lately"), "--since: 'lately' is neither an age"),
    ],
)
def test_a_wrong_option_is_one_line_and_changes_nothing(
    gateway: FakeGateway, words: tuple[str, ...], line: str
) -> None:
    done = run(*words)
    assert str(done.exception).startswith(line)
    assert gateway.calls == []
