"""Small SVG plots as text: lines over time and bars of a histogram. No dependency, no state.

Axes carry units, and every series its name. Colours differ in lightness too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 44
STYLE = "text{font:11px system-ui,sans-serif}.axis{stroke:#333}.grid{stroke:#e3e5e8}"
COLOURS = ("#1f5fa8", "#d1662b", "#2f8f5b", "#7a4fa3", "#8a8a8a")


@dataclass(frozen=True, kw_only=True)
class Line:
    name: str
    values: Sequence[float]


def round_values(low: float, high: float, at_most: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten in [low, high], `at_most` of them.

    Empty when `high` is not above `low`.
    """
    if high <= low:
        return []
    power = math.floor(math.log10((high - low) / at_most))
    for exponent in (power, power + 1):
        for factor in (1, 2, 5):
            step = factor * 10.0**exponent
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            if last - first < at_most:
                # Rounded, because 3 * 0.1 is not 0.3.
                return [round(n * step, max(0, -exponent)) for n in range(first, last + 1)]
    raise AssertionError("some multiple of ten is always coarse enough")


def axis_ticks(highest: float) -> list[float]:
    """Return four to six round values from 0 to at least `highest`, for the ticks of an axis."""
    if highest <= 0:
        return [0.0, 1.0]
    ticks = round_values(0.0, highest, 6)
    step = ticks[1]
    while ticks[-1] < highest * 0.999:
        ticks.append(round(ticks[-1] + step, 12))
    return ticks


def lines_plot(xs: Sequence[float], lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Return an SVG of some series over the same x."""
    if not xs:
        return "<p>Too short a run for this plot.</p>"
    highest = max((value for line in lines for value in line.values), default=0.0)
    ticks = axis_ticks(highest)
    top = ticks[-1]
    parts = [_frame(x_label, y_label)]
    parts += _y_ticks(ticks)
    parts += _x_ticks(xs[0], xs[-1])
    span = (xs[-1] - xs[0]) or 1.0
    for number, line in enumerate(lines):
        points = " ".join(
            f"{_x((x - xs[0]) / span):.1f},{_y(value / top):.1f}"
            for x, value in zip(xs, line.values, strict=True)
        )
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6">'
            f"<title>{html.escape(line.name)}</title></polyline>"
        )
    return _svg(parts) + _legend([line.name for line in lines])


def points_plot(
    groups: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str
) -> str:
    """Return an SVG of points in named groups; the points of a group are joined in order of x."""
    points = [point for group in groups.values() for point in group]
    if not points:
        return "<p>Nothing to show.</p>"
    x_ticks, y_ticks = (axis_ticks(max(point[axis] for point in points)) for axis in (0, 1))
    parts = [_frame(x_label, y_label), *_y_ticks(y_ticks), *_x_ticks(0.0, x_ticks[-1])]
    for number, (name, group) in enumerate(groups.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(_x(x / x_ticks[-1]), _y(y / y_ticks[-1])) for x, y in sorted(group)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}"/>')
        for (x, y), (right, up) in zip(places, sorted(group), strict=True):
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
                f"<title>{html.escape(name)}: {right:g}, {up:g}</title></circle>"
            )
    return _svg(parts) + _legend(list(groups))


def histogram_plot(
    edges: Sequence[float], counts: Sequence[int], x_label: str, marks: Sequence[tuple[str, float]]
) -> str:
    """Return an SVG of a histogram over a logarithmic axis; `marks` are lines at values of x."""
    total = sum(counts)
    if not total:
        return "<p>Nothing to show.</p>"
    shares = [100 * count / total for count in counts]
    used = [number for number, count in enumerate(counts) if count]
    first, last = max(0, used[0] - 1), min(len(counts), used[-1] + 2)
    low, high = math.log(edges[first]), math.log(edges[last])
    ticks = axis_ticks(max(shares))
    top = ticks[-1]
    parts = [_frame(x_label, "% of all"), *_y_ticks(ticks)]
    for number in range(first, last):
        left = _x((math.log(edges[number]) - low) / (high - low))
        right = _x((math.log(edges[number + 1]) - low) / (high - low))
        y = _y(shares[number] / top)
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(right - left - 0.6, 0.6):.1f}" '
            f'height="{_y(0) - y:.1f}" fill="{COLOURS[0]}"><title>{edges[number]:g} to '
            f"{edges[number + 1]:g}: {shares[number]:.2f} %</title></rect>"
        )
    for power in range(
        math.floor(math.log10(edges[first])), math.ceil(math.log10(edges[last])) + 1
    ):
        for step in (1, 2, 5):
            value = step * 10.0**power
            if edges[first] <= value <= edges[last]:
                parts.append(_x_tick((math.log(value) - low) / (high - low), f"{value:g}"))
    for name, value in marks:
        if edges[first] < value < edges[last]:
            x = _x((math.log(value) - low) / (high - low))
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{_y(0):.1f}" '
                f'stroke="{COLOURS[1]}" stroke-dasharray="4 3"/>'
                f'<text x="{x + 4:.1f}" y="{TOP + 10}" class="mark">'
                f"{html.escape(name)}</text>"
            )
    return _svg(parts)


def picture(plot: str, names: Sequence[str], *, x: int, y: int) -> str:
    """Return a plot as a file of its own, with the names of its series from (x, y) down."""
    drawn, end, _ = plot.partition("</svg>")
    listed = "".join(
        f'<text x="{x}" y="{y + 16 * n}" style="fill:{COLOURS[n]}">{html.escape(name)}</text>'
        for n, name in enumerate(names)
    )
    opened, _, rest = drawn.partition(">")
    opened = opened.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"')
    ground = f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    return f"{opened}>{ground}{rest}{listed}{end}\n"


def _svg(parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">' + "".join(parts) + "</svg>"


def _frame(x_label: str, y_label: str) -> str:
    return (
        f'<line x1="{LEFT}" y1="{_y(0)}" x2="{WIDTH - RIGHT}" y2="{_y(0)}" class="axis"/>'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{html.escape(x_label)}</text>"
        f'<text transform="translate(12 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y_label)}</text>"
    )


def _y_ticks(ticks: Sequence[float]) -> list[str]:
    parts = []
    for value in ticks:
        y = _y(value / ticks[-1])
        parts.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    return parts


def _x_ticks(first: float, last: float) -> list[str]:
    span = (last - first) or 1.0
    return [_x_tick((at - first) / span, f"{at:g}") for at in round_values(first, last, 7)]


def _x_tick(share: float, text: str) -> str:
    return f'<text x="{_x(share):.1f}" y="{_y(0) + 16:.1f}" text-anchor="middle">{text}</text>'


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{html.escape(name)}</span>'
        for n, name in enumerate(names)
    )
    return f'<p class="legend">{items}</p>'


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
