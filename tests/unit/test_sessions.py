"""Sessions at a terminal, as tests of the documentation replay them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.sessions import Step, on_a_terminal, replay


def test_a_session_that_hangs_is_ended_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ["echo first", "until false; do sleep 0.1; done", "echo last"]
    assert on_a_terminal(commands, tmp_path, dict(os.environ), within_s=1) == [["first"]]

    monkeypatch.setattr("tests.support.sessions.on_a_terminal", lambda *_: [["first"]])
    steps = [Step("echo first", ["first"]), *map(Step, commands[1:])]
    with pytest.raises(AssertionError, match=r"not over in time: [$] until false"):
        replay(steps, commands, tmp_path)
