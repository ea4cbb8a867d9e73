"""Draw deploy/pictures/comparison.svg, the bar chart of README.md, from the results in benchmarks/results.

    make benchmarks

Colors follow the reader's light or dark theme.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
RATE = 29
"""Requests per second of the latency panel."""
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

    @property
    def ratio(self) -> str:
        return f"{self.ours / self.peer:.2f}x"


class Panel(NamedTuple):
    """Measurements under one title. With `shared_scale`, all bars have the same scale."""

    title: str
    better: str
    rows: tuple[Row, ...]
    shared_scale: bool = False


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    return loaded


def panels() -> tuple[Panel, ...]:
    """Read the figures. Raises `ValueError` or `KeyError` if the results have another form."""
    offline, online = result("vllm-offline"), result("vllm-online")
    bf16, fp8, start = offline["rows"]
    if offline["columns"][1:3] != ["vLLM 0.26.0, total tokens/s", "weft, total tokens/s"]:
        raise ValueError("vllm-offline.json has other columns")
    mean_ttft, mean_tpot = online["columns"].index("TTFT mean, ms"), online["columns"].index("TPOT mean, ms")
    at = next(i for i, row in enumerate(online["rows"]) if row[0] == RATE)
    peer, ours = online["rows"][at], online["rows"][at + 1]
    peer_start, our_start = (float(cell.removesuffix(" s")) for cell in start[1:3])
    return (
        Panel(
            "Throughput",
            "higher is better",
            (Row("bf16", bf16[1], bf16[2], "tokens/s"), Row("FP8 weights and KV", fp8[1], fp8[2], "tokens/s")),
            shared_scale=True,
        ),
        Panel(
            f"Latency at {RATE} req/s",
            "lower is better",
            (
                Row("mean time per output token", peer[mean_tpot], ours[mean_tpot], "ms"),
                Row("mean time to first token", peer[mean_ttft], ours[mean_ttft], "ms"),
            ),
        ),
        Panel(
            "Start-up, cold caches",
            "lower is better",
            (Row("process start to first answer", peer_start, our_start, "s"),),
        ),
    )


def bar(x: int, y: int, value: float, largest: float, row: Row, kind: str) -> str:
    """Draw a bar and its value to the right of it."""
    width = round((PANEL - 100) * value / largest)
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{BAR}" rx="2"/>'
        f'<text class="quiet" x="{x + width + 6}" y="{y + 13}">{value:,g} {row.unit}</text>'
    )


def drawn(number: int, panel: Panel) -> list[str]:
    """Draw one panel."""
    x = GAP + number * (PANEL + GAP)
    lines = [
        f'<text class="title" x="{x}" y="{TOP - 10}">{escape(panel.title)}</text>',
        f'<text class="quiet" x="{x + PANEL - 10}" y="{TOP - 10}" text-anchor="end">{panel.better}</text>',
    ]
    shared = max(max(row.peer, row.ours) for row in panel.rows)
    for i, row in enumerate(panel.rows):
        y = TOP + i * ROW
        largest = shared if panel.shared_scale else max(row.peer, row.ours)
        lines += [
            f'<text x="{x}" y="{y + 12}">{escape(row.label)} <tspan class="factor">{row.ratio}</tspan></text>',
            bar(x, y + 18, row.peer, largest, row, "peer"),
            bar(x, y + 18 + BAR + 2, row.ours, largest, row, "ours"),
        ]
    return lines


def chart() -> str:
    """Return the picture as SVG text."""
    drawings = panels()
    about = result("vllm-offline")
    peer = f"vLLM {about['versions']['vllm']}"
    caption = f"Llama-3-8B shape, {about['hardware']}, {about['date']}, weft {about['commit']}. Ratios are weft / vLLM."
    width = GAP + len(drawings) * (PANEL + GAP)
    height = TOP + 2 * ROW + 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    title = f"<title>{peer} and weft: throughput, latency and start-up</title>"
    legend = (
        f'<rect class="peer" x="{GAP}" y="12" width="12" height="12" rx="2"/><text x="{GAP + 18}" y="23">{peer}</text>'
        f'<rect class="ours" x="{GAP + 118}" y="12" width="12" height="12" rx="2"/>'
        f'<text x="{GAP + 136}" y="23">weft</text>'
    )
    body = [line for i, panel in enumerate(drawings) for line in drawn(i, panel)]
    foot = f'<text class="quiet" x="{GAP}" y="{height - 12}">{escape(caption)}</text>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", legend, *body, foot, "</svg>"]) + "\n"


if __name__ == "__main__":
    (ROOT / "deploy/pictures/comparison.svg").write_text(chart(), encoding="utf-8")
