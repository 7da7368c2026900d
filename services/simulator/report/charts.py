"""Charts as inline SVG: grouped bars, and parts that the lab's charts share."""

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 14, 40
COLOURS = (
    *("#4c78a8", "#54a24b", "#f58518", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6", "#79706e"),
    *("#1f3b5c", "#2b6b2b", "#8c4a00", "#5c3a55", "#a11d21", "#2f6f6b"),
)
INK, FAINT, GRID_COLOUR = "#333", "#ddd", "#c0392b"


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def legend(names: Sequence[str], extra: str = "", extra_colour: str = GRID_COLOUR) -> str:
    """Return the names beside their colours, and optionally an extra entry, shown as a line of its own colour."""
    keys = [f'<span><i style="background:{colour(at)}"></i>{escape(name)}</span>' for at, name in enumerate(names)]
    if extra:
        keys.append(f'<span><i style="background:{extra_colour};height:2px"></i>{escape(extra)}</span>')
    return f'<div class="legend">{"".join(keys)}</div>'


def bars(
    groups: Sequence[str],
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    line: float = 1.0,
    marks: Sequence[float] = (),
    mark: str = "",
    most: float = math.inf,
) -> str:
    """Return bars with a dashed line at the baseline's value.

    Args:
        groups, names: Names of the groups, and of the series in each.
        values: ``values[g][n]``; NaN leaves a gap.
        line: The baseline's value.
        marks: One value per group, drawn across it; NaN for none.
        mark: What the marks are.
        most: Bars higher than this are cut off there and labelled with their value.
    """
    known = [value for row in (*values, marks) for value in row if value == value]
    high = max([line * 1.05, *(min(value, most) for value in known)])
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
            parts.append(_bar(x, max(thick - 1.5, 1), (min(shown, 0.0), max(shown, 0.0)), (low, top), index, what))
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
    y = height_of(line, low, top)
    parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="4 3"/>')
    return svg(parts) + legend(names, mark, INK)


def _bar(x: float, width: float, span: tuple[float, float], axis: tuple[float, float], index: int, what: str) -> str:
    bottom, y = (height_of(value, *axis) for value in span)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(bottom - y, 0.5):.1f}" '
        f'fill="{colour(index)}"><title>{escape(what)}</title></rect>'
    )


def ticks(low: float, top: float) -> list[float]:
    """Return round values between two, four to ten of them."""
    rough = (top - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.75)
    return [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(top / step + 1e-9) + 1)]


def frame(low: float, top: float) -> str:
    """Return lines and labels at round values of the vertical axis."""
    parts: list[str] = []
    for value in ticks(low, top):
        y = height_of(value, low, top)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        parts.append(text(LEFT - 6, y + 4, f"{round(value, 9):g}", "end"))
    return "".join(parts)


def height_of(value: float, low: float, top: float) -> float:
    return TOP + (1 - (value - low) / (top - low)) * (HEIGHT - TOP - BOTTOM)


def text(x: float, y: float, words: str, anchor: str, size: int = 11, fill: str = INK, turned: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {turned}'
    return f'<text {place} font-size="{size}" fill="{fill}">{escape(words)}</text>'


def svg(parts: Sequence[str], height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
