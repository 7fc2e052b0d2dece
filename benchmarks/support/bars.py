"""Groups of bars as SVG, and a page of them: what a benchmark shows beside its table.

No dependency; bars of ours are coloured, those compared with are grey.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from mooncake.sim.results.plots import COLOURS, axis_ticks

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 300, 52, 34, 40
GREYS = ("#b9bec5", "#90979f", "#6b727a")
STYLE = (
    "body{font:14px system-ui,sans-serif;max-width:900px;margin:2em auto}"
    "svg text{font:11px system-ui,sans-serif}pre{overflow-x:auto}"
    ".legend span{display:inline-block;margin-right:1.2em;white-space:nowrap}"
    ".legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}"
)


def bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float]], ours: str) -> str:
    """Return an SVG: `groups` is name of a group -> name of a bar -> value.

    Names that begin with one of the words in `ours` (split at spaces) are ours.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    colours = _colours(names, tuple(ours.split()))
    highest = max((value for group in groups.values() for value in group.values()), default=0.0)
    ticks = axis_ticks(highest)
    top = ticks[-1]
    room = (WIDTH - LEFT) / max(1, len(groups))
    width = 0.86 * room / max(1, len(names))
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{html.escape(title)}</text>']
    for tick in ticks:
        y = _y(tick / top)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e5e8"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for place, (group, values) in enumerate(groups.items()):
        left = LEFT + place * room
        middle = left + room / 2
        parts.append(
            f'<text x="{middle:.1f}" y="{HEIGHT - 18}" text-anchor="middle">'
            f"{html.escape(group)}</text>"
        )
        for number, name in enumerate(names):
            value = values.get(name)
            if value is None:
                continue
            x, y = left + 0.07 * room + number * width, _y(value / top)
            label = html.escape(f"{name}, {group}: {value:.3g} {unit}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(1.0, width - 1):.1f}" '
                f'height="{_y(0) - y:.1f}" fill="{colours[name]}"><title>{label}</title></rect>'
            )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">{html.escape(unit)}</text>')
    legend = "".join(
        f'<span><i style="background:{colours[name]}"></i>{html.escape(name)}</span>'
        for name in names
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">' + "".join(parts) + "</svg>"
    return f'{svg}<p class="legend">{legend}</p>'


def _colours(names: Sequence[str], ours: tuple[str, ...]) -> dict[str, str]:
    bright = [name for name in names if name.startswith(ours)]
    grey = [name for name in names if not name.startswith(ours)]
    return {
        **{name: COLOURS[number % len(COLOURS)] for number, name in enumerate(bright)},
        **{name: GREYS[number % len(GREYS)] for number, name in enumerate(grey)},
    }


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def write_page(path: Path, title: str, table: str, plots: Sequence[str]) -> None:
    """Write an HTML page of plots and the table they were drawn from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>{''.join(plots)}"
        f"<pre>{html.escape(table)}</pre></html>\n"
    )
