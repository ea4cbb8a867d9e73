"""Draw deploy/pictures/comparison.svg, the bar chart of README.md: weft compared with vLLM on one H200.

    python tools/pictures/comparison.py deploy/pictures/comparison.svg

Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PEER, OURS = "vLLM 0.26.0", "weft"
CAPTION = "Llama-3-8B shape, one NVIDIA H200, 2026-11-27, torch 2.11.0; weft 08ae0d6"
PANEL, GAP, BAR, ROW, TOP = 280, 24, 18, 66, 62
"""Pixels: width of a panel, space between panels, height of a bar, height of a row, top of the first row."""
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 14px; }
  .quiet { fill: #59636e; font-size: 12px; }
  .peer { fill: #9aa4af; } .ours { fill: #0969da; } .factor { font-weight: 600; fill: #0969da; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .quiet { fill: #9198a1; }
    .peer { fill: #6e7681; } .ours { fill: #4493f8; } .factor { fill: #4493f8; }
  }
"""


class Row(NamedTuple):
    """One measurement of both servers."""

    label: str
    peer: float
    ours: float
    unit: str
    factor: str


PANELS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "Throughput",
        (
            Row("bf16", 24_375, 29_440, "tokens/s", "1.21x"),
            Row("FP8 weights and KV", 36_406, 44_254, "tokens/s", "1.22x"),
        ),
    ),
    (
        "Latency at 29 req/s",
        (
            Row("mean time per output token", 8.1, 7.1, "ms", "-12 %"),
            Row("mean time to first token", 43, 24, "ms", "-44 %"),
        ),
    ),
    (
        "Start-up, cold caches",
        (Row("process start to first answer", 108, 26, "s", "4.2x"),),
    ),
)


def bar(x: int, y: int, value: float, largest: float, row: Row, kind: str) -> str:
    """A bar and its value to the right of it."""
    width = round((PANEL - 100) * value / largest)
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{BAR}" rx="2"/>'
        f'<text class="quiet" x="{x + width + 6}" y="{y + 13}">{value:,g} {row.unit}</text>'
    )


def panel(number: int, title: str, rows: tuple[Row, ...]) -> list[str]:
    """The lines of one panel. Throughput rows share a scale; every other row has its own."""
    x = GAP + number * (PANEL + GAP)
    same_unit = rows[0].unit == "tokens/s"
    better = "higher is better" if same_unit else "lower is better"
    lines = [
        f'<text class="title" x="{x}" y="{TOP - 10}">{escape(title)}</text>',
        f'<text class="quiet" x="{x + PANEL - 10}" y="{TOP - 10}" text-anchor="end">{better}</text>',
    ]
    shared = max(max(row.peer, row.ours) for row in rows)
    for i, row in enumerate(rows):
        y = TOP + i * ROW
        largest = shared if same_unit else max(row.peer, row.ours)
        lines += [
            f'<text x="{x}" y="{y + 12}">{escape(row.label)} <tspan class="factor">{escape(row.factor)}</tspan></text>',
            bar(x, y + 18, row.peer, largest, row, "peer"),
            bar(x, y + 18 + BAR + 2, row.ours, largest, row, "ours"),
        ]
    return lines


def chart() -> str:
    """The whole picture as SVG text."""
    width = GAP + len(PANELS) * (PANEL + GAP)
    height = TOP + 2 * ROW + 34
    parts = [line for i, (title, rows) in enumerate(PANELS) for line in panel(i, title, rows)]
    legend = (
        f'<rect class="peer" x="{GAP}" y="12" width="12" height="12" rx="2"/><text x="{GAP + 18}" y="23">{PEER}</text>'
        f'<rect class="ours" x="{GAP + 118}" y="12" width="12" height="12" rx="2"/>'
        f'<text x="{GAP + 136}" y="23">{OURS}</text>'
    )
    caption = f'<text class="quiet" x="{GAP}" y="{height - 12}">{escape(CAPTION)}</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    title = f"<title>{PEER} and {OURS}: throughput, latency and start-up</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", legend, *parts, caption, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(chart(), encoding="utf-8")
