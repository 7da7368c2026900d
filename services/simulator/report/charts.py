"""Charts as inline SVG: grouped bars, and lines over time with the grid's intensity behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 14, 40
COLOURS = ("#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6", "#79706e")
INK, FAINT, GRID_COLOUR = "#333", "#ddd", "#c0392b"


@dataclass(frozen=True)
class Line:
    """A series of (x, y) with a name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def colour(index: int) -> str:
    """Return the colour of the series of that number."""
    return COLOURS[index % len(COLOURS)]


def legend(names: Sequence[str], extra: str = "") -> str:
    """Return the names beside their colours."""
    keys = [f'<span><i style="background:{colour(at)}"></i>{escape(name)}</span>' for at, name in enumerate(names)]
    if extra:
        keys.append(f'<span><i style="background:{GRID_COLOUR};height:2px"></i>{escape(extra)}</span>')
    return f'<div class="legend">{"".join(keys)}</div>'


def bars(groups: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]], *, line: float = 1.0) -> str:
    """Return bars: ``values[g][n]`` for group g and series n; a dashed line at the baseline's value."""
    known = [value for row in values for value in row if value == value]
    top, low = max([line * 1.05, *known]) * 1.08 if known else 1.0, min([0.0, *known]) * 1.1
    parts = [_frame(low, top)]
    slot = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    thick = slot * 0.84 / max(len(names), 1)
    for at, group in enumerate(groups):
        begin = LEFT + at * slot + slot * 0.08
        for index, value in enumerate(values[at]):
            if value != value:
                continue
            y, zero = _y(max(value, 0.0), low, top), _y(min(value, 0.0), low, top)
            what = f"{escape(names[index])}, {escape(group)}: {value:.3f}"
            x = begin + index * thick
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(thick - 1.5, 1):.1f}" height="{max(zero - y, 0.5):.1f}" '
                f'fill="{colour(index)}"><title>{what}</title></rect>'
            )
            if thick > 24:
                parts.append(_text(x + thick / 2, y - 3, f"{value:.2f}", "middle", 10))
        parts.append(_text(LEFT + (at + 0.5) * slot, HEIGHT - BOTTOM + 18, group, "middle"))
    y = _y(line, low, top)
    parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="4 3"/>')
    return _svg(parts) + legend(names)


def lines(series: Sequence[Line], *, unit: str, behind: Line | None = None, behind_unit: str = "") -> str:
    """Return lines over hours; ``behind`` goes on an axis of its own, at the right."""
    drawn = [line for line in series if line.x]
    if not drawn:
        return "<p>nothing to draw</p>"
    last = max(max(line.x) for line in drawn) or 1.0
    top = max(max(line.y) for line in drawn) * 1.06 or 1.0
    parts = [_frame(0.0, top)]
    if behind is not None and behind.y:
        high = max(behind.y) * 1.06 or 1.0
        parts.append(_path(behind, last, high, GRID_COLOUR, 'stroke-width="1" stroke-dasharray="3 2" opacity="0.7"'))
        for share in (0.0, 0.5, 1.0):
            y = _y(share * high, 0.0, high) + 4
            parts.append(_text(WIDTH - RIGHT + 6, y, _number(share * high), "start", 11, GRID_COLOUR))
    for index, line in enumerate(drawn):
        parts.append(_path(line, last, top, colour(index), 'stroke-width="1.8"'))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{_number(share * last)} h", "middle"))
    return f'<p class="unit">{escape(unit)}</p>' + _svg(parts) + legend([line.name for line in drawn], behind_unit)


def _path(line: Line, last: float, top: float, stroke: str, style: str) -> str:
    inner = WIDTH - LEFT - RIGHT
    points = " ".join(
        f"{LEFT + x / last * inner:.1f},{_y(y, 0.0, top):.1f}"
        for x, y in zip(line.x, line.y, strict=True)
        if 0 <= x <= last
    )
    return f'<polyline points="{points}" fill="none" stroke="{stroke}" {style}/>'


def _frame(low: float, top: float) -> str:
    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = low + share * (top - low)
        y = _y(value, low, top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        parts.append(_text(LEFT - 6, y + 4, _number(value), "end"))
    return "".join(parts)


def _y(value: float, low: float, top: float) -> float:
    return TOP + (1 - (value - low) / (top - low)) * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, anchor: str, size: int = 11, fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 20 else f"{value:.2g}"


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
