"""Users from the shell."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.accounts import access
from services.cli.commands import CliError
from services.cli.main import app
from services.contracts.codes import ProblemCode
from tests.cli.conftest import NotingGateway

USER = {
    "id": "user_1",
    "tenant_id": "vision",
    "name": "ada",
    "account": "ada_l",
    "created_at": "2026-03-01T12:00:00Z",
    "disabled_at": None,
}
KEY = {"id": "key_1", "tenant_id": "vision", "user": "ada", "role": "user", "project": "birds", "label": "laptop"}
ME = {"key_id": "key_1", "tenant_id": "vision", "role": "user", "user": "ada", "project": "birds", "account": "ada_l"}


class FakeGateway(NotingGateway):
    """Answers with one user and some keys."""

    is_admins = True

    def answer(self, body: Any) -> Any:
        return USER

    def get(self, path: str) -> Any:
        return ME if path == "/v1/whoami" else USER

    def pages(self, path: str) -> list[Any]:
        if path == "/v1/keys" and not self.is_admins:
            raise CliError("no", code=ProblemCode.FORBIDDEN)
        others = [{**KEY, "id": "key_2", "user": None}, {**KEY, "id": "key_3", "tenant_id": "audio"}]
        return [KEY, *others] if path == "/v1/keys" else [USER, {**USER, "name": "bob", "disabled_at": "2026"}]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    fake = FakeGateway()
    monkeypatch.setattr(access, "Gateway", fake)
    monkeypatch.setattr(access, "Gateway", fake)
    return fake


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_users_are_created_changed_disabled_and_enabled(gateway: FakeGateway) -> None:
    run("users", "create", "ada", "--tenant", "vision", "--account", "ada_l")
    run("users", "set", "ada", "--tenant", "vision", "--account", "none")
    run("users", "disable", "ada", "--tenant", "vision")
    run("users", "enable", "ada", "--tenant", "vision")
    assert gateway.calls == [
        ("POST", "/v1/tenants/vision/users", {"name": "ada", "account": "ada_l"}),
        ("PATCH", "/v1/tenants/vision/users/ada", {"account": None}),
        ("PATCH", "/v1/tenants/vision/users/ada", {"disabled": True}),
        ("PATCH", "/v1/tenants/vision/users/ada", {"disabled": False}),
    ]


def test_users_are_listed_with_or_without_the_word(gateway: FakeGateway) -> None:
    shown = run("users", "--tenant", "vision").output
    assert run("users", "list", "--tenant", "vision").output == shown
    assert [line.split()[:3] for line in shown.splitlines()[-2:]] == [
        ["ada", "ada_l", "enabled"],
        ["bob", "ada_l", "disabled"],
    ]


def test_a_user_is_shown_with_their_keys_where_the_caller_may_see_them(gateway: FakeGateway) -> None:
    assert [
        key["id"] for key in json.loads(run("users", "show", "ada", "--tenant", "vision", "--json").output)["keys"]
    ] == ["key_1"]
    gateway.is_admins = False
    shown = run("users", "show", "ada", "--tenant", "vision").output
    assert "jobs run as the account: ada_l" in shown
    assert "key_1" not in shown


def test_whoami_says_all_that_limits_the_key(gateway: FakeGateway) -> None:
    assert run("whoami").output.strip() == (
        "key_1  user key of ada, tenant vision, limited to the project birds; jobs run as the account ada_l"
    )
    assert json.loads(run("whoami", "--json").output) == ME
