"""`weft advise`: measures, or reads what was measured; solves; writes configuration, page, picture."""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from weft import install_hint, unwritable
from weft.autosearch.advisor import curve as curves
from weft.autosearch.advisor.advice import Advice, advise, configuration, write
from weft.autosearch.advisor.curve import Curve, RateRun, check_measures
from weft.autosearch.advisor.rate import predicted_rate
from weft.autosearch.advisor.rate_search import MORE, RateSearch
from weft.autosearch.advisor.replicas import advise_replicas
from weft.autosearch.advisor.side_by_side import SideBySide
from weft.autosearch.advisor.solve import check_joules, held, solve
from weft.autosearch.advisor.sweep import Sweep
from weft.autosearch.advisor.terminal import show
from weft.autosearch.bar import SearchBar
from weft.autosearch.budget import Budget
from weft.autosearch.workload import Lengths, read_lengths
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.progress import ProgressBar, for_stdout

if TYPE_CHECKING:
    from weft.autosearch.advisor.engine_bench import EngineBench

SWEEP_SHARE = 0.5
"""of the time for measurements; the rest is for runs at rates"""
LEFT_OUT = {"slo", "max_num_seqs", "share", "model"}
"""options that do not tell how the points were measured, or are told apart"""


def options_given(config: EngineConfig) -> dict[str, Any]:
    """What the operator said, but for the model and the bound."""
    given = config.model_dump(mode="json", include=config.model_fields_set - LEFT_OUT)
    return {name: value for name, value in sorted(given.items()) if value is not None}


def lengths_of(workload: str, file: Path | None, seed: int) -> Lengths:
    """Of `P:D`, `P:D:N` or lognormal:…, or a file. Raises `ConfigError`."""
    if file is None and ":" not in workload:
        raise ConfigError(f"--workload {workload}: give prompt and output tokens as P:D, or lognormal:…")
    return read_lengths(f"{workload}:1" if workload.count(":") == 1 else workload, file, seed)


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """The command. Raises `WeftError`, one line."""
    if arguments.out is None and arguments.html is None and arguments.png is None and arguments.points is None:
        raise ConfigError("name a file to write: --out weft.yaml, --html, --png or --points")
    if (arguments.html or arguments.png) and find_spec("matplotlib") is None:
        raise ConfigError(f"--html and --png need matplotlib: {install_hint('loadgen')}")
    if config.adaptive_limit:
        raise ConfigError("--max-num-seqs is the largest bound that is tried here: a number, not auto")
    if not (arguments.budget_seconds > 0 and 0 < arguments.point_seconds < math.inf):
        raise ConfigError("--budget-seconds and --point-seconds must be more than 0")
    if not 0 <= arguments.rate_seconds < math.inf:
        raise ConfigError("--rate-seconds must be 0 or more")
    if not 0 <= arguments.epsilon < 1:
        raise ConfigError(f"--epsilon {arguments.epsilon:g} must be at least 0 and less than 1")
    if arguments.measure_replicas < 1:
        raise ConfigError("--measure-replicas must be 1 or more")
    if arguments.measure_replicas > 1 and config.tensor_parallel_size > 1:
        raise ConfigError("--measure-replicas needs --tensor-parallel-size 1: ranks have no weights in common")
    check_measures(config.objectives)
    if arguments.curves is not None:
        curve = curves.load(arguments.curves)
        outputs, given = None, dict(curve.options)
        if "model" in config.model_fields_set:  # the file has its name alone, not where it lies
            model = {"model": config.model}
        else:
            model = {} if curve.model == "demo" or "model_preset" in given else {"model": curve.model}
    else:
        lengths = lengths_of(arguments.workload, arguments.lengths, config.seed)
        curve = measured(config, lengths, arguments)
        outputs, given = np.array([d for _, d in lengths], np.float64), options_given(config)
        model = {} if config.model_preset is not None else {"model": config.model}
    advice = advise(curve, config.objectives, arguments.epsilon, arguments.objective, outputs)
    return report(advice, {**model, **given}, arguments)


def report(advice: Advice, given: dict[str, Any], arguments: argparse.Namespace) -> int:
    show(advice, for_stdout())
    found = advice.solution.best is not None
    text = configuration(advice, given) if found else ""
    if found and arguments.out is not None:
        write(text, arguments.out)
    if arguments.html is not None:
        from weft.autosearch.advisor.page import page

        write(page(advice, text), arguments.html)
    if arguments.png is not None:
        from weft.autosearch.advisor import plots

        try:
            arguments.png.write_bytes(plots.png(plots.figure(advice)))
        except OSError as error:
            raise ConfigError(unwritable(arguments.png, error)) from None
    return 0 if found else 1


def measured(config: EngineConfig, lengths: Lengths, arguments: argparse.Namespace) -> Curve:
    """The curve, from where `--points` stands."""
    from weft.autosearch.advisor.engine_bench import EngineBench, means
    from weft.engine.engine import Engine

    file: Path | None = arguments.points
    with ProgressBar() as start:
        engine = Engine(config.for_measuring().model_copy(update={"slo": []}), start)
    with SearchBar(arguments.budget_seconds, command="weft advise") as bar:
        bench = EngineBench(engine, lengths, arguments.point_seconds, config.seed, lambda: bar.ended)
        prompt, output = means(lengths)
        workload = str(arguments.lengths or arguments.workload)
        curve = Curve(
            model=config.model_name, workload=workload, prompt=prompt, output=output, options=options_given(config),
            machine=bench.machine(),
        )  # fmt: skip
        if arguments.objective == "energy":
            check_joules(curve)
        if file is not None and file.exists():
            curve = continued(curve, file)
        budget = Budget(arguments.budget_seconds, bar, lambda: bar.ended)
        share = SWEEP_SHARE if arguments.rate_seconds else 1.0
        sweep = Sweep(
            bench, curve, held(config.objectives), arguments.epsilon, arguments.objective,
            Budget(share * arguments.budget_seconds, bar, lambda: bar.ended),
            kept_in(file),
        )  # fmt: skip
        try:
            curve = sweep.run()
            if bar.ended and not curve.points:
                raise WeftError("ended before one bound was measured")
            if arguments.rate_seconds and not bar.ended:
                outputs = np.array([d for _, d in lengths], np.float64)
                curve = with_rates(curve, bench, config, outputs, arguments, budget.rest())
        finally:
            bench.close()
            engine.close()
        if arguments.measure_replicas > 1 and not bar.ended:
            del bench, engine, sweep.bench  # the device's memory is for the others
            try:
                curve = with_replicas(curve, config, lengths, arguments, bar)
            except WeftError as error:  # the advice for one stands
                print(f"weft advise: no engines side by side: {error}", file=sys.stderr, flush=True)
            kept_in(file)(curve)
        return curve


def kept_in(file: Path | None) -> Callable[[Curve], None]:
    """Keeps what is measured, to go on from. Where that fails (a disk that is full by now) the advice goes on."""
    told: list[str] = []

    def keep(curve: Curve) -> None:
        if file is None:
            return
        try:
            curves.save(curve, file)
        except ConfigError as error:
            if str(error) not in told:
                print(f"weft advise: {error}: what is measured is not kept", file=sys.stderr, flush=True)
                told.append(str(error))

    return keep


def with_rates(
    curve: Curve, bench: EngineBench, config: EngineConfig, outputs: np.ndarray, arguments: argparse.Namespace,
    budget: Budget,
) -> Curve:  # fmt: skip
    """Runs at rates around the knee, with the bound that was found. outputs: tokens of requests."""
    best = solve(curve, held(config.objectives), arguments.epsilon, arguments.objective).best
    if best is None:
        return curve
    bound, objectives, made = best.point.bound, config.objectives, list(curve.rates)
    kept = kept_in(arguments.points)

    def keep(run: RateRun) -> None:
        made.append(run)
        kept(msgspec.structs.replace(curve, rates=tuple(made)))

    class Runs:
        def serve(self, bound: int, rate: float, seed: int) -> RateRun:
            return bench.serve(bound, rate, seed, arguments.rate_seconds, objectives)

    start = math.sqrt(MORE) * predicted_rate(curve, bound, objectives, outputs)
    start = start or best.point.output_per_s / curve.output / 2
    known = curve.runs(bound, objectives)
    RateSearch(Runs(), bound, start, budget, known, keep).run()
    return msgspec.structs.replace(curve, rates=tuple(made))


def with_replicas(
    curve: Curve, config: EngineConfig, lengths: Lengths, arguments: argparse.Namespace, bar: SearchBar
) -> Curve:
    """2, 4 … engines at the bound that was found, as many as fit, up to --measure-replicas. Raises `WeftError`."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    best = solve(curve, held(config.objectives), arguments.epsilon, arguments.objective).best
    if best is None:
        return curve
    found = advise_replicas(curve, best)
    bound, pages, seconds = best.point.bound, found.needed_pages + 1, arguments.point_seconds
    known = {r.replicas for r in curve.replicas if r.bound == bound}
    wanted = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= min(arguments.measure_replicas, found.fit)]
    if set(wanted) <= known:
        return curve
    measured = list(curve.replicas)
    with SideBySide(config, max(wanted), bound, pages, lengths, seconds, bar, lambda: bar.ended) as engines:
        for number in [*wanted, 1]:  # one alone before and after: the machine may have changed meanwhile
            measured.append(engines.measure(number, bound))
    return msgspec.structs.replace(curve, replicas=tuple(measured))


def continued(curve: Curve, file: Path) -> Curve:
    """With the points of the file. Raises `ConfigError` where they were measured under other circumstances."""
    kept = curves.load(file)
    if difference := curve.differs(kept):
        raise ConfigError(f"--points {file} was measured with {difference}: name another file, or delete it")
    return kept
