"""Draws the plots of the HTML report as SVG text."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from weft.loadgen.measures import TITLES, Measures
from weft.loadgen.run import Run
from weft.loadgen.slo import Objective, meets
from weft.loadgen.statistics import Values, percentile
from weft.loadgen.sweep import Sweep
from weft.loadgen.units import show_seconds

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colors, distinguishable with color blindness."""
_FAILED = "#d00000"
_MAX_POINTS = 1500
_SINCE = "seconds since the first arrival was due"
_RASTER = 3000  # Number of lines from which a plot is rasterized in its SVG.


def latency_against_rate(sweeps: Sequence[Sweep], objectives: Sequence[Objective]) -> str:
    """Plot one panel per objective: its value by rate, one line per server, the limit dashed, and the highest rate that
    met all objectives dotted."""
    figure, axes = svg_figure(len(objectives))
    for axis, objective in zip(axes, objectives, strict=True):
        for colour, sweep in zip(COLOURS, sweeps, strict=False):
            points = [
                (rate, verdict.value)
                for rate, run in sweep.by_rate
                for verdict in run.attainment.verdicts
                if verdict.objective == objective and np.isfinite(verdict.value)
            ]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=colour, label=sweep.name)
            if sweep.best is not None:
                axis.axvline(sweep.best, color=colour, linewidth=0.8, linestyle=":")
        axis.axhline(objective.limit, color=_FAILED, linestyle="--", linewidth=1, label="limit")
        axis.set(xlabel="offered requests per second", xscale="log", yscale="log")
        axis.set_title(textwrap.fill(objective.title(), 44))
        _logarithmic(axis.xaxis, lambda rate: f"{rate:g}")
        _logarithmic(axis.yaxis, show_seconds)
        axis.legend(frameon=False)
    return svg_text(figure, "Latency against offered rate")


def cdfs(runs: Sequence[Run]) -> str:
    """Plot one panel per measure: the share of requests (token gaps) by latency, one line per run, limits dashed."""
    figure, axes = svg_figure(len(TITLES))
    for axis, (measure, title) in zip(axes, TITLES.items(), strict=True):
        for colour, run in zip(COLOURS, runs, strict=False):
            values = np.sort(run.measures.values(measure))
            if len(values):
                kept = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
                shares, label = (kept + 1) / len(values), f"{run.name}, {run.load}"
                axis.step(values[kept], shares, where="post", color=colour, label=label)
        for objective in runs[0].options.objectives:
            if objective.measure == measure:
                axis.axvline(objective.limit, color=_FAILED, linestyle="--", linewidth=1)
        axis.set(ylabel="share at or below", title=title, ylim=(0, 1.02), xscale="log")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        _logarithmic(axis.xaxis, show_seconds)
    if axes[0].lines:
        axes[0].legend(frameon=False, fontsize=8)
    return svg_text(figure, "Distributions of the measures")


def over_time(run: Run) -> str:
    """Plot output tokens per second, running requests, and failures over the time of a run."""
    figure, axes = svg_figure(2)
    measures = run.everything
    edges = np.linspace(0, max(run.span, 1e-3), min(120, max(10, int(run.span))) + 1)
    width = edges[1] - edges[0]
    times = np.concatenate([np.asarray(record.times) for record in measures.records] or [np.empty(0)])
    # An event can carry several tokens; tokens per event are not recorded, so spread them evenly.
    events = np.array([len(record.times) for record in measures.records])
    tokens = np.repeat(measures.tokens / np.maximum(events, 1), events)
    axes[0].stairs(np.histogram(times, edges, weights=tokens)[0] / width, edges, fill=True, color=COLOURS[0], alpha=0.7)
    axes[0].set(xlabel=_SINCE, ylabel="output tokens per second", title="Throughput")
    started = measures.start[np.isfinite(measures.start)]
    ended = np.where(np.isfinite(measures.end), measures.end, measures.start)
    middle = (edges[1:] + edges[:-1]) / 2
    running = np.searchsorted(np.sort(started), middle) - np.searchsorted(np.sort(ended), middle)
    axes[1].plot(middle, running, color=COLOURS[2], label="running")
    failures = measures.due[~measures.ok]
    if len(failures):
        axes[1].plot(failures, np.zeros(len(failures)), "x", color=_FAILED, label="failed, by time due")
    axes[1].set(xlabel=_SINCE, ylabel="requests", title="Requests running", ylim=(0, None))
    axes[1].legend(frameon=False)
    return svg_text(figure, "Throughput and requests running over time")


def timeline(run: Run) -> str:
    """Plot one line per request by due time: waiting for the first token, then answering."""
    measures = run.everything
    n = len(measures.records)
    figure, axes = svg_figure(1, height=min(7.0, 2.2 + n / 60))
    rows, raster, width = np.arange(n), n > _RASTER, max(0.5, min(4, 200 / max(n, 1)))
    for start, end, colour, label in (
        (measures.start, measures.first, COLOURS[4], "waiting for first token"),
        (measures.first, measures.end, COLOURS[0], "answering"),
    ):
        segments = np.stack([np.stack([start, rows], 1), np.stack([end, rows], 1)], 1)[np.isfinite(measures.first)]
        lines = LineCollection(list(segments), colors=colour, linewidths=width, label=label, rasterized=raster)
        axes[0].add_collection(lines)
    failed = ~measures.ok
    if failed.any():
        axes[0].plot(measures.due[failed], rows[failed], "x", color=_FAILED, label="failed", rasterized=raster)
    axes[0].set(xlabel=_SINCE, ylabel="request", title="Requests", xlim=(0, max(run.span, 1e-3)), ylim=(max(n, 1), -1))
    axes[0].legend(loc="upper right")
    return svg_text(figure, "Timeline of requests")


def limits_heat_map(run: Run) -> str:
    """Plot the share of all requests that meet a pair of limits, on time to first token and per output token."""
    measures, objectives = run.measures, run.options.objectives
    limits, labels = [], []
    for name in ("ttft", "tpot"):
        given = {o.limit for o in objectives if o.measure == name}
        limits.append(_grid(measures, name, given))
        labels.append([show_seconds(limit) + "\n(objective)" * (limit in given) for limit in limits[-1]])
    first, per_token = measures.ttft, np.where(np.isnan(measures.tpot), 0.0, measures.tpot)
    met = [[measures.ok & (first <= a) & (per_token <= b) for a in limits[0]] for b in limits[1]]
    figure, axes = svg_figure(1, height=4.2)
    _heat(axes[0], np.mean(met, axis=2), *labels)
    axes[0].set(
        xlabel="limit on the time to first token",
        ylabel="limit on the time per output token",
        title="Share of all requests that meet both limits",
    )
    return svg_text(figure, "Share of requests that meet a pair of limits")


def rates_heat_map(sweep: Sweep) -> str:
    """Plot the share of all requests that met each objective's limit, by rate."""
    objectives = sweep.runs[0].options.objectives[::-1]  # the first one on top
    share = np.array([[meets(o, run.measures).mean() for _, run in sweep.by_rate] for o in objectives])
    figure, axes = svg_figure(1, height=1.6 + 0.5 * len(objectives))
    limits = [f"{TITLES[o.measure]}\nat most {show_seconds(o.limit)}" for o in objectives]
    _heat(axes[0], share, [f"{rate:.3g}" for rate, _ in sweep.by_rate], limits)
    axes[0].set(xlabel="offered requests per second", title=f"{sweep.name}: share of all requests within each limit")
    return svg_text(figure, "Share of requests within each limit, at each rate")


def _grid(measures: Measures, name: str, given: set[float]) -> Values:
    """Return the `given` limits, and limits that 10 %, 25 %, 50 % … of answered requests meet, rounded up to three
    digits."""
    values = measures.values(name)
    if not len(values):
        return np.array(sorted(given) or [1.0])
    limits = np.array([percentile(values, q) for q in (10, 25, 50, 75, 90, 95, 99, 100)])
    digits = 10.0 ** (np.floor(np.log10(np.maximum(limits, 1e-6))) - 2)
    return np.union1d(np.ceil(limits / digits) * digits, list(given))


def _heat(axis: Any, share: Values, columns: Sequence[str], rows: Sequence[str]) -> None:
    axis.grid(visible=False)
    axis.imshow(share, cmap="cividis", vmin=0, vmax=1, aspect="auto", origin="lower")
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    for (i, j), value in np.ndenumerate(share):
        axis.text(j, i, f"{value:.0%}", ha="center", va="center", fontsize=8, color="black" if value > 0.5 else "white")


def _logarithmic(axis: Any, show: Callable[[float], str]) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of every decade if they fit, otherwise at 1."""
    low, high = np.log10(axis.get_view_interval())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high - low < 2.5 else (1,), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_tick_params(labelsize=8)
    axis.set_major_formatter(FuncFormatter(lambda value, _: show(value)))


def svg_figure(panels: int, height: float = 3.4) -> tuple[Figure, list[Any]]:
    rows = -(-panels // 2)
    layout = ConstrainedLayoutEngine(h_pad=0.12, hspace=0.06)  # browsers' fonts are larger than the layout's
    figure = Figure(figsize=(10.5, height * rows), layout=layout)
    axes = figure.subplots(rows, min(panels, 2), squeeze=False).flatten().tolist()
    for axis in axes[panels:]:
        axis.remove()
    for axis in axes[:panels]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#dddddd", linewidth=0.5)
        axis.set_axisbelow(True)
    return figure, axes[:panels]


def svg_text(figure: Figure, name: str) -> str:
    """Return SVG to embed in a page: no prolog, no fixed size, and ids unique to the drawing."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    _, begin, text = out.getvalue().partition("<svg")
    text = begin + text
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{name}"', text, count=1)
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
