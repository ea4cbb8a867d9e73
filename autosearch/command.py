"""The command `weft search`: it opens the GPU, finds the profile and the collectives, searches, and writes the plan.

Without a GPU it runs on a recorded profile and everything in the report is predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from weft import unwritable
from weft.autosearch import breakeven, gantt, limits
from weft.autosearch.accelerators import accelerator
from weft.autosearch.alternatives import compare
from weft.autosearch.bar import SearchBar
from weft.autosearch.batches import steady_within
from weft.autosearch.bench_protocol import Load
from weft.autosearch.budget import Budget, Progress
from weft.autosearch.given import find_profile, known_plan
from weft.autosearch.journal import Journal, unfinished
from weft.autosearch.machine import Machine
from weft.autosearch.modelled import modelled_profile
from weft.autosearch.profile import Profile, cache_path, kv_capacity
from weft.autosearch.profiler import Grid, Profiler, open_gpu, today
from weft.autosearch.report import Result, report
from weft.autosearch.search import LOADS, Search
from weft.autosearch.stages import KeptStages, keep_stages, read_stages
from weft.autosearch.workload import workload_load
from weft.engine.config import PRESETS, EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.hub import find_model
from weft.engine.model.implementation import in_format, widened
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import COLLECTIVES
from weft.engine.plans.plan import Plan, Target
from weft.engine.progress import for_stdout
from weft.engine.wire.cores import cores

ALTERNATIVES_SHARE = 0.3
"""of the budget, for choosing among collectives where there are any"""


class Question(NamedTuple):
    """What a search is of."""

    name: str
    """of the model"""
    model: Path
    whole: ModelSpec
    spec: ModelSpec
    """one rank's part of it"""
    load: Load
    start: Plan | None
    """pipelines that compete from the start"""


class Card(NamedTuple):
    """What a search measures on: a GPU, or one for each rank."""

    bench: Journal
    target: Target


def search(
    arguments: argparse.Namespace, progress: Progress = lambda *_: None, ended: Callable[[], bool] = lambda: False,
    found: Callable[[Plan], None] = lambda _: None,
) -> Result:  # fmt: skip
    """`weft search`: everything up to the plan; `found` hears of plans on the way.

    Raises `ConfigError`, `ModelError`, and `WeftError` when it is ended before there is a profile.
    """
    asked = _question(arguments)
    budget = Budget(arguments.budget_seconds, progress, ended)

    def preparing(text: str) -> None:
        if ended():
            raise WeftError("ended before there was a plan to write; the same command goes on from here")
        if arguments.full_profile:  # asked for beside the budget
            progress(text)
        else:
            budget.tell(text)

    with _card(arguments, asked, preparing) as card:
        profile = _profile(arguments, asked, card, budget, preparing)
        result = _search(arguments, asked, profile, card, budget, found)
    best, line = limits.optimum(profile, asked.spec, asked.whole)
    notes = [*result.notes, line]
    for stage, ms in _fastest(result):
        notes.append(limits.reached(stage, result.load.tokens, ms, asked.spec, best))
    return result._replace(notes=(*notes, *limits.provenance(profile)))


def _question(arguments: argparse.Namespace) -> Question:
    name, ranks = str(arguments.model_preset or arguments.model), arguments.tensor_parallel_size
    model = PRESETS / EngineConfig.known_preset(name) if arguments.model_preset else find_model(name, weights=False)
    whole = widened(in_format(read_spec(model), arguments.quantization))
    if whole.experts is not None:
        raise ConfigError(f"{name} has experts, which weft search cannot measure yet: it runs serially")
    if whole.quantization is not None:
        measured = num_gpus() and not arguments.predict_only and arguments.gpu is None
        if ranks > 1 or not (measured or arguments.profile):
            raise ConfigError(
                "products in FP8 are measured on one GPU: search there, with --tensor-parallel-size 1 and without "
                "--predict-only and --gpu, or give a recorded profile"
            )
    spec = whole.shard(0, ranks)
    load = workload_load(arguments.workload, arguments.tokens, arguments.max_num_seqs, arguments.lengths)
    start = known_plan(arguments.start, spec) if arguments.start is not None else None
    return Question(name, model, whole, spec, load, start)


@contextlib.contextmanager
def _card(arguments: argparse.Namespace, asked: Question, preparing: Callable[[str], None]) -> Iterator[Card | None]:
    """None where there is none, or it is not to be measured on."""
    if arguments.predict_only or arguments.gpu is not None or num_gpus() < arguments.tensor_parallel_size:
        yield None
        return
    heaviest = breakeven.scaled(asked.load, max(breakeven.KV_FACTORS))
    gpu, target = open_gpu(
        asked.spec, heaviest, progress=preparing, model=asked.model, tuning_seconds=arguments.tuning_seconds
    )  # fmt: skip
    with closing(gpu):
        file = unfinished(target, asked.load, "measured")
        if arguments.fresh:
            file.unlink(missing_ok=True)
        journal = Journal(gpu, file)
        if journal.known:
            told = f"going on from a search that was interrupted, with {journal.known} measurements (else --fresh)"
            print(f"weft search: {told}", file=sys.stderr, flush=True)
        yield Card(journal, target)


def _profile(
    arguments: argparse.Namespace, asked: Question, card: Card | None, budget: Budget, preparing: Callable[[str], None]
) -> Profile:
    """The one that is given, known or modelled; else one that is measured now."""
    spec, load, profile = asked.spec, asked.load, None
    if arguments.gpu is not None:
        profile = modelled_profile(spec, load, accelerator(arguments.gpu))
    elif not arguments.full_profile:
        profile = find_profile(spec, load, arguments.profile, None if card is None else card.target)
    if profile is not None:
        capacity = profile.kv_capacity(spec)
    else:
        capacity = kv_capacity(card.bench.memory if card is not None else 0, spec)
    if capacity is not None and capacity < load.context:
        raise ConfigError(
            f"this GPU has no room for one request of {load.context} tokens beside the weights of "
            f"{asked.name}: search on a larger one, or on more of them (--tensor-parallel-size)"
        )
    if profile is not None:
        return profile
    assert card is not None
    profiler = Profiler(
        card.bench, spec, load, Grid.coarse(load, card.bench.num_sms),
        lambda text, i, n: preparing(f"profile: {text}, {i} of {n}"), Grid.full(load, card.bench.num_sms), COLLECTIVES,
    )  # fmt: skip
    seconds = float("inf") if arguments.full_profile else min(150.0, budget.seconds / 3)
    began = time.monotonic()
    profile = profiler.run(card.target, seconds, today())
    profile.save(cache_path(card.target))
    if arguments.full_profile:
        budget.leave_out(time.monotonic() - began)  # asked for beside it
    return profile


def _kept_stages(arguments: argparse.Namespace, profile: Profile, load: Load, unfinished: Path) -> KeptStages:
    """What the solver found before; in the file of `--stages`, or in that of an unfinished search."""
    if arguments.fresh:
        unfinished.unlink(missing_ok=True)
    file = unfinished if arguments.stages is None else arguments.stages
    try:
        stages = read_stages(file, profile.target, load)
    except ConfigError:
        if arguments.stages is not None:
            raise
        stages = {}
    return KeptStages(stages, partial(keep_stages, file, profile.target, load))


def _search(
    arguments: argparse.Namespace, asked: Question, profile: Profile, card: Card | None, budget: Budget,
    found: Callable[[Plan], None],
) -> Result:  # fmt: skip
    """On a profile: the choice of collectives, then the search with those."""
    load, bench = asked.load, card.bench if card is not None else None
    if bench is not None:
        bench.seconds = arguments.measure_seconds
    solved = unfinished(profile.target, load, "solved", msgspec.json.encode(profile))
    kept = _kept_stages(arguments, profile, load, solved)
    ways = compare(
        asked.spec, profile, steady_within(load, profile.kv_capacity(asked.spec)), kept.stages,
        lambda text, share: budget.tell(text, ALTERNATIVES_SHARE * share), ALTERNATIVES_SHARE * budget.seconds,
        budget.ended,
    )  # fmt: skip
    if not ways:
        raise ConfigError(f"the profile lacks operations of this model; it has {', '.join(profile.features)}")
    chosen = ways[0]
    known = asked.start.periods if asked.start is not None and asked.start.sums == dict(chosen.spec.sums) else ()
    machine = Machine(profile, chosen.spec)
    one = Search(
        machine, load, bench, budget.rest(ALTERNATIVES_SHARE if bench is None and len(ways) > 1 else 0.0),
        max_num_seqs=arguments.max_num_seqs, known=(*known, *(c.period for c in chosen.stages.choices[:1])), kept=kept,
        workers=cores(),
    )  # fmt: skip
    result = one.run(f"lengths of {arguments.lengths.name}" if arguments.lengths else arguments.workload, found)
    if arguments.stages is not None:
        kept.keep(kept.stages)
    if len(ways) > 1:
        result = result._replace(notes=(*(f"collectives: {a.line}" for a in ways), *result.notes))
    files = [solved] if bench is None else [solved, unfinished(profile.target, load, "measured")]
    return result._replace(unfinished=tuple(files))


def _fastest(result: Result) -> list[tuple[str, float]]:
    """(what, ms of a layer) of the serial plan on the dense batch, and of the fastest pipeline where that is faster."""
    load = LOADS[0][0]
    times: dict[str, float] = {}
    for line in result.lines:
        ms = line.measured.ms if line.measured is not None else line.predicted_ms
        if line.load == load and ms is not None and line.stage.startswith(("serial", "stage II", "refined")):
            kind = "serial plan" if line.stage == "serial" else "pipeline"
            times[kind] = min(ms, times.get(kind, ms))
    return [(kind, ms) for kind, ms in times.items() if kind == "serial plan" or ms < times.get("serial plan", ms)]


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _check(arguments: argparse.Namespace) -> None:
    """What can be refused before minutes of search. Raises `ConfigError`."""
    if arguments.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size {arguments.tensor_parallel_size}: must be at least 1")
    if arguments.gpu is not None and (arguments.profile is not None or arguments.full_profile):
        raise ConfigError("--gpu searches on a modelled profile: leave out --profile and --full-profile")
    if arguments.full_profile:
        if arguments.profile is not None or arguments.predict_only:
            raise ConfigError("--full-profile measures a new profile: leave out --profile and --predict-only")
        if (here := num_gpus()) < (ranks := arguments.tensor_parallel_size):
            needed = "a GPU, and there is none here" if not here else f"{ranks} GPUs, and there are {here} here"
            raise ConfigError(f"--full-profile measures on {needed}")
    for option in ("budget", "measure"):
        seconds = getattr(arguments, f"{option}_seconds")
        if seconds <= 0:
            raise ConfigError(f"--{option}-seconds {seconds:g}: must be more than 0")
    if arguments.tuning_seconds < 0:
        raise ConfigError(f"--tuning-seconds {arguments.tuning_seconds:g}: must be 0 or more")


def run(arguments: argparse.Namespace) -> int:
    """The command: progress on stderr, the report on stdout."""
    _check(arguments)
    out: Path = arguments.out
    # a device, or what a link names, is written and not replaced
    ordinary = not os.path.lexists(out) or (out.is_file() and not out.is_symlink())
    partial = out.with_name(f"{out.name}.partial") if ordinary else out

    def keep(plan: Plan) -> None:
        if partial == out:
            return
        whole = partial.with_name(f"{partial.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk ends no search
            plan.save(whole)
            whole.replace(partial)

    with SearchBar(arguments.budget_seconds) as bar:
        result = search(arguments, bar, lambda: bar.ended, keep)
        try:
            result.plan.save(partial)
            if partial != out:
                partial.replace(out)
        except OSError as error:
            raise WeftError(unwritable(out, error)) from None
    if not bar.ended:  # else the same command goes on from there
        for file in result.unfinished:
            file.unlink(missing_ok=True)
    if arguments.svg is not None and result.plan.periods:
        shown = max(result.plan.periods, key=lambda p: p.figures["gain"])
        try:
            arguments.svg.write_text(gantt.svg(shown, f"{result.plan.target.gpu}, {result.plan.workload}"))
        except OSError as error:
            raise WeftError(unwritable(arguments.svg, error)) from None
    console = for_stdout()
    report(result, console)
    for i, period in enumerate(result.plan.periods):
        gantt.draw(period, console, title=f"pipeline {i + 1} of {len(result.plan.periods)}")
    print(f"{arguments.out}: {gantt.summary(result.plan)}")
    if arguments.svg is not None and not result.plan.periods:
        print(f"{arguments.svg}: not written, for there is no pipeline to draw")
    return 0
