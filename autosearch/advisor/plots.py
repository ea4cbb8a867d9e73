"""Plots of an advice."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from weft.autosearch.advisor.advice import Advice

BLUE, RED, GREEN, GREY, PURPLE = "#0072b2", "#d55e00", "#009e73", "#888888", "#cc79a7"


def figure(advice: Advice) -> Figure:
    """Plot throughput and latency with their limits, efficiency, memory, and energy or idle time."""
    out = Figure(figsize=(11, 7.2), layout=ConstrainedLayoutEngine(h_pad=0.12, hspace=0.06))
    axes = out.subplots(2, 2).flatten().tolist()
    _tradeoff(axes[0], advice)
    _efficiency(axes[1], advice)
    _memory(axes[2], advice)
    _energy(axes[3], advice)
    for axis in axes[:4]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#dddddd", linewidth=0.5)
        axis.set_axisbelow(True)
    return out


def _mark(axis: Any, advice: Advice) -> None:
    if (best := advice.solution.best) is not None:
        axis.axvline(best.point.batch, color=GREEN, linewidth=1.2, label=f"advised: {best.point.bound}")
    axis.axvline(advice.solution.knee.point.batch, color=GREY, linewidth=0.8, linestyle=":", label="knee")


def _tradeoff(axis: Any, advice: Advice) -> None:
    verdicts = advice.solution.verdicts
    batch = [v.point.batch for v in verdicts]
    axis.plot(batch, [v.throughput for v in verdicts], "o-", color=BLUE, label="throughput")
    axis.set(xlabel="requests that ran", ylabel="tokens/s", title="Throughput and time between tokens", ylim=(0, None))
    _mark(axis, advice)
    other = axis.twinx()
    shown = [o for o in advice.objectives if o.measure == "itl"]
    statistic = shown[0].statistic if shown else 99.0
    name = "mean" if statistic is None else f"p{statistic:g}"
    values = [1e3 * v.point.itl.at(statistic) for v in verdicts]
    other.plot(batch, values, "s--", color=RED, markersize=4, label=f"itl {name}")
    for o in shown:
        other.axhline(1e3 * o.limit, color=RED, linewidth=1, linestyle=":", label=str(o))
    other.set(ylabel="ms", ylim=(0, None))
    lines = [*axis.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    axis.legend(handles=lines, frameon=False, fontsize=8, loc="center right")


def _efficiency(axis: Any, advice: Advice) -> None:
    verdicts = advice.solution.verdicts
    axis.plot([v.point.batch for v in verdicts], [v.efficiency for v in verdicts], "o-", color=BLUE)
    axis.axhline(advice.epsilon, color=RED, linestyle=":", linewidth=1, label=f"epsilon {advice.epsilon:g}")
    _mark(axis, advice)
    axis.set(xlabel="requests that ran", title="Efficiency: T(B) / (B T(1))", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)


def _memory(axis: Any, advice: Advice) -> None:
    m, best, replicas = advice.curve.machine, advice.solution.best, advice.replicas
    pages = best.point.kv_pages if best is not None else 0
    freed = replicas.freed if replicas is not None else (m.pages - pages) * m.page_bytes
    used = m.pages * m.page_bytes - freed
    left = 0.0
    bars = (("weights", m.weights), ("buffers", m.working), ("KV in use", used), ("KV freed", freed))
    for (name, size), color in zip(bars, (BLUE, GREY, RED, GREEN), strict=True):
        axis.barh(["memory"], [size / 2**30], left=[left], color=color, label=f"{name}: {size / 2**30:.2f} GiB")
        left += size / 2**30
    axis.set(xlabel="GiB", title="Memory of one engine at the advised limit", ylim=(-0.8, 1.4))
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")


def _energy(axis: Any, advice: Advice) -> None:
    """Plot energy, or idle time if energy is unavailable."""
    points, unit, title = [v.point for v in advice.solution.verdicts], "joules", "Energy per output token"
    values = [p.joules_per_token for p in points]
    if all(value is None for value in values):
        unit, title = "%", "Idle time of the device (energy is unavailable)"
        values = [100 * p.idle_share for p in points]
    shown = [(p.batch, value) for p, value in zip(points, values, strict=True) if value is not None]
    axis.plot(*zip(*shown, strict=True), "o-", color=PURPLE)
    _mark(axis, advice)
    axis.set(xlabel="requests that ran", ylabel=unit, title=title, ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)


def png(drawn: Figure) -> bytes:
    out = io.BytesIO()
    drawn.savefig(out, format="png", dpi=130)
    return out.getvalue()


def svg(drawn: Figure, name: str) -> str:
    """Return an SVG element to embed in a page, without prolog and fixed size."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{name}"', text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
