"""The command `weft search`: opens the GPU, finds a profile, chooses collectives, searches and writes the plan.

Without a GPU it searches on a recorded profile, and the whole report is predicted.
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
from weft.autosearch import break_even, gantt
from weft.autosearch.accelerators import accelerator
from weft.autosearch.bench_protocol import Load
from weft.autosearch.dense_batch import steady_within
from weft.autosearch.formula_profile import formula_profile
from weft.autosearch.journal import Journal, unfinished
from weft.autosearch.machine import Machine
from weft.autosearch.open_bench import open_gpu
from weft.autosearch.profile import Profile, cache_path, kv_capacity, load_profile, recorded_profiles, today
from weft.autosearch.profiler import Grid, Profiler
from weft.autosearch.progress_bar import SearchBar
from weft.autosearch.report import Result, optimum, provenance, report, share_of_optimum
from weft.autosearch.search import LOADS, Search
from weft.autosearch.time_budget import Progress, TimeBudget
from weft.autosearch.two_stage_search import StageStore, compare_collectives, load_stages, save_stages
from weft.autosearch.workload import workload_load
from weft.engine.config import PRESETS, EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.hub import find_model
from weft.engine.model.implementation import in_format, widened
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import COLLECTIVES
from weft.engine.plans.plan import Plan, Target, load_plan, model_key
from weft.engine.progress import for_stdout
from weft.engine.wire.cores import cores

ALTERNATIVES_SHARE = 0.3  # Share of the budget for choosing collectives.
DEFAULT_ACCELERATOR = "h200"  # Accelerator of the formulas for several GPUs without a recorded profile.


class SearchInput(NamedTuple):
    """Model, workload and starting plan of a search."""

    name: str
    model: Path
    whole: ModelSpec
    spec: ModelSpec  # One rank's shard of `whole`.
    load: Load
    start: Plan | None


class MeasuredTarget(NamedTuple):
    """The GPU to measure on, or one GPU for each rank."""

    bench: Journal
    target: Target


def search(
    arguments: argparse.Namespace, progress: Progress = lambda *_: None,
    stop_requested: Callable[[], bool] = lambda: False, found: Callable[[Plan], None] = lambda _: None,
) -> Result:  # fmt: skip
    """Run `weft search` up to the plan. found: receives each intermediate plan.

    Raises `ConfigError`, `ModelError`, or `WeftError` if it is stopped before there is a profile."""
    given = _search_input(arguments)
    budget = TimeBudget(arguments.budget_seconds, progress, stop_requested)

    def preparing(text: str) -> None:
        if stop_requested():
            raise WeftError("ended before there was a plan to write; run the same command to continue")
        if arguments.full_profile:  # not part of the budget
            progress(text)
        else:
            budget.report(text)

    with _gpu(arguments, given, preparing) as gpu:
        profile = _profile(arguments, given, gpu, budget, preparing)
        result = _search(arguments, given, profile, gpu, budget, found)
    best, line = optimum(profile, given.spec, given.whole)
    notes = [*result.notes, line]
    for stage, ms in _fastest(result):
        notes.append(share_of_optimum(stage, result.load.tokens, ms, given.spec, best))
    return result._replace(notes=(*notes, *provenance(profile)))


def _search_input(arguments: argparse.Namespace) -> SearchInput:
    name, ranks = str(arguments.model_preset or arguments.model), arguments.tensor_parallel_size
    model = PRESETS / EngineConfig.known_preset(name) if arguments.model_preset else find_model(name, weights=False)
    whole = widened(in_format(read_spec(model), arguments.quantization))
    if whole.experts is not None:
        raise ConfigError(f"{name} has experts, which weft search cannot measure yet: serve it without a plan")
    if whole.recurrent:
        raise ConfigError(f"{name} has recurrent layers, which run serially: serve it without a plan")
    if whole.quantization is not None:
        measured = num_gpus() and not arguments.predict_only and arguments.gpu is None
        if ranks > 1 or not (measured or arguments.profile):
            raise ConfigError(
                "FP8 GEMMs must be measured on one GPU: use --tensor-parallel-size 1 without --predict-only and --gpu, "
                "or give a recorded profile with --profile FILE"
            )
    spec = whole.shard(0, ranks)
    load = workload_load(arguments.workload, arguments.tokens, arguments.max_num_seqs, arguments.lengths)
    start = known_plan(arguments.start, spec) if arguments.start is not None else None
    return SearchInput(name, model, whole, spec, load, start)


def find_profile(spec: ModelSpec, load: Load, given: Path | None, target: Target | None) -> Profile | None:
    """Return the profile to search on, or None if it must be measured. given: `--profile`. target: this GPU, if any.

    Uses formulas for several ranks without a recorded profile. Raises `ConfigError` if the given profile does not fit,
    or if there is neither a profile nor a GPU."""
    key = model_key(spec)
    if given is not None:
        profile = load_profile(given)
        if profile.target.model != key:
            raise ConfigError(f"the profile {given} is for another model ({profile.target.model}), not {key}")
        if target is not None and profile.target != target:
            raise ConfigError(f"the profile {given} is for another GPU or other kernels: leave out --profile")
        return profile
    for _, profile in recorded_profiles():
        fits = profile.target.model == key if target is None else profile.target == target
        if fits and profile.load.tokens >= load.tokens:
            return profile
    if target is not None:
        return None
    if spec.shard_of.ranks > 1:
        return formula_profile(spec, load, accelerator(DEFAULT_ACCELERATOR))
    raise ConfigError(
        "there is no GPU here and no recorded profile of this model: give one with --profile FILE, or use formulas "
        "with --gpu NAME"
    )


def known_plan(path: Path, spec: ModelSpec) -> Plan:
    """Load the plan of `--start`. Raises `ConfigError` if it is for another model."""
    plan = load_plan(path)
    if plan.target.model != model_key(spec):
        raise ConfigError(f"--start {path} is a plan for another model ({plan.target.model}), not {model_key(spec)}")
    bound = plan.spec_of(spec)
    for period in plan.periods:
        period.check(bound)
    return plan


@contextlib.contextmanager
def _gpu(
    arguments: argparse.Namespace, given: SearchInput, preparing: Callable[[str], None]
) -> Iterator[MeasuredTarget | None]:
    """Open the GPUs; None if there are too few, or if the options exclude measuring."""
    if arguments.predict_only or arguments.gpu is not None or num_gpus() < arguments.tensor_parallel_size:
        yield None
        return
    heaviest = break_even.scaled(given.load, max(break_even.KV_FACTORS))
    bench, target = open_gpu(
        given.spec, heaviest, progress=preparing, model=given.model, tuning_seconds=arguments.tuning_seconds
    )  # fmt: skip
    with closing(bench):
        file = unfinished(target, given.load, "measured")
        if arguments.fresh:
            file.unlink(missing_ok=True)
        journal = Journal(bench, file)
        if journal.known:
            note = f"continuing an interrupted search with {journal.known} measurements (--fresh discards them)"
            print(f"weft search: {note}", file=sys.stderr, flush=True)
        yield MeasuredTarget(journal, target)


def _profile(
    arguments: argparse.Namespace, given: SearchInput, gpu: MeasuredTarget | None, budget: TimeBudget,
    preparing: Callable[[str], None],
) -> Profile:  # fmt: skip
    """Return the given, recorded or formula-based profile, or else measure one now."""
    spec, load, profile = given.spec, given.load, None
    if arguments.gpu is not None:
        profile = formula_profile(spec, load, accelerator(arguments.gpu))
    elif not arguments.full_profile:
        profile = find_profile(spec, load, arguments.profile, None if gpu is None else gpu.target)
    if profile is not None:
        capacity = profile.kv_capacity(spec)
    else:
        capacity = kv_capacity(gpu.bench.memory if gpu is not None else 0, spec)
    if capacity is not None and capacity < load.context:
        raise ConfigError(
            f"this GPU has too little memory for the weights of {given.name} and one request of {load.context} tokens: "
            "search on a larger GPU or on several (--tensor-parallel-size)"
        )
    if profile is not None:
        return profile
    assert gpu is not None
    profiler = Profiler(
        gpu.bench, spec, load, Grid.coarse(load, gpu.bench.num_sms),
        lambda text, i, n: preparing(f"profile: {text}, {i} of {n}"), Grid.full(load, gpu.bench.num_sms), COLLECTIVES,
    )  # fmt: skip
    seconds = float("inf") if arguments.full_profile else min(150.0, budget.seconds / 3)
    began = time.monotonic()
    profile = profiler.run(gpu.target, seconds, today())
    profile.save(cache_path(gpu.target))
    if arguments.full_profile:
        budget.exclude(time.monotonic() - began)
    return profile


def _stage_store(arguments: argparse.Namespace, profile: Profile, load: Load, unfinished: Path) -> StageStore:
    """Load earlier solver results from the `--stages` file or from that of an unfinished search."""
    if arguments.fresh:
        unfinished.unlink(missing_ok=True)
    file = unfinished if arguments.stages is None else arguments.stages
    try:
        stages = load_stages(file, profile.target, load)
    except ConfigError:
        if arguments.stages is not None:
            raise
        stages = {}
    return StageStore(stages, partial(save_stages, file, profile.target, load))


def _search(
    arguments: argparse.Namespace, given: SearchInput, profile: Profile, gpu: MeasuredTarget | None, budget: TimeBudget,
    found: Callable[[Plan], None],
) -> Result:  # fmt: skip
    """Choose the collectives, then search with them."""
    load, bench = given.load, gpu.bench if gpu is not None else None
    if bench is not None:
        bench.seconds = arguments.measure_seconds
    solved = unfinished(profile.target, load, "solved", msgspec.json.encode(profile))
    store = _stage_store(arguments, profile, load, solved)
    collectives = compare_collectives(
        given.spec, profile, steady_within(load, profile.kv_capacity(given.spec)), store.stages,
        lambda text, share: budget.report(text, ALTERNATIVES_SHARE * share), ALTERNATIVES_SHARE * budget.seconds,
        budget.stop_requested,
    )  # fmt: skip
    if not collectives:
        raise ConfigError(f"the profile lacks operations of this model; it has {', '.join(profile.features)}")
    chosen = collectives[0]
    known = given.start.periods if given.start is not None and given.start.sums == dict(chosen.spec.sums) else ()
    machine = Machine(profile, chosen.spec, [c.spec for c in collectives[1:]])
    one = Search(
        machine, load, bench, budget.sub_budget(ALTERNATIVES_SHARE if bench is None and len(collectives) > 1 else 0.0),
        max_num_seqs=arguments.max_num_seqs, known=(*known, *(c.period for c in chosen.stages.choices[:1])),
        store=store, workers=cores(),
    )  # fmt: skip
    result = one.run(f"lengths of {arguments.lengths.name}" if arguments.lengths else arguments.workload, found)
    if arguments.stages is not None:
        store.save(store.stages)
    if len(collectives) > 1:
        result = result._replace(notes=(*(f"collectives: {c.line}" for c in collectives), *result.notes))
    files = [solved] if bench is None else [solved, unfinished(profile.target, load, "measured")]
    return result._replace(unfinished=tuple(files))


def _fastest(result: Result) -> list[tuple[str, float]]:
    """Return ms per layer of the serial plan on the dense batch, and of the fastest pipeline if that is faster."""
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
    """Check options before a search of minutes. Raises `ConfigError`."""
    if arguments.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size {arguments.tensor_parallel_size}: must be at least 1")
    for option, most in (("tensor_parallel_size", 1024), ("tokens", 2**20), ("max_num_seqs", 65_536)):
        if (value := getattr(arguments, option)) > most:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: must be at most {most}")
    if arguments.gpu is not None and (arguments.profile is not None or arguments.full_profile):
        raise ConfigError("--gpu searches on a profile from formulas: leave out --profile and --full-profile")
    if arguments.full_profile:
        if arguments.profile is not None or arguments.predict_only:
            raise ConfigError("--full-profile measures a new profile: leave out --profile and --predict-only")
        if (here := num_gpus()) < (ranks := arguments.tensor_parallel_size):
            raise ConfigError(f"--full-profile needs {ranks} GPU(s) to measure on; this machine has {here}")
    for option in ("budget", "measure"):
        seconds = getattr(arguments, f"{option}_seconds")
        if seconds <= 0:
            raise ConfigError(f"--{option}-seconds {seconds:g}: must be more than 0")
    if arguments.tuning_seconds < 0:
        raise ConfigError(f"--tuning-seconds {arguments.tuning_seconds:g}: must be 0 or more")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: progress on stderr, report on stdout."""
    _check(arguments)
    out: Path = arguments.out
    # devices and link targets are written in place, not replaced
    ordinary = not os.path.lexists(out) or (out.is_file() and not out.is_symlink())
    partial = out.with_name(f"{out.name}.partial") if ordinary else out

    def keep(plan: Plan) -> None:
        if partial == out:
            return
        temporary = partial.with_name(f"{partial.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk must not end the search
            plan.save(temporary)
            temporary.replace(partial)

    with SearchBar(arguments.budget_seconds) as bar:
        result = search(arguments, bar, lambda: bar.stop_requested, keep)
        try:
            result.plan.save(partial)
            if partial != out:
                partial.replace(out)
        except OSError as error:
            raise WeftError(unwritable(out, error)) from None
    if not bar.stop_requested:  # otherwise the same command continues from these files
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
        print(f"{arguments.svg}: not written, because there is no pipeline to draw")
    return 0
