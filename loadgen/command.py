"""Implements `weft load` and `weft load sweep`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from weft import install_hint
from weft.loadgen import files, settings
from weft.loadgen.client import Target
from weft.loadgen.errors import LoadError
from weft.loadgen.interrupts import run_async
from weft.loadgen.preflight import Ready, prepare
from weft.loadgen.run import Run, execute
from weft.loadgen.settings import Settings
from weft.loadgen.sweep import Sweep, search
from weft.loadgen.terminal import Live, note, print_runs, print_sweeps
from weft.loadgen.workload import build


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status. A `LoadError` becomes one line on stderr and status 2."""
    try:
        return _run(settings.read(arguments))
    except LoadError as error:
        print(f"weft load: {error}", file=sys.stderr)
        return 2


def _run(options: Settings) -> int:
    if "html" in options.files and find_spec("matplotlib") is None:
        raise LoadError(f"--html needs matplotlib: {install_hint('loadgen')}")
    if options.sweep is not None:
        sweeps = []
        for target in options.targets:
            sweeps.append(_sweep(options, target))
            if sweeps[-1].interrupted:
                break
        runs = [run for sweep in sweeps for run in sweep.runs]
        status = 0 if all(sweep.best is not None for sweep in sweeps) else 1
    else:
        sweeps = []
        runs = []
        for target in options.targets:
            runs.append(_one(options, target))
            if runs[-1].interrupted:
                break
        status = 0 if all(_good(run) for run in runs) else 1
    try:
        files.write(options.files, runs, sweeps, _description(options), options.row)
    finally:  # after the files, because stdout may be closed, as with `head`
        if sweeps:
            print_sweeps(sweeps, options.run.objectives)
        else:
            print_runs(runs)
    for path in options.files.values():
        note(f"wrote {path}")
    return status


def _good(run: Run) -> bool:
    return run.attainment.met if run.options.objectives else bool(run.measures.ok.any())


def _prepare(options: Settings, target: Target) -> Ready:
    ready = run_async(partial(prepare, target, options.maker))
    return replace(ready, context=options.max_context or ready.context)


def _measure(options: Settings, ready: Ready, rate: float | None, what: str) -> Run:
    arrival = options.arrival if rate is None else replace(options.arrival, rate=rate)
    maker = options.maker.calibrated(ready.calibration)
    context = ready.context
    if context is not None and maker.kind == "words":
        context = max(2, int(context * 0.95))  # words match their token counts only on average
    workload = build(arrival, options.content, maker, context)
    with Live(what, len(workload), quiet=options.quiet) as live:
        return execute(ready, workload, options.run, live.update)


def _one(options: Settings, target: Target) -> Run:
    return _measure(options, _prepare(options, target), None, target.name)


def _sweep(options: Settings, target: Target) -> Sweep:
    assert options.sweep is not None
    ready = _prepare(options, target)

    def measure(rate: float) -> Run:
        run = _measure(options, ready, rate, f"{target.name} at {rate:.3g}/s")
        if not options.quiet:
            verdicts = ", ".join(f"{v.objective} {'met' if v.met else 'missed'}" for v in run.attainment.verdicts)
            note(f"{target.name} at {rate:.3g} requests/s: {verdicts}")
        return run

    return search(target.name, options.sweep, measure)


def _description(options: Settings) -> dict[str, Any]:
    """Describe the workload for the reports."""
    arrival, content, maker = options.arrival, options.content, options.maker
    out: dict[str, Any] = {"arrivals": arrival.process, "seed": maker.seed, "prompts": maker.kind}
    if content.trace is not None:
        out |= {"arrivals": "trace", "trace_requests": len(content.trace.rows)}
    elif content.prompts:
        out["prompt_file_entries"] = len(content.prompts)
    elif content.pairs is not None:
        out["length_pairs"] = len(content.pairs)
    else:
        out |= {"input": str(content.input), "output": str(content.output)}
    if arrival.process == "gamma":
        out["burstiness"] = arrival.burstiness
    if arrival.process == "closed":
        out["users"] = arrival.users
    if arrival.process == "ramp":
        out["rate_end"] = arrival.end_rate
    if content.turns.a > 1 or content.turns.kind != "constant":
        out["turns"] = str(content.turns).replace("tokens", "requests")
    if content.context:
        out["context"] = content.context
    if content.think:
        out["think_mean_seconds"] = content.think
    if maker.shared:
        out |= {"shared_prefix": maker.shared, "prefix_groups": maker.groups}
    target = options.targets[0]
    out |= {"endpoint": target.path, "exact_output_asked": target.exact_output, "extra": dict(target.extra)}
    return out
