"""The process that searches for the plan of a running engine: `python -m weft.autosearch.background_search`.

An engine starts it (`engine/scheduling/search_process.py`), sends a `SearchOrder` on stdin and reads `News` from its
stdout, one line of JSON each. It ends when its stdin closes. Its measurements and its result are in the cache folder,
so that a search continues where another ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from weft import install_hint
from weft.autosearch import break_even
from weft.autosearch.bench_protocol import Bench, Load
from weft.autosearch.gated_bench import GatedBench
from weft.autosearch.journal import Journal, unfinished
from weft.autosearch.machine import Machine
from weft.autosearch.profile import today
from weft.autosearch.profiler import Grid, Profiler
from weft.autosearch.refine import serial_for
from weft.autosearch.search import Search
from weft.autosearch.time_budget import TimeBudget
from weft.autosearch.two_stage_search import StageStore
from weft.autosearch.workload import workload_load
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, OutOfMemory, WeftError
from weft.engine.model.implementation import choose_spec
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import COLLECTIVES, target_of
from weft.engine.plans.found import FoundPlans
from weft.engine.plans.plan import Period, Plan, Target, by_name
from weft.engine.runner.iteration.pipelines import SEARCHED_NANO_BATCHES
from weft.engine.runner.options.footprint import GIB
from weft.engine.runner.options.resolve import served_as
from weft.engine.scheduling.plan_search import Failed, Found, News, Spent
from weft.engine.scheduling.search_process import SearchOrder
from weft.engine.wire.search_gate import SearchGate

WORKLOAD = "1024:512"  # As of `weft search`.
PROFILE_SHARE = 0.3  # Share of the time for the profile.
MEASURE_SECONDS = 0.5  # Seconds per measurement of a pipeline; of a profile less, see `open_bench.py`.
REPORT_SECONDS = 1.0
LOCK_SECONDS = 1.0  # Seconds between attempts to lock while another engine searches for the same plan.
LAYERS = (16, 8, 4)  # Layers to measure, as many as fit the free memory.
POOL_PAGES = 3072  # KV pages of the bench: what an iteration writes, and about as many that it only reads.
SPARE_BYTES = 2 * GIB  # Memory that the search leaves to the engine.
FAR = 0.05
"""Relative distance between a row of a pipeline and of the serial plan that no order of sums explains. In bfloat16 a
sum is off by up to 0.4 %; rows that read a value too early or of another token differ by about 1."""

Report = Callable[[News], None]
Open = Callable[[Callable[[], None]], Bench]
"""Opens a bench that calls the given function before each short piece of work."""


class Checked(Protocol):
    """The part of a bench that verifies pipelines."""

    def outputs(self, period: Period, load: Load) -> Tensor:
        """Return the state `[tokens, H]` of each token of the load after the last layer."""
        ...


@contextlib.contextmanager
def one_at_a_time(found: FoundPlans, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the searches for this target. Raises `ConfigError` if the folder cannot be used."""
    try:
        found.folder.mkdir(parents=True, exist_ok=True)
        file = found.file.with_suffix(".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot use {found.folder}: {error.strerror or error}") from None
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(LOCK_SECONDS)
            except OSError as error:
                raise ConfigError(f"cannot lock {file.name}: {error.strerror or error}") from None
        yield


class Reporter:
    """Reports what the search has spent, at most once a second."""

    def __init__(self, report: Report, gated: GatedBench) -> None:
        self._report, self._gated = report, gated
        self._begun, self._last = gated.clock(), -REPORT_SECONDS

    def __call__(self, text: str, _share: float | None = None) -> None:
        if time.monotonic() - self._last >= REPORT_SECONDS:
            self._last = time.monotonic()
            self.now(text)

    def now(self, text: str) -> None:
        self._report(Spent(self._gated.clock() - self._begun, self._gated.joules, text))


def background_search(
    order: SearchOrder, spec: ModelSpec, found: FoundPlans, target: Target, gated: GatedBench, open_bench: Open,
    report: Report,
) -> Found:  # fmt: skip
    """Return the plan that was found earlier, or search for one, verify and save it. Raises `WeftError`."""
    reporter = Reporter(report, gated)
    with one_at_a_time(found, lambda: reporter("waiting for the search of another engine")):
        if (plan := found.load()) is not None:
            return Found(plan, found.trials())
        if find_spec("ortools") is None:
            raise ConfigError(f"the search needs OR-Tools: {install_hint('search')}")
        load = workload_load(WORKLOAD, order.max_num_batched_tokens, order.max_num_seqs)
        gated.wait()
        gated.over(open_bench(gated.check))
        file = unfinished(target, load, "measured", b"in the background")
        journal = Journal(gated, file, gated.clock)
        plan = _searched(order, spec, target, journal, TimeBudget(order.seconds, reporter, clock=gated.clock))
        plan = replace(plan, periods=tuple(_verified(plan, spec, gated, reporter)))
        reporter.now("done")
        try:
            found.save(plan)
        except OSError as error:
            raise ConfigError(f"cannot write {found.file}: {error.strerror or error}") from None
        file.unlink(missing_ok=True)
        return Found(plan, found.trials())


def _searched(order: SearchOrder, spec: ModelSpec, target: Target, bench: Journal, budget: TimeBudget) -> Plan:
    load = workload_load(WORKLOAD, order.max_num_batched_tokens, order.max_num_seqs)
    profiler = Profiler(
        bench, spec, load, Grid.coarse(load, bench.num_sms), lambda text, i, n: budget.report(f"{text}, {i} of {n}"),
        collectives=COLLECTIVES, clock=budget.clock,
    )  # fmt: skip
    profile = profiler.run(target, PROFILE_SHARE * order.seconds, today())
    bench.seconds = MEASURE_SECONDS
    search = Search(
        Machine(profile, spec), load, bench, budget, max_num_seqs=order.max_num_seqs, store=StageStore(),
        fixed_batch=True,
    )  # fmt: skip
    result = search.run(WORKLOAD)
    plan = result.plan
    if not plan.periods and result.undecided:
        raise ConfigError(f"no time to compare pipelines for {', '.join(result.undecided)}; a later start continues")
    fits = [
        period
        for period in plan.periods
        if period.tokens <= order.max_num_batched_tokens and len(period.nano_batches(spec)) <= SEARCHED_NANO_BATCHES
    ]
    return replace(plan, periods=tuple(fits), made=f"{plan.made}, by an idle engine")


def _verified(plan: Plan, spec: ModelSpec, gated: GatedBench, reporter: Reporter) -> Iterator[Period]:
    """Yield the pipelines whose states are those of the serial plan, up to rounding, for every token."""
    checked: Checked = gated.bench  # type: ignore[assignment]
    operations = by_name(spec)
    for period in plan.periods:
        mixed = any(operations[op.operation].role is Role.PREFILL_ATTENTION for op in period.operations)
        load = load_of(period, plan.workload, mixed=mixed)
        serial = serial_for(spec, load, gated.num_sms)
        right, own = (gated.undisturbed(partial(checked.outputs, each, load)) for each in (serial, period))
        if (far := farthest(right, own)) <= FAR:
            yield period
        else:
            reporter.now(f"a pipeline of {period.tokens} tokens is dropped: a state is off by {far:.3f}")


def load_of(period: Period, workload: str, *, mixed: bool) -> Load:
    """Return an iteration of the period's size, and of the KV tokens at which it was measured. mixed: with prompts."""
    load = workload_load(workload, period.tokens, period.tokens)
    decodes = load.decodes if mixed else period.tokens
    kv_tokens = period.figures.get("kv_tokens", float(load.kv_tokens))
    return load._replace(decodes=decodes, context=max(1, round(kv_tokens / max(1, decodes))))


def farthest(right: Tensor, own: Tensor) -> float:
    """Return the largest distance between two rows of `[T, H]`, relative to the first; infinite if not finite."""
    if not bool(torch.isfinite(own).all()):
        return float("inf")
    return float(((own - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-9)).max())


def open_on_gpu(order: SearchOrder, spec: ModelSpec, config: EngineConfig, check: Callable[[], None]) -> Bench:
    """Open the engine's GPU, with the memory that the engine leaves. Raises `OutOfMemory` if that is too little."""
    from weft.autosearch.gpu_bench import GpuBench
    from weft.autosearch.open_bench import PROFILE_SECONDS
    from weft.engine.memory.kv_layout import KvLayout
    from weft.engine.runner.start.gemm_tuning import tune_gemms

    load = workload_load(WORKLOAD, order.max_num_batched_tokens, order.max_num_seqs)
    free = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    each = 2 * sum(op.parameters for op in spec.layer_operations())
    pages = KvLayout.of(spec, config.page_size, torch.bfloat16).page_bytes // spec.num_layers * POOL_PAGES
    layers = next((n for n in LAYERS if n <= spec.num_layers and n * (each + pages) <= free), 0)
    if not layers:
        need = (LAYERS[-1] * (each + pages) + SPARE_BYTES) / GIB
        raise OutOfMemory(
            f"{free / GIB + SPARE_BYTES / GIB:.1f} GiB of GPU memory are free and a search needs {need:.1f}: "
            "lower --gpu-memory-utilization"
        )
    tune_gemms(spec, torch.device("cuda"), order.max_num_batched_tokens, config.cache_path, 0.0)
    heaviest = break_even.scaled(load, max(break_even.KV_FACTORS))
    context = max(load.prompt, 2 * heaviest.context)
    return GpuBench(
        spec, layers=layers, max_tokens=order.max_num_batched_tokens, max_context=context, page_size=config.page_size,
        seconds=PROFILE_SECONDS, most_pages=POOL_PAGES, check=check,
    )  # fmt: skip


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _step_back() -> None:
    """Run only when no other process wants a core."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> int:
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    order = msgspec.json.decode(bytes(line), type=SearchOrder)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _step_back()
    # stdout is for news; libraries print to stderr
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def report(news: News) -> None:
        out.write(msgspec.json.encode(news) + b"\n")

    try:
        config = EngineConfig.model_validate_json(order.config)
        from weft.engine.runner.device.compile_job import use_cache

        use_cache(config)
        spec = served_as(choose_spec(config)[0], config).shard(0, 1)
        target = target_of(spec, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
        found, gated = FoundPlans(config.cache_path, target), GatedBench(SearchGate(order.gate))
        open_bench = partial(open_on_gpu, order, spec, config)
        report(background_search(order, spec, found, target, gated, open_bench, report))
    except BrokenPipeError:
        return 0
    except WeftError as error:
        report(Failed(str(error)))
    except Exception:  # a bug, or an error of the device: the engine may try again
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
