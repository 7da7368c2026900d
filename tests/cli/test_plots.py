"""Curves in a terminal, and the bar of commands that take long."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from services.cli.bars import bar
from services.cli.plots import FULL, Piece, greenest, meter, plot, resampled

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def a_curve(*values: float, past: int = 0) -> list[Piece]:
    """Return a curve of hours, of which the first ``past`` were measured."""
    hours = [NOON + timedelta(hours=hour) for hour in range(len(values) + 1)]
    return [Piece(hours[at], hours[at + 1], value, at < past) for at, value in enumerate(values)]


def test_a_plot_is_as_high_as_its_values_and_says_where_now_is() -> None:
    lines = [line.plain for line in plot(a_curve(*[100.0] * 24, *[400.0] * 24, past=24), width=56, height=4)]

    assert [len(line) for line in lines[:4]] == [56] * 4
    assert lines[0].startswith("   400 │")
    assert [line[8:].count(FULL) for line in lines[:4]] == [24, 24, 24, 48]
    assert lines[4].startswith("     0 └──")
    assert lines[5][8:].index("now") == 24


def test_a_column_is_the_mean_over_its_time() -> None:
    short = [Piece(NOON, NOON + timedelta(minutes=15), 100.0, True), *a_curve(0.0, past=1)]
    quarter = [short[0], Piece(NOON + timedelta(minutes=15), NOON + timedelta(hours=1), 300.0, True)]

    assert resampled(quarter, 1) == [(250.0, True)]
    assert resampled(a_curve(1, 2, 3, 4, past=2), 2) == [(1.5, True), (3.5, False)]


def test_the_greenest_window_lies_ahead_and_fits() -> None:
    curve = a_curve(1, 50, 40, 10, 20, 90, 5, past=1)

    assert greenest(curve, 2 * 3_600) == (NOON + timedelta(hours=3), 15.0)
    assert greenest(curve, 7 * 3_600) is None


def test_a_meter_is_filled_to_its_share_and_never_further() -> None:
    assert [meter(share, 4).plain for share in (0, 0.5, 1, 7)] == ["░░░░", "██░░", "████", "████"]


@pytest.mark.parametrize("of", [7, None])
def test_a_bar_ends_full(capsys: pytest.CaptureFixture[str], of: int | None) -> None:
    with bar("working") as advance:
        advance("first", 1, of)
        advance("second", 3, of)

    last = [line for line in capsys.readouterr().err.splitlines() if line.strip()][-1]
    done, total = re.findall(r"(\d+)/(\d+)", last)[0]
    assert done == total == str(of or 3)


def test_a_bar_that_fails_is_not_full(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with bar("working") as advance:
            advance("first", 1, 7)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()

    assert "1/7" in capsys.readouterr().err
