"""What a shell and a terminal see: the version, completion, Ctrl-C, and lists that are shown again."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from services.cli import output
from services.cli.jobs import following


def wattshift(*words: str, **variables: str) -> str:
    command = [str(Path(sys.executable).parent / "wattshift"), *words]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True).stdout


def test_it_says_its_version() -> None:
    assert wattshift("--version").startswith("wattshift ")


def test_a_shell_can_complete_commands() -> None:
    completed = wattshift(_WATTSHIFT_COMPLETE="complete_bash", COMP_WORDS="wattshift sub", COMP_CWORD="1")
    assert completed.split() == ["submit"]


def test_ctrl_c_leaves_the_job_and_says_how_to_cancel_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, following.interruptible(["job_a"]):
        raise KeyboardInterrupt
    assert left.value.exit_code == following.EXIT_INTERRUPTED
    assert capsys.readouterr().err.strip() == "The job goes on. To cancel: wattshift cancel job_a"


def test_a_watched_list_is_shown_again_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(output, "console", Console(force_terminal=True, file=shown, width=80))
    monkeypatch.setattr(output, "WATCH_S", 0)
    pictures = iter(["first", "second"])

    def make() -> str:
        if (picture := next(pictures, None)) is None:
            raise KeyboardInterrupt
        return picture

    with pytest.raises(KeyboardInterrupt):
        output.show(make, watch=True)
    assert "first" in shown.getvalue()
    assert "second" in shown.getvalue()
