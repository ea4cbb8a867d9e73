"""Figures 2-4 and 8-11 of "Mind the Memory Gap", drawn from curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from weft.autosearch.advisor.curve import Curve
from weft.autosearch.advisor.plots import BLUE, GREEN, GREY, PURPLE, RED
from weft.tools.papers.paper_table import EPSILON, best

COLOURS = (BLUE, RED, GREEN, PURPLE, "#e69f00", "#56b4e9", "#000000")


def _panels(number: int) -> tuple[Figure, list[Any]]:
    out = Figure(figsize=(5.2 * number, 3.8), layout=ConstrainedLayoutEngine(h_pad=0.12))
    axes = out.subplots(1, number, squeeze=False).flatten().tolist()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#dddddd", linewidth=0.5)
        axis.set_axisbelow(True)
    return out, axes


def figures(found: Sequence[Curve], activity: Sequence[dict[str, Any]] = ()) -> dict[str, Figure]:
    """Figures by name. Those of the memory's activity are included if it was measured. activity: for Figure 9."""
    out = {
        "figure_2": figure_2(found), "figure_3": figure_3(found), "figure_4": figure_4(found[min(1, len(found) - 1)]),
        "figure_10": figure_10(found[0]), "figure_11": figure_11(found),
    }  # fmt: skip
    if any(p.dram_share is not None for curve in found for p in curve.points):
        out["figure_8"] = figure_8(found)
    if activity:
        out["figure_9"] = figure_9(activity)
    return out


def figure_2(found: Sequence[Curve]) -> Figure:
    """Throughput and time between tokens over the batch that ran."""
    out, axes = _panels(2)
    for colour, curve in zip(COLOURS, found, strict=False):
        points = curve.by_batch()
        batch = [p.batch for p in points]
        axes[0].plot(batch, [curve.throughput(p) for p in points], "o-", color=colour, label=curve.model, markersize=3)
        axes[1].plot(batch, [1e3 * p.itl.at(None) for p in points], "o-", color=colour, label=curve.model, markersize=3)
    axes[0].set(xlabel="requests that ran", ylabel="tokens/s, in and out", title="Throughput", ylim=(0, None))
    axes[1].set(xlabel="requests that ran", ylabel="ms, mean", title="Inter-token latency", ylim=(0, None))
    axes[0].legend(frameon=False, fontsize=8)
    return out


def figure_3(found: Sequence[Curve]) -> Figure:
    """Throughput over the largest number of KV pages in use."""
    out, (axis,) = _panels(1)
    for colour, curve in zip(COLOURS, found, strict=False):
        points = curve.by_batch()
        used = [100 * p.kv_pages / max(1, curve.machine.pages) for p in points]
        axis.plot(used, [curve.throughput(p) for p in points], "o-", color=colour, label=curve.model, markersize=3)
    axis.set(xlabel="KV pages held at most, %", ylabel="tokens/s, in and out", title="Throughput and KV use")
    axis.legend(frameon=False, fontsize=8)
    return out


def figure_4(curve: Curve) -> Figure:
    """Time of a request, prompt and output separately, and the slowdown against batch 1."""
    out, (axis,) = _panels(1)
    points = curve.by_batch()
    whole = [curve.output * p.itl.at(None) for p in points]
    prefill = [t * p.prefill_share for t, p in zip(whole, points, strict=True)]
    decode = [t - f for t, f in zip(whole, prefill, strict=True)]
    at = range(len(points))
    axis.bar(at, decode, color=BLUE, label="decode")
    axis.bar(at, prefill, bottom=decode, color=RED, label="prefill")
    axis.set_xticks(list(at), [f"{p.batch:.0f}" for p in points], fontsize=7)
    axis.set(xlabel="requests that ran", ylabel="seconds of a request", title=f"{curve.model}: time of a request")
    other = axis.twinx()
    other.plot(at, [t / whole[0] for t in whole], "s--", color=GREY, markersize=3)
    other.set(ylabel="times that of batch 1", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return out


def figure_8(found: Sequence[Curve]) -> Figure:
    """How busy the memory is at batch 1 and at the highest throughput, which the paper shows as stalls."""
    out, (axis,) = _panels(1)
    for i, curve in enumerate(found):
        points = curve.by_batch()
        most = max(points, key=curve.throughput)
        for offset, point, colour in ((-0.2, points[0], GREY), (0.2, most, BLUE)):
            axis.bar(i + offset, 100 * (point.dram_share or 0.0), 0.38, color=colour)
            axis.plot(i + offset, 100 * (point.warps_share or 0.0), "k_", markersize=14)
    axis.set_xticks(range(len(found)), [curve.model for curve in found])
    axis.set(ylabel="%", title="DRAM bandwidth (bars) and warps in flight (lines): batch 1, MAX")
    return out


def figure_9(activity: Sequence[dict[str, Any]]) -> Figure:
    """One model at one slot limit with longer prompts or outputs: memory bandwidth, else time per token."""
    out, (axis,) = _panels(1)
    shown = all(a["dram"] is not None for a in activity)
    short = min(a["prompt"] for a in activity)
    for colour, longer, other in ((BLUE, "prompt", "output"), (RED, "output", "prompt")):
        line = sorted((a for a in activity if a[other] == short), key=lambda a: a[longer])
        values = [100 * a["dram"] if shown else a["itl_ms"] for a in line]
        axis.plot([a[longer] for a in line], values, "o-", color=colour, label=f"{longer} tokens")
    label = "DRAM bandwidth, %" if shown else "inter-token latency, ms (activity is not shown here)"
    axis.set(xlabel="tokens", ylabel=label, title="Longer prompts, longer outputs", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return out


def figure_10(curve: Curve) -> Figure:
    """Throughput over latency; throughput relative to B requests that are each as fast as a single one."""
    out, axes = _panels(2)
    points = curve.by_batch()
    one = curve.throughput(points[0]) / points[0].batch
    axes[0].plot([1e3 * p.itl.at(None) for p in points], [curve.throughput(p) for p in points], "o-", color=BLUE)
    axes[1].plot([p.batch for p in points], [curve.throughput(p) / (p.batch * one) for p in points], "o-", color=BLUE)
    axes[1].axhline(EPSILON, color=RED, linestyle=":", label=f"epsilon {EPSILON:g}")
    if (solution := best(curve)) is not None and solution.best is not None:
        chosen = solution.best
        axes[0].plot(1e3 * chosen.point.itl.at(None), chosen.throughput, "*", color=GREEN, markersize=14, label="B_opt")
        axes[1].plot(chosen.point.batch, chosen.efficiency, "*", color=GREEN, markersize=14, label="B_opt")
    axes[0].set(xlabel="inter-token latency, ms", ylabel="tokens/s", title=f"{curve.model}, strict objective")
    axes[1].set(xlabel="requests that ran", title="T(B) / (B T(1))", ylim=(0, None))
    for axis in axes:
        if axis.get_legend_handles_labels()[0]:  # no point is labeled if no slot limit meets the objective
            axis.legend(frameon=False, fontsize=8)
    return out


def figure_11(found: Sequence[Curve]) -> Figure:
    """Memory by use at B_opt under the strict objective."""
    out, (axis,) = _panels(1)
    for i, curve in enumerate(found):
        m, solution = curve.machine, best(curve)
        pages = m.pages if solution is None or solution.best is None else solution.best.point.kv_pages
        parts = (
            (m.weights, BLUE, "weights"), (m.working, GREY, "other"), (pages * m.page_bytes, RED, "KV used"),
            ((m.pages - pages) * m.page_bytes, GREEN, "KV empty"),
        )  # fmt: skip
        left = 0.0
        for size, colour, name in parts:
            axis.bar(i, size / 2**30, bottom=left, color=colour, label=name if not i else None)
            left += size / 2**30
    axis.set_xticks(range(len(found)), [curve.model for curve in found])
    axis.set(ylabel="GiB", title="Memory at B_opt, strict objective")
    axis.legend(frameon=False, fontsize=8)
    return out
