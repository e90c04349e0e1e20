"""Charts as SVG: small panels side by side, without a library, so that the same run draws the same bytes."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Final

from aserve.cli.lab.findings import Panel

COLOURS: Final = {
    "plain": "#7a869a",
    "overlap": "#2f6fde",
    "eager": "#d9822b",
    "late": "#1f9d63",
    "study": "#c9ced8",
}
"""By the first word of a series' name, so that a policy looks the same in every chart."""

_OTHERS: Final = ("#2f6fde", "#d9822b", "#1f9d63", "#a45cc7", "#c0414f", "#7a869a", "#3aa6b9", "#8c6d31")
_WIDTH: Final = 330
_HEIGHT: Final = 232
_LEFT: Final = 52
_RIGHT: Final = 14
_TOP: Final = 36
_BOTTOM: Final = 44
_PANELS_A_ROW: Final = 3
_LEGEND: Final = 26
_LETTER: Final = 6.3  # of the small font, on average


def draw(panels: Sequence[Panel], title: str) -> str:
    """The panels in rows of three, below a title and one legend for all."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    colours = _colours(names)
    num_columns = min(_PANELS_A_ROW, len(panels))
    width = max(num_columns * _WIDTH, 2 * _WIDTH)
    legend = list(_legend(colours, width))
    top = 40 + _LEGEND * len({y for y, _ in legend})
    height = top + -(-len(panels) // num_columns) * _HEIGHT + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#20252e">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="14" y="25" font-size="15" font-weight="600">{escape(title)}</text>',
        *(text for _, text in legend),
    ]
    for index, panel in enumerate(panels):
        x, y = index % num_columns * _WIDTH, top + index // num_columns * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel, colours), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _colours(names: Sequence[str]) -> dict[str, str]:
    """One for each series; two of one policy differ in their shade."""
    others = iter(_OTHERS * (len(names) // len(_OTHERS) + 1))
    found: dict[str, str] = {}
    for name in names:
        colour = COLOURS.get(name.partition(",")[0].partition(" ")[0])
        found[name] = next(others) if colour is None else colour if colour not in found.values() else _lighter(colour)
    return found


def _lighter(colour: str) -> str:
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(channel + 255) // 2:02x}" for channel in channels)


def _legend(colours: dict[str, str], width: int) -> Iterator[tuple[int, str]]:
    x, y = 14.0, 48
    if len(colours) == 1:
        return
    for name, colour in colours.items():
        needed = 26 + len(name) * _LETTER
        if x + needed > width and x > 14:
            x, y = 14.0, y + _LEGEND
        yield (
            y,
            f'<rect x="{x:.0f}" y="{y - 9}" width="11" height="11" rx="2" fill="{colour}"/>'
            f'<text x="{x + 16:.0f}" y="{y}">{escape(name)}</text>',
        )
        x += needed


def _panel(panel: Panel, colours: dict[str, str]) -> Iterator[str]:
    values = [value for series in panel.series.values() for value in series if not math.isnan(value)]
    ticks = [panel.low + tick for tick in _ticks(max(values, default=1.0) - panel.low)]
    span = ticks[-1] - panel.low
    left, right, bottom, top = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM, _TOP

    def height_of(value: float) -> float:
        return bottom - (bottom - top) * (value - panel.low) / span

    yield f'<text x="{left - 38}" y="16" font-weight="600">{escape(panel.title)}</text>'
    yield f'<text x="{right}" y="16" text-anchor="end" fill="#667085">{escape(panel.unit)}</text>'
    for tick in ticks:
        y = height_of(tick)
        yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e8ec"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#667085">{_short(tick)}</text>'
    step = (right - left) / len(panel.x)
    for index, name in enumerate(panel.x):
        if name:
            x = left + step * (index + 0.5)
            yield f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle" fill="#667085">{escape(name)}</text>'
    if panel.x_title:
        yield (
            f'<text x="{(left + right) / 2}" y="{bottom + 31}" text-anchor="middle" fill="#667085">'
            f"{escape(panel.x_title)}</text>"
        )
    draw_series = _bars if panel.kind == "bars" else _lines
    for number, (name, series) in enumerate(panel.series.items()):
        points = [(left + step * index, height_of(v), v) for index, v in enumerate(series) if not math.isnan(v)]
        yield from draw_series(points, step, (number, len(panel.series)), bottom, colours[name])


def _bars(
    points: Sequence[tuple[float, float, float]], step: float, place: tuple[int, int], bottom: float, colour: str
) -> Iterator[str]:
    number, count = place
    width = min(38.0, step * 0.84 / count)
    for x, y, value in points:
        begin = x + step / 2 + (number - count / 2) * width
        yield (
            f'<rect x="{begin + 1:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{max(bottom - y, 0.6):.1f}" '
            f'rx="1.5" fill="{colour}"/>'
        )
        if width >= 17:
            middle = begin + width / 2
            yield f'<text x="{middle:.1f}" y="{y - 3:.1f}" text-anchor="middle" font-size="9">{_short(value)}</text>'


def _lines(
    points: Sequence[tuple[float, float, float]], step: float, place: tuple[int, int], bottom: float, colour: str
) -> Iterator[str]:
    for (x, y, _), (next_x, next_y, _) in pairwise(points):
        yield (
            f'<line x1="{x + step / 2:.1f}" y1="{y:.1f}" x2="{next_x + step / 2:.1f}" y2="{next_y:.1f}" '
            f'stroke="{colour}" stroke-width="2"/>'
        )
    for x, y, _ in points:
        yield f'<circle cx="{x + step / 2:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _ticks(largest: float) -> list[float]:
    """From 0 in steps of 1, 2 or 5 times a power of ten, four to six of them, to the largest value or above."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if largest / (factor * power) <= 5)
    return [step * index for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    if value >= 100:
        return f"{value:.0f}"
    if value >= 10:
        return f"{value:.1f}".rstrip("0").rstrip(".")
    return f"{value:.2f}".rstrip("0").rstrip(".")
