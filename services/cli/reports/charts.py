"""The look of report pages, one HTML file each, and charts as inline SVG: grouped bars, and what others are made of."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 56, 14, 40
COLOURS = ("#4c78a8", "#54a24b")
INK, FAINT = "#333", "#ddd"


def legend(names: Sequence[str]) -> str:
    """Return the names beside their colours."""
    keys = zip(names, COLOURS, strict=False)
    shown = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in keys)
    return f'<div class="legend">{shown}</div>'


def bars(groups: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """Return bars over a dashed line at zero.

    Args:
        groups, names: Names of the groups, and of the series in each.
        values: ``values[g][n]``; NaN leaves a gap.
    """
    known = [value for row in values for value in row if value == value]
    top, low = max([0.0, *known]) * 1.08, min([0.0, *known]) * 1.1
    top = top if top > low else 1.0
    parts = [frame(low, top)]
    slot = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    thick = slot * 0.84 / max(len(names), 1)
    for at, group in enumerate(groups):
        begin = LEFT + at * slot + slot * 0.08
        for index, value in enumerate(values[at]):
            if value == value:
                x, span = begin + index * thick, (min(value, 0.0), max(value, 0.0))
                what = f"{names[index]}, {group}: {value:.3f}"
                parts.append(bar(x, max(thick - 1.5, 1), span, (low, top), COLOURS[index], what))
                if thick > 24:
                    parts.append(text(x + thick / 2, height_of(span[1], low, top) - 3, f"{value:.2f}", "middle", 10))
        parts.append(text(LEFT + (at + 0.5) * slot, HEIGHT - BOTTOM + 18, group, "middle"))
    y = height_of(0.0, low, top)
    parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-dasharray="4 3"/>')
    return svg(parts) + legend(names)


def bar(x: float, width: float, span: tuple[float, float], axis: tuple[float, float], fill: str, what: str) -> str:
    bottom, y = (height_of(value, *axis) for value in span)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(bottom - y, 0.5):.1f}" '
        f'fill="{fill}"><title>{escape(what)}</title></rect>'
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
