"""`weft advise`: measures a curve or reads one, and writes the advice as configuration, page and picture."""

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
from weft.autosearch.advisor.concurrent_engines import ConcurrentEngines
from weft.autosearch.advisor.curve import Curve, RateRun, check_measures
from weft.autosearch.advisor.optimal_batch import check_joules, engine_objectives, solve
from weft.autosearch.advisor.predicted_rate import predicted_rate
from weft.autosearch.advisor.rate_search import MISS_FACTOR, RateSearch
from weft.autosearch.advisor.replicas import advise_replicas
from weft.autosearch.advisor.sweep import Sweep
from weft.autosearch.advisor.terminal import show
from weft.autosearch.progress_bar import SearchBar
from weft.autosearch.time_budget import TimeBudget
from weft.autosearch.workload import Lengths, read_lengths
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.progress import ProgressBar, for_stdout

if TYPE_CHECKING:
    from weft.autosearch.advisor.engine_bench import EngineBench

SWEEP_SHARE = 0.5  # Share of the measuring time for the sweep. The rest is for runs at rates.
EXCLUDED = {"slo", "max_num_seqs", "share", "model"}
"""Options that do not affect the points, or are stored separately."""


def options_given(config: EngineConfig) -> dict[str, Any]:
    """Return the options that were set, without `EXCLUDED`."""
    given = config.model_dump(mode="json", include=config.model_fields_set - EXCLUDED)
    return {name: value for name, value in sorted(given.items()) if value is not None}


def lengths_of(workload: str, file: Path | None, seed: int) -> Lengths:
    """Return the requests of `P:D`, `P:D:N`, lognormal:… or a file. Raises `ConfigError`."""
    if file is None and ":" not in workload:
        raise ConfigError(f"--workload {workload}: give prompt and output tokens as P:D, or lognormal:…")
    return read_lengths(f"{workload}:1" if workload.count(":") == 1 else workload, file, seed)


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Run the command. Raises `WeftError`."""
    if arguments.out is None and arguments.html is None and arguments.png is None and arguments.points is None:
        raise ConfigError("name a file to write: --out weft.yaml, --html, --png or --points")
    if (arguments.html or arguments.png) and find_spec("matplotlib") is None:
        raise ConfigError(f"--html and --png need matplotlib: {install_hint('loadgen')}")
    if config.adaptive_limit:
        raise ConfigError("--max-num-seqs is the largest limit to try: give a number, not auto")
    if not (arguments.budget_seconds > 0 and 0 < arguments.point_seconds < math.inf):
        raise ConfigError("--budget-seconds and --point-seconds must be more than 0")
    if not 0 <= arguments.rate_seconds < math.inf:
        raise ConfigError("--rate-seconds must be 0 or more")
    if not 0 <= arguments.epsilon < 1:
        raise ConfigError(f"--epsilon {arguments.epsilon:g} must be at least 0 and less than 1")
    if arguments.measure_replicas < 1:
        raise ConfigError("--measure-replicas must be 1 or more")
    if arguments.measure_replicas > 1 and config.tensor_parallel_size > 1:
        raise ConfigError("--measure-replicas needs --tensor-parallel-size 1: ranks cannot share weights")
    check_measures(config.objectives)
    if arguments.curves is not None:
        curve = curves.load(arguments.curves)
        outputs, given = None, dict(curve.options)
        if "model" in config.model_fields_set:  # the file has only its name, not its folder
            model = {"model": config.model}
        else:
            model = {} if curve.model == "demo" or "model_preset" in given else {"model": curve.model}
    else:
        lengths = lengths_of(arguments.workload, arguments.lengths, config.seed)
        curve = measure(config, lengths, arguments)
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


def measure(config: EngineConfig, lengths: Lengths, arguments: argparse.Namespace) -> Curve:
    """Measure the curve, starting from the `--points` file."""
    from weft.autosearch.advisor.engine_bench import EngineBench, means
    from weft.engine.engine import Engine

    file: Path | None = arguments.points
    with ProgressBar() as start:
        engine = Engine(config.for_measuring().model_copy(update={"slo": []}), start)
    with SearchBar(arguments.budget_seconds, command="weft advise") as bar:
        bench = EngineBench(engine, lengths, arguments.point_seconds, config.seed, lambda: bar.stop_requested)
        prompt, output = means(lengths)
        workload = str(arguments.lengths or arguments.workload)
        curve = Curve(
            model=config.model_name, workload=workload, prompt=prompt, output=output, options=options_given(config),
            machine=bench.machine(),
        )  # fmt: skip
        if arguments.objective == "energy":
            check_joules(curve)
        if file is not None and file.exists():
            curve = resume(curve, file)
        budget = TimeBudget(arguments.budget_seconds, bar, lambda: bar.stop_requested)
        share = SWEEP_SHARE if arguments.rate_seconds else 1.0
        sweep = Sweep(
            bench, curve, engine_objectives(config.objectives), arguments.epsilon, arguments.objective,
            TimeBudget(share * arguments.budget_seconds, bar, lambda: bar.stop_requested), saver(file),
        )  # fmt: skip
        try:
            curve = sweep.run()
            if bar.stop_requested and not curve.points:
                raise WeftError("ended before one slot limit was measured")
            if arguments.rate_seconds and not bar.stop_requested:
                outputs = np.array([d for _, d in lengths], np.float64)
                curve = with_rates(curve, bench, config, outputs, arguments, budget.sub_budget())
        finally:
            bench.close()
            engine.close()
        if arguments.measure_replicas > 1 and not bar.stop_requested:
            del bench, engine, sweep.bench  # free the device memory
            try:
                curve = with_replicas(curve, config, lengths, arguments, bar)
            except WeftError as error:  # the advice for one engine stands
                print(f"weft advise: cannot measure concurrent engines: {error}", file=sys.stderr, flush=True)
            saver(file)(curve)
        return curve


def saver(file: Path | None) -> Callable[[Curve], None]:
    """Return a function that saves a curve, to resume from. It reports each error, such as a full disk, only once."""
    reported: list[str] = []

    def keep(curve: Curve) -> None:
        if file is None:
            return
        try:
            curves.save(curve, file)
        except ConfigError as error:
            if str(error) not in reported:
                print(f"weft advise: {error}: the measurements are not saved", file=sys.stderr, flush=True)
                reported.append(str(error))

    return keep


def with_rates(
    curve: Curve, bench: EngineBench, config: EngineConfig, outputs: np.ndarray, arguments: argparse.Namespace,
    budget: TimeBudget,
) -> Curve:  # fmt: skip
    """Add runs at rates around the knee, at the best slot limit. outputs: output tokens of requests."""
    best = solve(curve, engine_objectives(config.objectives), arguments.epsilon, arguments.objective).best
    if best is None:
        return curve
    bound, objectives, made = best.point.bound, config.objectives, list(curve.rates)
    save = saver(arguments.points)

    def keep(run: RateRun) -> None:
        made.append(run)
        save(msgspec.structs.replace(curve, rates=tuple(made)))

    def serve(bound: int, rate: float, seed: int) -> RateRun:
        return bench.serve(bound, rate, seed, arguments.rate_seconds, objectives)

    start = math.sqrt(MISS_FACTOR) * predicted_rate(curve, bound, objectives, outputs)
    start = start or best.point.output_per_s / curve.output / 2
    known = curve.runs(bound, objectives)
    RateSearch(serve, bound, start, budget, known, keep).run()
    return msgspec.structs.replace(curve, rates=tuple(made))


def with_replicas(
    curve: Curve, config: EngineConfig, lengths: Lengths, arguments: argparse.Namespace, bar: SearchBar
) -> Curve:
    """Measure 2, 4 … engines at the best slot limit, up to --measure-replicas, if they fit. Raises `WeftError`."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    best = solve(curve, engine_objectives(config.objectives), arguments.epsilon, arguments.objective).best
    if best is None:
        return curve
    found = advise_replicas(curve, best)
    bound, pages, seconds = best.point.bound, found.needed_pages + 1, arguments.point_seconds
    known = {r.replicas for r in curve.replicas if r.bound == bound}
    wanted = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= min(arguments.measure_replicas, found.fit)]
    if set(wanted) <= known:
        return curve
    points = list(curve.replicas)
    with ConcurrentEngines(
        config, max(wanted), bound, pages, lengths, seconds, bar, lambda: bar.stop_requested
    ) as engines:
        for number in [*wanted, 1]:  # one alone before and after, in case the machine's speed changes
            points.append(engines.measure(number, bound))
    return msgspec.structs.replace(curve, replicas=tuple(points))


def resume(curve: Curve, file: Path) -> Curve:
    """Load the curve in the file. Raises `ConfigError` if it was measured under other conditions."""
    saved = curves.load(file)
    if difference := curve.differs(saved):
        raise ConfigError(f"--points {file} was measured with {difference}: name another file, or delete it")
    return saved
