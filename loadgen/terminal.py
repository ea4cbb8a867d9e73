"""Prints progress during a run and the results in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weft.loadgen.driver import Progress
from weft.loadgen.measures import FORMULAS, TITLES
from weft.loadgen.processes import OnProgress
from weft.loadgen.run import Run
from weft.loadgen.slo import RULES, Objective
from weft.loadgen.sweep import Sweep
from weft.loadgen.units import show_ratio, show_seconds

_out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def note(line: str) -> None:
    """Print a line on stderr."""
    _err.print(escape(line), style="dim")


@contextmanager
def progress_line(what: str, planned: int, *, quiet: bool) -> Iterator[OnProgress | None]:
    """Show a progress line on stderr, drawn by the yielded function; None if `quiet` or if stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    sampled, before, speed = 0.0, 0, 0.0  # seconds, tokens, and tokens per second of the last sample

    def update(elapsed: float, totals: Sequence[Progress]) -> None:
        nonlocal sampled, before, speed
        sent, done, failed, tokens = (
            sum(getattr(p, name) for p in totals) for name in ("sent", "done", "failed", "tokens")
        )
        if elapsed - sampled >= 1:
            speed = (tokens - before) / (elapsed - sampled)
            sampled, before = elapsed, tokens
        answered = done - failed
        ttft = sum(p.ttft_sum for p in totals) / answered if answered else float("nan")
        line = Text(f"{what}  {max(elapsed, 0):.0f} s  ", style="bold")
        of = f" of {planned}" if planned else ""
        line.append(f"sent {sent}{of} · running {sent - done} · answered {answered} · ", style="not bold")
        line.append(f"failed {failed}", style="red" if failed else "not bold")
        line.append(f" · {speed:.0f} tokens/s · mean TTFT {show_seconds(ttft)} · ", style="not bold")
        lag = max((p.lag for p in totals), default=0.0)
        line.append(f"own lag {lag * 1e3:.1f} ms", style="not bold yellow" if lag > 0.005 else "not bold dim")
        live.update(line, refresh=True)

    with Live(console=_err, auto_refresh=False, transient=True) as live:
        yield update


def print_runs(runs: Sequence[Run]) -> None:
    """Print every run in full, then the formulas."""
    for run in runs:
        _print_run(run)
    if len(runs) > 1:
        _print_comparison(runs)
    _print_formulas()


def _print_run(run: Run) -> None:
    outcomes = run.measures.outcomes()
    _out.print(
        f"\n[bold]{escape(run.name)}[/]  {escape(run.model)} at {escape(run.url)}, {run.load} for {run.duration:.4g} s"
    )
    failed = ", ".join(f"{n} {name}" for name, n in outcomes.items() if name != "ok") or "none failed"
    _out.print(f"{outcomes['ok']} of {len(run.measures.records)} requests answered ({failed})")
    for message, n in list(run.summary()["errors"].items())[:3]:
        _out.print(f"  {n} × {escape(message)}", style="red")

    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    for column in ("", *columns, "p99/mean"):
        table.add_column(column, justify="right" if column else "left")
    for name, distribution in run.distributions.items():
        values = [show_seconds(getattr(distribution, column)) for column in columns]
        table.add_row(TITLES[name], *values, show_ratio(distribution.p99_over_mean))
    _out.print(table)
    if stalls := run.stalls():
        _out.print(stalls)

    through, tokens = run.throughput(), run.tokens()
    _out.print(
        f"{through['requests_per_second']:.4g} requests/s, {through['output_tokens_per_second']:.5g} output tokens/s "
        f"and {through['prompt_tokens_per_second']:.5g} prompt tokens/s over {run.span:.4g} s"
    )
    _out.print(
        f"tokens requested: {tokens['prompt_asked']} in, {tokens['output_asked']} out; counted by the server: "
        f"{tokens['prompt_received']} in ({tokens['prompt_cached']} from its cache), {tokens['output_received']} out, "
        f"in {tokens['events']} events"
    )
    if (energy := run.energy()) is not None:
        _out.print(
            f"{energy['joules']:.4g} J at {energy['watts']:.4g} W: {energy['joules_per_request']:.4g} per request, "
            f"{energy['joules_per_output_token']:.4g} per output token, {energy['joules_per_token']:.4g} per token"
        )
    _print_slo(run)
    _print_view(run)
    _out.print(
        f"generator: p99 lateness {run.lateness_p99 * 1e3:.2f} ms sending, {run.lag_p99 * 1e3:.2f} ms receiving"
        f"; {run.cpu_share:.0%} of a core",
        style="dim" if run.kept_up else "yellow",
    )
    for warning in run.warnings():
        _out.print(f"note: {escape(warning)}", style="yellow")


def _print_slo(run: Run) -> None:
    if not run.options.objectives:
        return
    a = run.attainment
    for v in a.verdicts:
        kept = f"{v.attainment:.1%} of requests within the limit"
        padding = " " * 3 * v.met
        _out.print(f"{_met(v.met)}{padding} {escape(v.objective.title())}: {show_seconds(v.value)}; {kept}")
    low, high = a.interval
    _out.print(
        f"attainment {a.share:.1%} ({a.good} of {a.total}; 95 % interval {low:.1%} to {high:.1%}), "
        f"goodput {a.goodput:.3g} requests/s"
    )


def _print_view(run: Run) -> None:
    """Print the server's means next to the measured ones."""
    view = run.view
    if view is None:
        return
    parts = []
    if (queue := view.means.get("queue")) is not None:
        parts.append(f"queueing {show_seconds(queue)}")
    for name in ("ttft", "e2e", "itl", "tpot", "normalized"):
        if name in view.means and len(ours := run.everything.values(name)):
            parts.append(f"{name} {show_seconds(view.means[name])} (here {show_seconds(float(ours.mean()))})")
    if parts:
        _out.print("server means: " + ", ".join(parts), style="dim")
    if "generation_tokens" in view.totals:
        prompt = view.totals.get("prompt_tokens", 0)
        _out.print(f"server counters: {prompt} tokens in, {view.totals['generation_tokens']} out", style="dim")


def _print_comparison(runs: Sequence[Run]) -> None:
    table = Table(title="medians", box=None, header_style="bold", pad_edge=False)
    table.add_column("server")
    for name in ("answered", *TITLES.values(), "output tokens/s"):
        table.add_column(name, justify="right")
    for run in runs:
        answered, speed = _answered_and_speed(run)
        medians = [show_seconds(d.p50) for d in run.distributions.values()]
        table.add_row(escape(run.name), answered, *medians, speed)
    _out.print("", table, sep="\n")


def _answered_and_speed(run: Run) -> tuple[str, str]:
    answered = f"{int(run.measures.ok.sum())}/{len(run.measures.records)}"
    return answered, f"{run.throughput()['output_tokens_per_second']:.5g}"


def _met(met: bool) -> str:
    return "[green]met[/]" if met else "[red]missed[/]"


def print_sweeps(sweeps: Sequence[Sweep], objectives: Sequence[Objective]) -> None:
    """Print a table of rates and the highest rate within the objectives, for each server."""
    for sweep in sweeps:
        table = Table(title=escape(sweep.name), box=None, header_style="bold", pad_edge=False)
        asked = [str(objective) for objective in objectives]
        for column in ("requests/s", "answered", *asked, "attainment", "goodput", "output tokens/s", ""):
            table.add_column(column, justify="right", overflow="fold")
        for rate, run in sweep.by_rate:
            a = run.attainment
            values = [f"[{'green' if v.met else 'red'}]{show_seconds(v.value)}[/]" for v in a.verdicts]
            word = _met(a.met) if run.kept_up else "[yellow]generator too slow[/]"
            answered, speed = _answered_and_speed(run)
            table.add_row(f"{rate:.3g}", answered, *values, f"{a.share:.1%}", f"{a.goodput:.3g}", speed, word)
        _out.print("", table, sep="\n")
        for warning in dict.fromkeys(w for run in sweep.runs if run.kept_up for w in run.notes):
            _out.print(f"note: {escape(warning)}", style="yellow")
        _out.print(f"[bold]{escape(verdict(sweep))}[/]")
    _print_formulas()


def verdict(sweep: Sweep) -> str:
    """Summarize a sweep in one sentence."""
    if sweep.best is None:
        return f"{sweep.name}: no rate met the objectives ({sweep.reason})"
    above = f", missed at {sweep.missed:.3g}" if sweep.missed is not None else ", none missed"
    return f"{sweep.name}: highest rate within the objectives {sweep.best:.3g} requests/s{above} ({sweep.reason})"


def _print_formulas() -> None:
    _out.print()
    for text in FORMULAS.values():
        _out.print(f"  {text}", style="dim")
    for name in ("attainment", "goodput"):
        _out.print(f"  {name} = {RULES[name]}", style="dim")
