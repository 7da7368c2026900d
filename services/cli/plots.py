"""Curves and bars drawn in a terminal's characters."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.text import Text

from services.cli.output import clock

EIGHTHS = " ▁▂▃▄▅▆▇█"
BARS = EIGHTHS[1:]
FULL = EIGHTHS[-1]


def sparkline(values: Sequence[float]) -> str:
    """Return values as a line of bars, scaled from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def meter(share: float, width: int, style: str = "green") -> Text:
    """Return a bar of ``width`` columns that is filled to ``share``, from 0 to 1."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    filled = FULL * whole + (EIGHTHS[rest] if rest else "")
    return Text.assemble((filled, style), ("░" * (width - len(filled)), "dim"))


@dataclass(frozen=True, slots=True)
class Piece:
    """A step of a curve: gCO2/kWh from one moment to another, measured or expected."""

    start: datetime
    end: datetime
    value: float
    is_past: bool


def resampled(curve: Sequence[Piece], columns: int) -> list[tuple[float, bool]]:
    """Return the time-weighted mean of a curve in each of ``columns`` equal parts, and whether that part is past.

    Args:
        curve: Steps in order of time, at least one; a gap takes the value before it.
        columns: How many parts.
    """
    began, ended = curve[0].start.timestamp(), curve[-1].end.timestamp()
    width_s = (ended - began) / columns or 1.0
    found: list[tuple[float, bool]] = []
    for column in range(columns):
        low, high = began + column * width_s, began + (column + 1) * width_s
        weights = [(min(p.end.timestamp(), high) - max(p.start.timestamp(), low), p) for p in curve]
        inside = [(seconds, piece) for seconds, piece in weights if seconds > 0]
        if inside:
            total = sum(seconds for seconds, _ in inside)
            middle = max(inside, key=lambda each: each[0])[1]
            found.append((sum(seconds * piece.value for seconds, piece in inside) / total, middle.is_past))
        else:
            found.append(found[-1] if found else (curve[0].value, curve[0].is_past))
    return found


def plot(curve: Sequence[Piece], *, width: int, height: int) -> list[Text]:
    """Return a curve as rows of bars, with a scale from 0 on the left and times below.

    The past is drawn plainly, the expected part in another colour.

    Args:
        curve: Steps in order of time, at least one.
        width: Columns in all, at least 24.
        height: Rows of bars.
    """
    columns = width - SCALE
    values = resampled(curve, columns)
    top = max(value for value, _ in values) or 1.0
    rows: list[Text] = []
    for row in range(height, 0, -1):
        label = f"{top * row / height:>{SCALE - 2}.0f} " if row in (height, (height + 1) // 2) else " " * (SCALE - 1)
        line = Text(label + "│", style="dim")
        for value, is_past in values:
            eighths = round(value / top * height * 8) - (row - 1) * 8
            line.append(EIGHTHS[min(max(eighths, 0), 8)], style="cyan" if is_past else "green")
        rows.append(line)
    rows.append(Text(f"{'0':>{SCALE - 2}} └" + "─" * columns, style="dim"))
    rows.append(Text(" " * SCALE + _times(curve, columns, values), style="dim"))
    return rows


SCALE = 8  #: Columns to the left of the bars


def _times(curve: Sequence[Piece], columns: int, values: Sequence[tuple[float, bool]]) -> str:
    """Return the line below a plot: when it begins and ends, in this machine's zone, and where now is."""
    first, last = (clock(moment, "%a %H:%M") for moment in (curve[0].start, curve[-1].end))
    line = [" "] * columns
    line[: len(first)] = first
    line[-len(last) :] = last
    now = next((at for at, (_, is_past) in enumerate(values) if not is_past), None)
    if now is not None and len(first) + 1 < now < columns - len(last) - 4:
        line[now : now + 3] = "now"
    return "".join(line)


def greenest(curve: Sequence[Piece], length_s: float) -> tuple[datetime, float] | None:
    """Return when the window of ``length_s`` with the lowest mean ahead begins, and that mean; None if none fits.

    Windows begin with a step of the curve.
    """
    ahead = [piece for piece in curve if not piece.is_past]
    found: list[tuple[float, datetime]] = []
    for piece in ahead:
        began = piece.start.timestamp()
        parts = [(min(p.end.timestamp(), began + length_s) - max(p.start.timestamp(), began), p.value) for p in ahead]
        inside = [(seconds, value) for seconds, value in parts if seconds > 0]
        covered = sum(seconds for seconds, _ in inside)
        if covered >= length_s * 0.999:
            found.append((sum(seconds * value for seconds, value in inside) / covered, piece.start))
    if not found:
        return None
    mean, start = min(found)
    return start, mean
