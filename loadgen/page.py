"""Renders the HTML report: one self-contained page that needs no knowledge of the formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import inf
from typing import Any

import numpy as np

from weft.loadgen import plots
from weft.loadgen.measures import FORMULAS, STALLS, TITLES
from weft.loadgen.run import Run
from weft.loadgen.slo import RULES
from weft.loadgen.sweep import Sweep
from weft.loadgen.terminal import verdict
from weft.loadgen.units import show_ratio, show_seconds

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 66rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #eee }
th:first-child, td:first-child { text-align: left }
th { vertical-align: bottom } td { white-space: nowrap } div.table { overflow-x: auto }
.good { color: #00695c; font-weight: 600 } .bad { color: #b00020; font-weight: 600 }
.note { background: #fff6df; border-left: 4px solid #e69f00; padding: .5rem 1rem; margin: .5rem 0 }
.lead { font-size: 1.15rem } svg { width: 100%; height: auto } dt { font-weight: 600 } code { font-size: .9em }
"""
_SERVERS = TITLES | {"queue": "Queue time", "prefill": "First schedule to first token"}
_MAX_DETAILED = 4  # Number of runs with separate plots.


def page(runs: Sequence[Run], sweeps: Sequence[Sweep], description: dict[str, Any]) -> str:
    """Return the report. All external text is escaped."""
    names = ", ".join(dict.fromkeys(run.name for run in runs))
    parts = [f"<h1>{'Load sweep' if sweeps else 'Load test'}: {escape(names)}</h1>"]
    if sweeps:
        parts += _sweep_parts(sweeps)
        detailed = [sweep.shown for sweep in sweeps if sweep.points]
    else:
        parts += [f'<p class="lead">{escape(sentence(run))}</p>' for run in runs]
        detailed = list(runs)
        if len(runs) > 1:
            parts += ["<h2>Comparison</h2>", _comparison(runs)]
    if detailed:
        parts += ["<h2>Latency distributions</h2>", "<p>Further left is faster; a dashed line is a limit.</p>"]
        parts.append(plots.cdfs(detailed))
    for run in detailed[:_MAX_DETAILED]:
        parts += _run_parts(run)
    body = "\n".join([*parts, *_method(runs, description)])
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>weft load</title>\n<style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def sentence(run: Run) -> str:
    """Summarize a run in words."""
    measures = run.measures
    answered, total = int(measures.ok.sum()), len(measures.records)
    text = f"{run.name} received {run.load} for {show_seconds(run.duration)} and answered {answered} of {total}."
    if not answered:
        return text
    ttft, tpot = run.distributions["ttft"], run.distributions["tpot"]
    text += f" Half of the answers began within {show_seconds(ttft.p50)}, 99 of 100 within {show_seconds(ttft.p99)}."
    if tpot.p50 > 0:
        text += f" Half of them then generated {1 / tpot.p50:.3g} tokens per second or more."
    if run.options.objectives:
        a = run.attainment
        low, high = a.interval
        text += f" {a.share:.1%} of the requests met every limit (95 % confidence interval {low:.1%} to {high:.1%})."
        text += f" The objectives were {'met' if a.met else 'missed'}."
    return text


def _sweep_parts(sweeps: Sequence[Sweep]) -> list[str]:
    parts = [f'<p class="lead">{escape(verdict(sweep))}.</p>' for sweep in sweeps]
    measured = [sweep for sweep in sweeps if sweep.runs]
    if not measured:
        return parts
    objectives = measured[0].runs[0].options.objectives
    parts += [
        "<h2>Latency by load</h2>",
        "<p>Lower is faster; dashed lines are limits, dotted lines the highest rate that met every objective.</p>",
        plots.latency_against_rate(measured, objectives),
    ]
    titles = (objective.title() for objective in objectives)
    head = ["requests/s", "answered", *titles, "within limits", "goodput", "output tokens/s", ""]
    for sweep in measured:
        rows = []
        for rate, run in sweep.by_rate:
            a = run.attainment
            values = [_coloured(show_seconds(v.value), v.met) for v in a.verdicts]
            late = "" if run.kept_up else " (generator late)"
            answered, speed = _answered_and_speed(run)
            rates = f"{a.share:.1%}", f"{a.goodput:.3g}", speed
            rows.append([f"{rate:.3g}", answered, *values, *rates, _met(a.met) + late])
        parts += [f"<h2>{escape(sweep.name)}</h2>", _table(head, rows), plots.rates_heat_map(sweep)]
    return parts


def _run_parts(run: Run) -> list[str]:
    parts = [
        f"<h2>{escape(run.name)} at {run.load}</h2>",
        f"<p>Model {escape(run.model)} at {escape(run.url)}, {escape(run.began)}.</p>",
        *(f'<p class="note">{escape(warning)}</p>' for warning in run.warnings()),
    ]
    if run.options.objectives:
        rows = [
            [escape(v.objective.title()), show_seconds(v.value), _met(v.met), f"{v.attainment:.1%}"]
            for v in run.attainment.verdicts
        ]
        parts.append(_table(["objective", "measured", "", "requests within the limit"], rows))
        parts.append(f"<p>Goodput: {run.attainment.goodput:.3g} requests per second within every limit.</p>")
    rows = []
    for name, d in run.distributions.items():
        low, high = d.p99_interval
        interval = f"{show_seconds(max(low, 0.0))} – {show_seconds(high)}" if high != inf else "too few requests"
        values = [show_seconds(value) for value in (d.mean, d.sd, d.p50, d.p90, d.p95, d.p99, d.max)]
        rows.append([TITLES[name], *values, show_ratio(d.p99_over_mean), interval])
    columns = ["mean", "deviation", "p50", "p90", "p95", "p99", "max", "p99 / mean", "95 % interval of p99"]
    parts.append(_table(["", *columns], rows))
    through, tokens = run.throughput(), run.tokens()
    rows = [[f"Requests: {escape(name)}", str(n)] for name, n in run.measures.outcomes().items()]
    rows += [
        ["Requests answered per second", f"{through['requests_per_second']:.4g}"],
        ["Output tokens per second", f"{through['output_tokens_per_second']:.5g}"],
        ["Prompt tokens per second", f"{through['prompt_tokens_per_second']:.5g}"],
        ["Output tokens received / requested", f"{tokens['output_received']} / {tokens['output_asked']}"],
        ["Prompt tokens counted by the server / planned", f"{tokens['prompt_received']} / {tokens['prompt_asked']}"],
        ["Prompt tokens from the server's cache", str(tokens["prompt_cached"])],
        ["Generator lateness when sending, p99", show_seconds(run.lateness_p99)],
        ["Generator lateness when receiving, p99", show_seconds(run.lag_p99)],
    ]
    if run.measures.ok.any():
        rows += [[f"Requests with a stall over {s * 1e3:g} ms", f"{run.measures.stalled(s):.1%}"] for s in STALLS]
    if (energy := run.energy()) is not None:
        rows += [
            ["Joules used by the server's devices", f"{energy['joules']:.5g}"],
            ["Mean watts", f"{energy['watts']:.4g}"],
            ["Joules per answered request", f"{energy['joules_per_request']:.4g}"],
            ["Joules per output token", f"{energy['joules_per_output_token']:.4g}"],
            ["Joules per token, including prompts", f"{energy['joules_per_token']:.4g}"],
        ]
    parts.append(_table(["", ""], rows))
    if run.view is not None:
        rows = []
        for name, mean in run.view.means.items():
            # As the server computes it: over all requests, including the warm-up.
            here = run.everything.values(name) if name in TITLES else np.empty(0)
            ours = show_seconds(float(here.mean())) if len(here) else ""
            rows.append([_SERVERS.get(name, name), show_seconds(mean), ours])
        rows += [[escape(name.replace("_", " ").capitalize()), str(n), ""] for name, n in run.view.totals.items()]
        parts.append(_table(["server metrics", "mean or count", "measured here"], rows))
    if errors := run.summary()["errors"]:
        parts.append(_table(["error", "requests"], [[escape(message), str(n)] for message, n in errors.items()]))
    parts += [plots.over_time(run), plots.timeline(run)]
    if run.measures.ok.any():
        parts += [
            "<p>Alternative limits: each cell is the share of all requests, including failures, that meets both.</p>",
            plots.limits_heat_map(run),
        ]
    return parts


def _comparison(runs: Sequence[Run]) -> str:
    head = ["median", *TITLES.values(), "answered", "output tokens/s"]
    medians = [[show_seconds(d.p50) for d in run.distributions.values()] for run in runs]
    rows = [[escape(run.name), *p50, *_answered_and_speed(run)] for run, p50 in zip(runs, medians, strict=True)]
    return _table(head, rows)


def _answered_and_speed(run: Run) -> tuple[str, str]:
    answered = f"{int(run.measures.ok.sum())} of {len(run.measures.records)}"
    return answered, f"{run.throughput()['output_tokens_per_second']:.5g}"


def _method(runs: Sequence[Run], description: dict[str, Any]) -> list[str]:
    definitions = {escape(TITLES.get(name, name)): escape(text) for name, text in (FORMULAS | RULES).items()}
    definitions |= {
        "percentiles": "linear between order statistics; the interval of p99 comes from their ranks",
        "lateness": "sending: start of sending − due time in the fixed schedule; "
        "receiving: delay of the generator's event loop, sampled every 5 ms of the run",
    }
    listed = "\n".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in definitions.items())
    words = {"True": "yes", "False": "no"}
    rows = [
        [escape(name.replace("_", " ")), escape(words.get(str(value), str(value)))]
        for name, value in description.items()
        if value != {}
    ]
    if runs:
        rows.append(["processes", str(runs[0].options.processes)])
    return ["<h2>How this was measured</h2>", f"<dl>\n{listed}</dl>", _table(["workload", ""], rows)]


def _coloured(text: str, good: bool) -> str:
    return f'<span class="{"good" if good else "bad"}">{text}</span>'


def _met(met: bool) -> str:
    return _coloured("met" if met else "missed", met)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table. Cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
