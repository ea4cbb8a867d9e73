"""`weft bench offline` and `weft bench scheduler`: the engine in this process, timed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft import unwritable
from weft.autosearch.accelerators import of_gpu
from weft.autosearch.advisor.engine_bench import cpu_name
from weft.autosearch.workload import Lengths, read_lengths
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, WeftError
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.model.spec import ModelSpec
from weft.engine.progress import ProgressBar, for_stdout
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
from weft.tools.bench.gpu_monitor import PowerMonitor, PowerUse, sustained_flops
from weft.tools.bench.llama_cpp import find_library, model_file, run_llama_cpp
from weft.tools.bench.trace import Recorder, TraceFigures

Figures = dict[str, Any]
STEPS = (1, 16, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096, 8192)
"""Upper bounds, in tokens of an iteration, of the groups in `_by_tokens`."""


def machine() -> Figures:
    """The machine that the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def report(title: str, figures: Figures, file: Path | None) -> None:
    table = Table(title=title, show_header=False)
    for key, value in figures.items():
        for name, part in value.items() if isinstance(value, dict) else (("", value),):
            label = f"{key} · {name}" if name else key
            table.add_row(label.replace("_", " "), f"{part:,.2f}" if isinstance(part, float) else str(part))
    for_stdout().print(table)
    if file is not None:
        write_figures(figures, file)


def write_figures(figures: Figures, file: Path) -> None:
    """Write figures as JSON. Raises `WeftError`."""
    try:
        file.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise WeftError(unwritable(file, error)) from None


def _prompts(lengths: Lengths, vocab_size: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).astype(np.int32) for n, _ in lengths]


def _run_engine(
    engine: Engine, prompts: list[np.ndarray], lengths: Lengths, recorder: Recorder, first_handle: int = 0
) -> Figures:  # fmt: skip
    for i, (prompt, (_, out)) in enumerate(zip(prompts, lengths, strict=True), start=first_handle):
        params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
        engine.add(AddRequest(handle=i, prompt_token_ids=prompt.tobytes(), params=params))
    before = engine.stats()
    schedule = busy = 0.0
    idle: list[float] = []
    sizes: list[tuple[int, float]] = []
    widest = finished = 0
    first_token: float | None = None
    begin, cpu = time.perf_counter(), time.process_time()
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("weft", total=len(prompts))
        while engine.has_work:
            outputs = engine.step()
            if outputs is None:
                continue
            stats = outputs.stats
            if first_token is None and (outputs.columns()[1] >= 0).any():
                first_token = time.perf_counter() - begin
            recorder.step(stats.iterations, stats.iteration.tokens)
            schedule += stats.iteration.schedule_seconds
            busy += stats.iteration.seconds
            idle.append(stats.iteration.idle_seconds)
            sizes.append((stats.iteration.tokens, stats.iteration.seconds))
            widest = max(widest, stats.iteration.requests)
            if ended := int(np.count_nonzero(outputs.columns()[2])):
                finished += ended
                bar.update(task, completed=finished)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    recorder.stop()
    stats = engine.stats()
    iterations = stats.iterations - before.iterations
    figures: Figures = {
        "seconds": seconds,
        "total_tokens_per_second": sum(a + b for a, b in lengths) / seconds,
        "output_tokens_per_second": sum(b for _, b in lengths) / seconds,
        **_use_of_flops(engine, lengths, seconds),
        "iterations": iterations,
        "iterations_pipelined": stats.iterations_pipelined - before.iterations_pipelined,
        "requests_in_the_widest_iteration": widest,
        "preemptions": stats.scheduler.preemptions - before.scheduler.preemptions,
        "device_busy_share": busy / seconds,
        "schedule_and_commit_ms_per_iteration": 1e3 * schedule / max(iterations, 1),
        "first_token_seconds": first_token,
        **_by_tokens(np.array(sizes)),
    }
    if len(lengths) == 1 and first_token is not None and lengths[0][1] > 1:
        figures["output_tokens_per_second_behind_the_first"] = (lengths[0][1] - 1) / (seconds - first_token)
    if engine.resolved.device.type == "cuda":
        figures["device_idle_between_iterations_us_median"] = 1e6 * float(np.median(idle))
        figures["device_idle_between_iterations_us_p99"] = 1e6 * float(np.quantile(idle, 0.99))
    else:
        figures["cpu_seconds"] = cpu
        figures["total_tokens_per_cpu_second"] = sum(a + b for a, b in lengths) / cpu
    return figures


def model_flops(spec: ModelSpec, lengths: Lengths) -> tuple[float, float]:
    """Return the FLOPs of a workload: 2 for each parameter used and token, and 4 for each query, key and dimension.

    A token attends to itself and all earlier ones in its window. The last token of an output is not computed."""
    dense = attention = 0.0
    windows = Counter(spec.windows)
    for prompt, output in lengths:
        tokens = prompt + output - 1
        dense += 2.0 * spec.active_parameters * tokens
        for window, layers in windows.items():
            most = min(window or tokens, tokens)
            pairs = most * (most + 1) / 2 + (tokens - most) * most
            attention += 4.0 * spec.num_heads * spec.head_dim * layers * pairs
    return dense, attention


def _use_of_flops(engine: Engine, lengths: Lengths, seconds: float) -> Figures:
    """FLOP/s by 2ND, and with attention; on a known GPU also as shares of its rated 16-bit FLOP/s (MFU)."""
    dense, attention = model_flops(engine.spec, lengths)
    rates = {"2nd": dense / seconds / 1e12, "with_attention": (dense + attention) / seconds / 1e12}
    figures: Figures = {f"model_tflops_{name}": rate for name, rate in rates.items()}
    device = of_gpu(torch.cuda.get_device_name()) if engine.resolved.device.type == "cuda" else None
    if device is not None:
        rated = engine.config.tensor_parallel_size * device.gflops / 1e3
        figures |= {f"mfu_{name}": rate / rated for name, rate in rates.items()}
    return figures


def _by_tokens(sizes: np.ndarray) -> Figures:
    """The time of a run, grouped by tokens of an iteration. sizes: `[N, 2]` tokens and seconds on the device."""
    if not len(sizes):
        return {}
    tokens, seconds = sizes.T
    step = np.searchsorted(STEPS, tokens)
    count, time_of, tokens_of = (np.bincount(step, weights=w) for w in (np.ones(len(step)), seconds, tokens))
    names = {i: f"to {STEPS[i]}" if i < len(STEPS) else f"above {STEPS[-1]}" for i in np.flatnonzero(count)}
    return {
        "share_of_the_time_by_tokens": {name: time_of[i] / max(sum(time_of), 1e-9) for i, name in names.items()},
        "ms_per_iteration_by_tokens": {name: 1e3 * time_of[i] / count[i] for i, name in names.items()},
        "tokens_per_iteration_by_tokens": {name: tokens_of[i] / count[i] for i, name in names.items()},
    }


def _on_gpu(engine: Engine, figures: Figures, lengths: Lengths, use: PowerUse | None) -> Figures:
    """Power, clocks and the fraction of Equation 5's optimum (NanoFlow §3.3), measured while the GPU is still warm."""
    flops = sustained_flops()
    # assumes that every rank's GPU is as fast as this one
    optimum = engine.config.tensor_parallel_size * flops / (2 * engine.spec.active_parameters)
    added: Figures = {
        "sustained_tflops_of_cublas": flops / 1e12,
        "optimum_tokens_per_second": optimum,
        "fraction_of_optimum": figures["total_tokens_per_second"] / optimum,
    }
    if use is not None:
        added["watts"], added["sm_megahertz"] = use.watts, use.megahertz
        added["tokens_per_joule"] = sum(a + b for a, b in lengths) / use.joules
    return added


def _then(engine: Engine, lengths: Lengths, seed: int, first_handle: int) -> Figures:
    """Run a further workload on the warm engine."""
    prompts, recorder = _prompts(lengths, engine.spec.vocab_size, seed), Recorder(0, 0)
    if engine.resolved.device.type != "cuda":
        return _run_engine(engine, prompts, lengths, recorder, first_handle)
    with PowerMonitor(gpus=engine.config.tensor_parallel_size) as monitor:
        figures = _run_engine(engine, prompts, lengths, recorder, first_handle)
    if (use := monitor.use) is not None:
        figures |= {"watts": use.watts, "sm_megahertz": use.megahertz}
        figures["tokens_per_joule"] = sum(a + b for a, b in lengths) / use.joules
    return figures


def _traced(trace: TraceFigures | None, seconds: float) -> Figures:
    if trace is None:
        return {}
    return {
        "profiler_seconds_in_the_run": seconds,
        "traced_iterations": trace.iterations,
        "traced_ms_per_iteration": trace.milliseconds,
        "traced_gpu_idle_share": trace.idle_share,
        "traced_idle_between_iterations_us_median": trace.idle_between_us[0],
        "traced_idle_between_iterations_us_max": trace.idle_between_us[1],
        "traced_idle_inside_an_iteration_us": trace.idle_inside_us,
        "ms_per_iteration": trace.ms_per_iteration,
    }


def _start(imported: float | None, engine: Engine, first_token: float) -> dict[str, float]:
    """How the seconds until the first token are spent, including its iteration."""
    before = {} if imported is None else {"imports": imported}
    total = (imported or 0.0) + engine.load_seconds + first_token
    phases = {**engine.start_seconds, "first iteration": first_token}
    rest = {"other": engine.load_seconds - sum(engine.start_seconds.values())}
    return {**before, **phases, **rest, "in all": total}


def _process_age() -> float | None:
    """Seconds since this process started, if the system reports it."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _run_transformers(engine: Engine, prompts: list[np.ndarray], lengths: Lengths, batch: int) -> Figures:
    """Run `generate` on batches of the same requests, left-padded, for as long as the longest output of a batch."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(engine.config.model_path, dtype=engine.resolved.compute_dtype)
    begin = time.perf_counter()
    with Progress(transient=True, console=Console(stderr=True)) as bar, torch.inference_mode():
        for start in bar.track(range(0, len(prompts), batch), description="transformers"):
            part = prompts[start : start + batch]
            width = max(map(len, part))
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(part):
                ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
                mask[row, width - len(prompt) :] = 1
            out = max(b for _, b in lengths[start : start + batch])
            model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=out, max_new_tokens=out, pad_token_id=0
            )
    seconds = time.perf_counter() - begin
    return {
        "transformers_seconds": seconds,
        "transformers_total_tokens_per_second": sum(a + b for a, b in lengths) / seconds,
    }


def _weight_format(spec: ModelSpec) -> str:
    if spec.native and spec.packed is not None:
        return f"packed ({spec.packed.formats})"
    return "fp8" if spec.quantization is not None else "as dtype"


def _compare_llama_cpp(
    config: EngineConfig, figures: Figures, prompts: list[np.ndarray], lengths: Lengths, batch: int
) -> Figures:  # fmt: skip
    """Run the requests with llama.cpp. Ratios by CPU time hold on a busy machine, those by the clock on an idle one."""
    threads = config.cpu_threads or max(1, len(os.sched_getaffinity(0)) - 1)  # as many as weft's runner
    made: Figures = {"llama_cpp_threads": threads}
    made |= run_llama_cpp(config.model_path, prompts, lengths, sequences=batch, threads=threads)
    names = ("total_tokens_per_second", "total_tokens_per_cpu_second")
    return made | {f"ratio_to_llama_cpp_{name}": figures[name] / made[f"llama_cpp_{name}"] for name in names}


def run_offline(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Run a workload and print throughput. All requests are queued at once, sampled greedily, and ignore end tokens."""
    lengths = read_lengths(arguments.workload, arguments.lengths, config.seed)
    further = [(spec, read_lengths(spec, None, config.seed)) for spec in arguments.then]
    if arguments.baseline and config.load_format == "dummy":
        raise ConfigError("--baseline needs real weights, not --load-format dummy")
    if arguments.baseline == "llama.cpp":
        model_file(config.model_path)  # raises early
        find_library()
    imported = _process_age()
    with ProgressBar() as bar:
        engine = Engine(config.for_measuring(), bar)
    longest = max(a + b for some in (lengths, *(more for _, more in further)) for a, b in some)
    if longest > engine.resolved.max_model_len:
        raise ConfigError(
            f"the workload's longest request has {longest} tokens, the model takes {engine.resolved.max_model_len}"
        )
    prompts = _prompts(lengths, engine.spec.vocab_size, config.seed)
    on_gpu = engine.resolved.device.type == "cuda"
    if arguments.trace and not on_gpu:
        raise ConfigError("--trace records a GPU; this engine runs on the CPU")
    recorder = Recorder(
        arguments.trace_iterations if on_gpu else 0, sum(a + b for a, b in lengths), file=arguments.trace
    )
    figures: Figures = {
        "model": config.model_name,
        "weights": f"made up, {config.dummy_weights}" if config.load_format == "dummy" else "the checkpoint's",
        "dtype": str(engine.resolved.compute_dtype).removeprefix("torch."),
        "weight_format": _weight_format(engine.spec),
        "kv_cache_dtype": str(engine.resolved.kv.dtype).removeprefix("torch."),
        "attention_backend": engine.resolved.attention,
        "workload": str(arguments.lengths or arguments.workload),
        "requests": len(lengths),
        "max_num_seqs": engine.resolved.max_num_seqs,
        "max_num_batched_tokens": engine.resolved.max_num_batched_tokens,
    }
    if on_gpu:
        with PowerMonitor(gpus=engine.config.tensor_parallel_size) as monitor:
            figures |= _run_engine(engine, prompts, lengths, recorder)
        figures |= _on_gpu(engine, figures, lengths, monitor.use)
    else:
        figures |= _run_engine(engine, prompts, lengths, recorder)
    figures |= _traced(recorder.figures(), recorder.seconds)
    figures["start_seconds"] = _start(imported, engine, figures.pop("first_token_seconds"))
    begun = len(lengths)
    for i, (spec, more) in enumerate(further):
        if arguments.json is not None:  # write the figures so far, in case a later step fails
            write_figures({**figures, **machine()}, arguments.json)
        figures[f"then {spec}"] = _then(engine, more, config.seed + 1 + i, first_handle=begun)
        begun += len(more)
    engine.close()
    if arguments.baseline == "transformers":
        torch.set_num_threads(config.cpu_threads or len(os.sched_getaffinity(0)))  # nothing else runs
        figures |= _run_transformers(engine, prompts, lengths, arguments.baseline_batch)
        figures["ratio_to_transformers"] = (
            figures["total_tokens_per_second"] / figures["transformers_total_tokens_per_second"]
        )
    if arguments.baseline == "llama.cpp":
        figures |= _compare_llama_cpp(config, figures, prompts, lengths, arguments.baseline_batch)
    report("weft bench offline", {**figures, **machine()}, arguments.json)
    return 0


def _loaded_scheduler(requests: int, page_size: int, output_tokens: int, rng: np.random.Generator) -> Scheduler:
    """A scheduler with pages for all of these requests, which arrive at once."""
    length = 1024
    max_len = length + output_tokens
    pages = requests * (-(-max_len // page_size)) + 1
    scheduler = Scheduler(
        SlotTable(requests, max_len, page_size),
        PagePool(pages, page_size, PrefixIndex("bench")),
        max_num_batched_tokens=max(requests, 2048),
        prefix_caching=True,
    )
    for i in range(requests):
        scheduler.add(
            Request(
                handle=i,
                token_ids=rng.integers(0, 1000, length).astype(np.int32),
                prompt_len=length,
                params=SamplingParams(max_tokens=output_tokens),
                max_total_tokens=max_len,
                priority=0,
                order=i,
                arrival=0.0,
                salt="",
                stop_ids=(1,),
                seed=i,
            )
        )
    return scheduler


def run_scheduler(arguments: argparse.Namespace) -> int:
    """Time scheduling, building inputs and committing for many running decodes, without a model."""
    running, page_size = arguments.running, arguments.page_size
    if not 1 <= running <= 4096:
        print(f"weft bench scheduler: --running must be 1 to 4096, not {running}", file=sys.stderr)
        return 2
    rng = np.random.default_rng(0)
    scheduler = _loaded_scheduler(running, page_size, arguments.iterations + running + 64, rng)
    step = 0
    pending: Batch | None = None
    samples = rng.integers(2, 1000, running).astype(np.int32)
    times: list[float] = []

    def commit(batch: Batch) -> None:
        scheduler.commit(StepResult(batch, samples[: len(batch.sampled_rows)], None, (), 0.0))

    while len(times) < arguments.iterations:
        step += 1
        begin = time.perf_counter()
        batch = scheduler.schedule(step)
        if pending is not None:
            commit(pending)
        if batch is not None and pending is not None and batch.num_decodes == running:
            times.append((time.perf_counter() - begin) * 1e3)
        pending = batch
    ordered = np.sort(times)
    figures: Figures = {
        "running_requests": running,
        "iterations": len(times),
        "schedule_build_commit_ms_median": float(np.median(ordered)),
        "ms_p99": float(ordered[int(0.99 * len(ordered))]),
        "ms_max": float(ordered[-1]),
    }
    report("weft bench scheduler", {**figures, **machine()}, arguments.json)
    return 0
