"""Which account the jobs of an installation's own admin key run as."""

from __future__ import annotations

import os
import pwd

import pytest

from services.standalone.processes import ROOT, accounts, first_account


def test_it_is_that_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: pwd.getpwnam("nobody").pw_uid)
    assert first_account({}) == "nobody"
    assert first_account({"SUDO_USER": "daemon"}) == "nobody", "a variable alone makes nobody another account"
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    assert first_account({}) == ""


def test_of_root_it_is_the_one_that_called_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert first_account({"SUDO_USER": "nobody"}) == "nobody"
    assert first_account({"SUDO_USER": "no-such-account"}) == ""
    assert first_account({}) == "", "no job runs as root"
    settings = accounts({"SUDO_USER": "daemon", "GPU_AGENT_SHOWN_FOLDERS": "/data"})
    assert (settings["ADMISSION_FIRST_ACCOUNT"], settings["GPU_AGENT_RESERVED_ACCOUNTS"]) == ("daemon", "nobody")
    assert settings["GPU_AGENT_SHOWN_FOLDERS"].split(",") == ["/data", str(ROOT / "examples"), str(ROOT / "clients")]
    assert "GPU_AGENT_RUN_AS" not in settings, "other tenants' jobs are not the caller's"


def test_an_operators_own_choice_comes_first() -> None:
    assert first_account({"GPU_AGENT_RUN_AS": "nobody"}) == ""
    assert first_account({"ADMISSION_FIRST_ACCOUNT": "daemon", "SUDO_USER": "nobody"}) == "daemon"
