"""Charts as SVG: bars beside a baseline, stacks of causes, points, and lines over time with the grid behind them.

They stand inline in a page; ``picture`` and ``dots_picture`` make files, with everything in the drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from services.cli.reports.charts import (
    BOTTOM,
    FAINT,
    HEIGHT,
    INK,
    LEFT,
    RIGHT,
    WIDTH,
    bar,
    frame,
    height_of,
    svg,
    text,
    ticks,
)

COLOURS = (
    *("#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6", "#79706e"),
    *("#1f3b5c", "#2b6b2b", "#8c4a00", "#5c3a55", "#a11d21", "#2f6f6b"),
)
GRID_COLOUR = "#c0392b"


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def legend(names: Sequence[str], extra: str = "", extra_colour: str = GRID_COLOUR) -> str:
    """Return the names beside their colours, and optionally an extra entry, shown as a line of its own colour."""
    keys = [f'<span><i style="background:{colour(at)}"></i>{escape(name)}</span>' for at, name in enumerate(names)]
    if extra:
        keys.append(f'<span><i style="background:{extra_colour};height:2px"></i>{escape(extra)}</span>')
    return f'<div class="legend">{"".join(keys)}</div>'


@dataclass(frozen=True)
class Line:
    """A series of (x, y) with a name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """A point with a name."""

    name: str
    x: float
    y: float


def bars(
    groups: Sequence[str],
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    marks: Sequence[float] = (),
    mark: str = "",
    most: float = math.inf,
) -> str:
    """Return bars with a dashed line at the baseline's value, 1.

    Args:
        groups, names: Names of the groups, and of the series in each.
        values: ``values[g][n]``; NaN leaves a gap.
        marks: One value per group, drawn across it; NaN for none.
        mark: What the marks are.
        most: Bars higher than this are cut off there and labelled with their value.
    """
    known = [value for row in (*values, marks) for value in row if value == value]
    high = max([1.05, *(min(value, most) for value in known)])
    top, low = high * 1.08 if known else 1.0, min([0.0, *known]) * 1.1
    parts = [frame(low, top)]
    slot = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    thick = slot * 0.84 / max(len(names), 1)
    for at, group in enumerate(groups):
        begin = LEFT + at * slot + slot * 0.08
        for index, value in enumerate(values[at]):
            if value != value:
                continue
            shown = min(value, most)
            x, what = begin + index * thick, f"{names[index]}, {group}: {value:.3f}"
            parts.append(
                bar(x, max(thick - 1.5, 1), (min(shown, 0.0), max(shown, 0.0)), (low, top), colour(index), what)
            )
            end = height_of(max(shown, 0.0), low, top)
            if thick > 24:
                parts.append(text(x + thick / 2, end - 3, f"{value:.2f}", "middle", 10))
            elif value > most:
                turned = f'transform="rotate(-90 {x + thick / 2 + 3:.1f} {end + 4:.1f})"'
                parts.append(text(x + thick / 2 + 3, end + 4, f"{value:.1f}", "end", 10, "#fff", turned))
        if at < len(marks) and marks[at] == marks[at]:
            y, end = height_of(marks[at], low, top), begin + slot * 0.84
            what = f"<title>{escape(mark)}, {escape(group)}: {marks[at]:.3f}</title>"
            parts.append(f'<path d="M{begin:.1f} {y:.1f}H{end:.1f}" stroke="{INK}" stroke-width="2">{what}</path>')
        parts.append(text(LEFT + (at + 0.5) * slot, HEIGHT - BOTTOM + 18, group, "middle"))
    y = height_of(1.0, low, top)
    parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="4 3"/>')
    return svg(parts) + legend(names, mark, INK)


def stacks(groups: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]], *, unit: str) -> str:
    """Return one row per group: its parts to the left of zero and to the right, and a tick at their sum.

    Args:
        groups: Of the rows.
        names: Of the parts.
        values: ``values[group][part]``.
        unit: Of the values.
    """
    reach = max((sum(abs(value) for value in row if value == value) for row in values), default=0.0) * 1.05 or 1.0
    left, middle, right = 20.0 + 6.2 * max(map(len, groups), default=0), 0.0, float(WIDTH - 70)
    height = 22 * len(groups) + 34

    def x(value: float) -> float:
        return left + (value + reach) / (2 * reach) * (right - left)

    parts: list[str] = []
    for value in ticks(-reach, reach):
        parts.append(f'<path d="M{x(value):.1f} 4V{height - 24}" stroke="{INK if abs(value) < 1e-12 else FAINT}"/>')
        parts.append(text(x(value), height - 8, f"{100 * value:+.3g} %" if abs(value) > 1e-12 else "0", "middle"))
    for at, row in enumerate(values):
        y, ends = 8 + 22 * at, [middle, middle]
        for index, value in enumerate(row):
            side = int(value > 0)
            begin, ends[side] = ends[side], ends[side] + value
            start, width = x(min(begin, ends[side])), abs(x(value) - x(0.0))
            what = f"<title>{escape(groups[at])}: {escape(names[index])} {100 * value:+.1f} %</title>"
            box = f'x="{start:.1f}" y="{y}" width="{width:.1f}" height="15"'
            parts.append(f'<rect {box} fill="{colour(index)}">{what}</rect>')
        total = sum(row)
        parts.append(f'<path d="M{x(total):.1f} {y - 2}V{y + 17}" stroke="{INK}" stroke-width="2.5"/>')
        parts.append(text(left - 8, y + 12, groups[at], "end"))
        parts.append(text(WIDTH - 62, y + 12, f"{100 * total:+.1f} %", "start"))
    return f'<p class="unit">{escape(unit)}</p>' + svg(parts, height) + legend(names, "sum", INK)


def lines(series: Sequence[Line], unit: str, behind: Line | None = None, behind_unit: str = "") -> str:
    """Return lines over hours; ``behind`` goes on an axis of its own, at the right."""
    drawn = [line for line in series if line.x]
    if not drawn:
        return "<p>nothing to draw</p>"
    last = max(max(line.x) for line in drawn) or 1.0
    top = max(max(line.y) for line in drawn) * 1.06 or 1.0
    parts = [frame(0.0, top)]
    if behind is not None and behind.y:
        high = max(behind.y) * 1.06 or 1.0
        parts.append(
            _path(behind, last, (0.0, high), GRID_COLOUR, 'stroke-width="1" stroke-dasharray="3 2" opacity="0.7"')
        )
        for value in ticks(0.0, high):
            y = height_of(value, 0.0, high) + 4
            parts.append(text(WIDTH - RIGHT + 6, y, f"{value:g}", "start", 11, GRID_COLOUR))
    for index, line in enumerate(drawn):
        parts.append(_path(line, last, (0.0, top), colour(index), 'stroke-width="1.8"'))
    for hours in ticks(0.0, last):
        x = LEFT + hours / last * (WIDTH - LEFT - RIGHT)
        parts.append(text(x, HEIGHT - BOTTOM + 18, f"{hours:g} h", "middle"))
    return f'<p class="unit">{escape(unit)}</p>' + svg(parts) + legend([line.name for line in drawn], behind_unit)


def dots(points: Sequence[Dot], x_unit: str, y_unit: str, line: float | None = None, what: str = "") -> str:
    """Return points, of which those are joined that no other one is below and left of.

    Args:
        points: Less is better along both axes.
        x_unit, y_unit: What the axes are.
        line: A value of y that is drawn across; None: none.
        what: What that is.
    """
    if not points:
        return "<p>nothing to draw</p>"
    drawn = svg(_dots(points, 0.0, x_unit, line, what))
    return f'<p class="unit">{escape(y_unit)}</p>{drawn}{legend([point.name for point in points])}'


def dots_picture(points: Sequence[Dot], x_unit: str, y_unit: str) -> str:
    """Return a file of at least two points with their names, those joined that no other one is below and left of.

    The horizontal axis begins at the leftmost point, so that names have room.
    """
    left = min(point.x for point in points)
    parts = [*_dots(points, left - 0.05 * (max(point.x for point in points) - left), x_unit)]
    return _file([*parts, text(LEFT, 9, y_unit, "start", 12)], HEIGHT)


def _dots(points: Sequence[Dot], left: float, x_unit: str, line: float | None = None, what: str = "") -> list[str]:
    right = left + (max(point.x for point in points) - left) * 1.12 or 1.0
    heights = [point.y for point in points] + ([] if line is None else [line])
    margin = 0.15 * (max(heights) - min(heights)) or 0.1 * abs(heights[0]) or 1.0
    low, top = min(heights) - margin, max(heights) + margin
    parts = [frame(low, top)]

    def along(value: float) -> float:
        return LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    for value in ticks(left, right):
        parts.append(text(along(value), HEIGHT - BOTTOM + 16, f"{round(value, 9):g}", "middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_unit, "middle"))
    if line is not None:
        y = height_of(line, low, top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID_COLOUR}" stroke-dasharray="6 3"/>')
        parts.append(text(LEFT + 4, y - 4, what, "start", 11, GRID_COLOUR))
    joined = " ".join(f"{along(point.x):.1f},{height_of(point.y, low, top):.1f}" for point in front(points))
    parts.append(f'<polyline points="{joined}" fill="none" stroke="{INK}" stroke-width="1.2"/>')
    for index, point in enumerate(points):
        x, y = along(point.x), height_of(point.y, low, top)
        title = f"<title>{escape(point.name)}: {point.x:.3g}, {point.y:.4g}</title>"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour(index)}">{title}</circle>')
        parts.append(text(x + 8, y - 6 if index % 2 else y + 14, point.name, "start"))
    return parts


def front(points: Sequence[Dot]) -> list[Dot]:
    """Return the points that no other one is below and left of, from left to right."""
    best: list[Dot] = []
    for point in sorted(points, key=lambda each: (each.x, each.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best


def picture(charts: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """Return a file of line charts over hours, one below the other, each with its title and its names."""
    parts: list[str] = []
    for at, (title, series) in enumerate(charts):
        last = max(max(line.x) for line in series) or 1.0
        values = [value for line in series for value in line.y]
        low, top = min(0.0, *values) * 1.06, max(values) * 1.06 or 1.0
        parts.append(f'<g transform="translate(0 {at * (HEIGHT + 24) + 20})">{frame(low, top)}')
        parts.append(text(LEFT, 2, title, "start", 12))
        for index, line in enumerate(series):
            parts.append(_path(line, last, (low, top), colour(index), 'stroke-width="1.6"'))
            parts.append(text(WIDTH - RIGHT - 110 * (len(series) - index - 1), 2, line.name, "end", 11, colour(index)))
        for hours in ticks(0.0, last):
            x = LEFT + hours / last * (WIDTH - LEFT - RIGHT)
            parts.append(text(x, HEIGHT - BOTTOM + 18, f"{hours:g} h", "middle"))
        parts.append("</g>")
    return _file(parts, len(charts) * (HEIGHT + 24))


def _file(parts: Sequence[str], height: int) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{ground}{"".join(parts)}</svg>\n'


def _path(line: Line, last: float, span: tuple[float, float], stroke: str, style: str) -> str:
    inner = WIDTH - LEFT - RIGHT
    points = " ".join(
        f"{LEFT + x / last * inner:.1f},{height_of(y, *span):.1f}"
        for x, y in zip(line.x, line.y, strict=True)
        if 0 <= x <= last
    )
    return f'<polyline points="{points}" fill="none" stroke="{stroke}" {style}/>'
