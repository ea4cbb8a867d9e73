"""Heat maps and charts of points as SVG text. Colors follow the reader's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

CELL, ROW, LEFT, TOP = 62, 30, 190, 64
"""Pixels: width and height of a cell, width of the row labels, height of the title and column labels."""
WIDTH, HEIGHT, MARGIN = 620, 300, 56
"""Pixels: the plot of a chart, and the space to its left and below it."""
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's colors, distinguishable with color blindness."""
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 14px; }
  .quiet { fill: #59636e; } .cell { fill: #1f2328; }
  .line { stroke: #59636e; fill: none; } .grid { stroke: #d1d9e0; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .quiet { fill: #9198a1; } .cell { fill: #1f2328; }
    .line { stroke: #9198a1; } .grid { stroke: #3d444d; }
  }
"""


class Series(NamedTuple):
    """Points of one color."""

    name: str
    points: Sequence[tuple[float, float]]


class Axis(NamedTuple):
    """One axis: its label, its range and the positions of its ticks."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Position of a value, from 0 to 1."""
        change: Callable[[float], float] = math.log if self.logarithmic else float
        return (change(value) - change(self.low)) / (change(self.high) - change(self.low))


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(words)}</text>'


def svg(width: int, height: int, title: str, lines: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    name = f"<title>{escape(title)}</title>"
    return "\n".join([head, name, f"<style>{STYLE}</style>", text(10, 20, title, "title"), *lines, "</svg>"]) + "\n"


def heat_map(
    title: str, source: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]],
    above: tuple[int, int, int],
) -> str:  # fmt: skip
    """Draw ratios: yellow below 1, `above` (red, green, blue) above 1, white at 1. NaN is an empty cell."""
    lines = [
        text(LEFT + (i + 0.5) * CELL, TOP - 8, name, "quiet", "middle") for i, name in enumerate(columns)
    ]  # fmt: skip
    for j, (name, line) in enumerate(zip(rows, values, strict=True)):
        y = TOP + j * ROW
        lines.append(text(LEFT - 8, y + 19, name, anchor="end"))
        for i, value in enumerate(line):
            x = LEFT + i * CELL
            if value == value:
                box = f'x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" rx="2"'
                lines.append(f'<rect {box} fill="{_shade(value, above)}"/>')
                lines.append(text(x + CELL / 2 - 1, y + 19, f"{value:.2f}", "cell", "middle"))
    height = TOP + len(rows) * ROW + 28
    lines.append(text(10, height - 8, source, "quiet"))
    return svg(LEFT + len(columns) * CELL + 10, height, title, lines)


def _shade(ratio: float, above: tuple[int, int, int]) -> str:
    """Blend white with a color, the further from 1 the more; full at a factor of 8."""
    strength = min(1.0, abs(math.log(max(ratio, 1e-9), 8)))
    full = above if ratio > 1 else (247, 200, 70)
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in full)


def chart(
    title: str, source: str, x: Axis, y: Axis, series: Sequence[Series],
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]] = (),
) -> str:  # fmt: skip
    """Draw points by color, and named lines through given points."""
    bottom, right = TOP + HEIGHT, MARGIN + WIDTH

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return MARGIN + x.share(point[0]) * WIDTH, bottom - y.share(point[1]) * HEIGHT

    drawn = [text(MARGIN, TOP - 10, y.label, "quiet"), text(right, bottom + 34, x.label, "quiet", "end")]
    for tick in x.ticks:
        left = at((tick, y.low))[0]
        drawn.append(f'<path class="grid" d="M{left:.1f} {TOP}V{bottom}"/>')
        drawn.append(text(left, bottom + 16, f"{tick:g}", "quiet", "middle"))
    for tick in y.ticks:
        height = at((x.low, tick))[1]
        drawn.append(f'<path class="grid" d="M{MARGIN} {height:.1f}H{right}"/>')
        drawn.append(text(MARGIN - 6, height + 4, f"{tick:g}", "quiet", "end"))
    for name, points in lines:
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in map(at, points))
        drawn.append(f'<path class="line" d="M{path}"/>')
        end = at(points[-1])
        drawn.append(text(end[0] - 4, end[1] - 5, name, "quiet", "end"))
    for i, (name, points) in enumerate(series):
        color = COLORS[i % len(COLORS)]
        drawn += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{color}"/>' for a, b in map(at, points)]
        legend = right + 18, TOP + 18 * i
        drawn.append(f'<circle cx="{legend[0]}" cy="{legend[1]}" r="4" fill="{color}"/>')
        drawn.append(text(legend[0] + 9, legend[1] + 4, name))
    drawn.append(text(10, bottom + 56, source, "quiet"))
    return svg(right + 180, bottom + 66, title, drawn)
