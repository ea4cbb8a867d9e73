"""Implements `weft load` and `weft load sweep`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from weft import install_hint
from weft.loadgen import files, settings
from weft.loadgen.errors import LoadError
from weft.loadgen.preflight import Ready, prepare
from weft.loadgen.processes import run_async
from weft.loadgen.run import Run, execute
from weft.loadgen.settings import Settings
from weft.loadgen.sweep import Sweep, search
from weft.loadgen.terminal import note, print_runs, print_sweeps, progress_line
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
    sweeps: list[Sweep] = []
    runs: list[Run] = []
    for target in options.targets:
        ready = run_async(partial(prepare, target, options.maker))
        ready = replace(ready, context=options.max_context or ready.context)
        if options.sweep is not None:
            sweeps.append(search(target.name, options.sweep, partial(_measure_rate, options, ready)))
            runs += sweeps[-1].runs
        else:
            runs.append(_measure(options, ready, None, target.name))
        if (sweeps or runs)[-1].interrupted:
            break
    if options.sweep is not None:
        good = all(sweep.best is not None for sweep in sweeps)
    elif options.run.objectives:
        good = all(run.attainment.met for run in runs)
    else:
        good = all(run.measures.ok.any() for run in runs)
    try:
        files.write(options.files, runs, sweeps, _description(options), options.row)
    finally:  # after the files, because stdout may be closed, as with `head`
        if sweeps:
            print_sweeps(sweeps, options.run.objectives)
        else:
            print_runs(runs)
    for path in options.files.values():
        note(f"wrote {path}")
    return 0 if good else 1


def _measure(options: Settings, ready: Ready, rate: float | None, what: str) -> Run:
    arrival = options.arrival if rate is None else replace(options.arrival, rate=rate)
    maker = replace(options.maker, calibration=ready.calibration)
    context = ready.context
    if context is not None:
        context = max(2, context - ready.image_tokens)
    if context is not None and maker.kind == "words":
        context = max(2, int(context * 0.95))  # words match their token counts only on average
    workload = build(arrival, options.content, maker, context)
    with progress_line(what, len(workload), quiet=options.quiet) as update:
        return execute(ready, workload, options.run, update)


def _measure_rate(options: Settings, ready: Ready, rate: float) -> Run:
    """Measure one rate of a sweep."""
    name = ready.target.name
    run = _measure(options, ready, rate, f"{name} at {rate:.3g}/s")
    if not options.quiet:
        verdicts = ", ".join(f"{v.objective} {'met' if v.met else 'missed'}" for v in run.attainment.verdicts)
        note(f"{name} at {rate:.3g} requests/s: {verdicts}")
    return run


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
    if maker.images is not None:
        out["images_per_request"] = asdict(maker.images)
    target = options.targets[0]
    out |= {"endpoint": target.path, "exact_output_asked": target.exact_output, "extra": dict(target.extra)}
    return out
