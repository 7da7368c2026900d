"""The bar of a solve."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from services.cli import bars
from services.cli.planning import solving
from services.cli.planning.solving import solving_bar
from services.core.domain.solving import Progress, unreported


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    shown = Console(file=written, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(solving, "errors", shown)
    monkeypatch.setattr(bars, "errors", shown)
    return written


def test_a_bar_names_what_is_done_and_ends_full(terminal: io.StringIO) -> None:
    with solving_bar(quiet=False) as report:
        report(Progress(0.5, "photos: evaluation 3", 23.456))
        report(Progress(0.2, "photos: bound"))

    shown = terminal.getvalue()
    percents = [int(found) for found in re.findall(r"(\d+)/100", shown)]
    assert percents == sorted(percents)
    assert percents[-1] == 100


def test_a_solve_that_fails_leaves_no_full_bar(terminal: io.StringIO) -> None:
    def broken() -> None:
        with solving_bar(quiet=False) as report:
            report(Progress(0.5, "halfway"))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        broken()

    assert "100/100" not in terminal.getvalue()


def test_programs_see_nothing(terminal: io.StringIO) -> None:
    with solving_bar(quiet=True) as report:
        assert report is unreported

    assert terminal.getvalue() == ""
