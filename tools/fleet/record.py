"""`weft bench iterations`: times the iterations of an engine in this process under many loads and fits a profile.

Each load keeps a number of requests running, from one to the engine's limit, while prompts of all lengths arrive. All
loads get the same time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from weft import unwritable
from weft.deploy.fleet.profile import Energy, Features, IterationProfile, Limits
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError, WeftError
from weft.engine.progress import ProgressBar
from weft.engine.runner.device.energy_meter import EnergyMeter, energy_counter
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
from weft.tools.bench.offline import machine
from weft.tools.fleet.fit import fit, knots_for, nonnegative

REST_SECONDS = 3.0
"""Seconds to measure the idle power, if there is an energy counter."""
WARM_UP = 8
"""Iterations that are discarded."""


class Row(NamedTuple):
    features: Features
    seconds: float
    idle_seconds: float
    host_seconds: float
    requests: int


class Recorder:
    """Drives an engine and records its iterations."""

    def __init__(self, engine: Engine, *, processor_time: bool, seed: int) -> None:
        self.rows: list[Row] = []
        self._engine = engine
        self._rng = np.random.default_rng(seed)
        self._handles = 0
        self._open: set[int] = set()
        self._results: list[StepResult] = []
        self._clock = time.process_time if processor_time else time.perf_counter
        commit = engine.scheduler.commit

        def seen(result: StepResult) -> Any:
            self._results.append(result)
            return commit(result)

        engine.scheduler.commit = seen  # type: ignore[method-assign]
        if processor_time:
            runner: Any = engine.runner
            runner.run = in_processor_time(runner.run)

    def level(self, running: int, seconds: float) -> None:
        """Keep `running` requests running for `seconds`."""
        engine, end = self._engine, self._clock() + seconds
        while self._clock() < end:
            while len(self._open) < running:
                self._send()
            self._step()
        for handle in list(self._open):
            engine.abort(handle)
        while engine.has_work:
            self._step()

    def _send(self) -> None:
        engine, rng = self._engine, self._rng
        longest = engine.resolved.max_model_len
        room = min(longest, (engine.runner.num_pages - 1) * engine.config.page_size)
        most = max(2, min(room // 2, 2 * engine.resolved.max_num_batched_tokens))
        prompt = int(np.exp(rng.uniform(np.log(8), np.log(max(9, most)))))
        # Answers are long enough that most iterations decode, and short enough that prompts keep arriving.
        output = int(rng.integers(8, max(9, min(room - prompt, 96))))
        self._handles += 1
        self._open.add(self._handles)
        engine.add(
            AddRequest(
                handle=self._handles,
                prompt_token_ids=rng.integers(0, engine.spec.vocab_size, prompt).astype(np.int32).tobytes(),
                params=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
            )
        )

    def _step(self) -> None:
        outputs = self._engine.step()
        if outputs is None:
            return
        handles, _, finish = outputs.columns()
        self._open.difference_update(handles[np.flatnonzero(finish)].tolist())
        results, self._results = self._results, []
        for result in results:
            stats = outputs.stats.iteration
            self.rows.append(
                Row(
                    Features.of(result.batch),
                    result.seconds,
                    result.idle_seconds,
                    stats.schedule_seconds,
                    stats.requests,
                )
            )


def in_processor_time(run: Callable[[Batch], StepResult]) -> Callable[[Batch], StepResult]:
    """Time iterations by their thread's processor time instead of the clock."""

    def timed(batch: Batch) -> StepResult:
        begin = time.thread_time()
        result = run(batch)
        return result._replace(seconds=time.thread_time() - begin, idle_seconds=0.0)

    return timed


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Record, fit, write the profile, and print the error of the fit."""
    config = config.model_copy(update={"prefix_caching": False})
    with ProgressBar() as bar:
        engine = Engine(config.for_measuring(), bar)
    cpu = engine.resolved.device.type == "cpu"
    threads = engine.resolved.cpu_threads if cpu else 0
    if arguments.processor_time and threads != 1:
        raise ConfigError("--processor-time goes with --device cpu and --cpu-threads 1")
    recorder = Recorder(engine, processor_time=arguments.processor_time, seed=config.seed)
    counter = _counter(engine)
    rest_watts = _rest_watts(counter)
    readings: list[tuple[int, float]] = []
    running = levels(engine)
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("recording", total=len(running))
        for requests in running:
            recorder.level(requests, arguments.seconds / len(running))
            if counter is not None:
                readings.append((len(recorder.rows), counter.latest.joules))
            progress.advance(task)
    limits = limits_of(engine)
    dtype = str(engine.resolved.compute_dtype).removeprefix("torch.")
    engine.close()
    rows = recorder.rows[WARM_UP:]
    profile = fitted(rows, limits, model=f"{config.model_name}, {dtype}", threads=threads)
    if counter is not None:
        profile = _with_energy(profile, recorder.rows, readings, rest_watts)
        counter.close()
    if arguments.server is not None:
        from weft.tools.fleet.overhead import measure

        profile = measure(arguments.server, profile).put_into(profile)
    try:
        profile.save(arguments.out)
    except OSError as error:
        raise WeftError(unwritable(arguments.out, error)) from None
    e = profile.error
    assert e is not None
    print(
        f"{arguments.out}: {e.iterations} iterations; the fit is off by {e.median:.1%} in the median, {e.p90:.1%} at "
        f"the 90th percentile, {e.total:+.1%} in all"
    )
    return 0


def limits_of(engine: Engine) -> Limits:
    return Limits(
        page_size=engine.config.page_size,
        num_pages=engine.runner.num_pages,
        max_num_seqs=engine.resolved.max_num_seqs,
        max_num_batched_tokens=engine.resolved.max_num_batched_tokens,
        max_model_len=engine.resolved.max_model_len,
        state_pages=engine.resolved.states.pages,
        chunk_step=engine.resolved.chunk_step(engine.spec),
    )


def levels(engine: Engine) -> list[int]:
    """Numbers of running requests: powers of two and the engine's limit."""
    most = engine.resolved.max_num_seqs
    return sorted({1, most, *(1 << i for i in range(1, 12) if 1 << i < most)})


def fitted(rows: list[Row], limits: Limits, *, model: str, threads: int) -> IterationProfile:
    """The fitted profile. Raises `ConfigError` if there are too few iterations."""
    if len(rows) < 50:
        raise ConfigError(f"only {len(rows)} iterations were recorded: raise --seconds")
    features = [row.features for row in rows]
    knots = knots_for(features)
    found = fit(features, [row.seconds for row in rows], knots)
    requests = np.array([row.requests for row in rows], np.float64)
    host = nonnegative(np.stack((np.ones(len(rows)), requests), 1), np.array([row.host_seconds for row in rows]) * 1e3)
    about = machine()
    return IterationProfile(
        model=model,
        device=str(about.get("gpu") or f"{about['cpu']}, {threads} threads"),
        made=f"weft bench iterations, torch {about['torch']}, {about['date']}",
        limits=limits,
        knots=knots,
        dense_ms=found.dense_ms,
        context_ms=found.rest[0],
        pair_ms=found.rest[1],
        chunk_ms=found.rest[2],
        decode_ms=found.rest[3],
        gap_ms=1e3 * float(np.median([row.idle_seconds for row in rows])),
        host_ms=float(host[0]),
        host_request_ms=float(host[1]),
        threads=threads,
        error=found.error,
    )


def _replace(profile: IterationProfile, **changes: Any) -> IterationProfile:
    from msgspec.structs import replace

    return replace(profile, **changes)


# -- energy


def _counter(engine: Engine) -> EnergyMeter | None:
    try:
        return EnergyMeter(energy_counter(engine.resolved.device))
    except (OSError, ValueError, ImportError):
        return None


def _rest_watts(counter: EnergyMeter | None) -> float:
    if counter is None:
        return 0.0
    begin = counter.latest
    time.sleep(REST_SECONDS)
    end = counter.latest
    return (end.joules - begin.joules) / max(end.time - begin.time, 1e-9)


def _with_energy(
    profile: IterationProfile, rows: list[Row], readings: list[tuple[int, float]], rest_watts: float
) -> IterationProfile:
    """Add the energy above idle power, fitted over levels. readings: (rows so far, the counter's joules)."""
    columns, joules = [], []
    for (first, before), (last, after) in pairwise(readings):
        part = rows[first:last]
        seconds = sum(row.seconds + row.idle_seconds for row in part)
        columns.append(
            [
                float(len(part)),
                float(sum(row.features.tokens for row in part)),
                float(sum(row.features.context for row in part)),
                float(sum(row.features.pairs for row in part)),
            ]
        )
        joules.append(max(0.0, after - before - rest_watts * seconds))
    parts = nonnegative(np.array(columns), np.array(joules)) if len(columns) > 1 else np.zeros(4)
    a, b, c, d = (float(x) for x in parts)
    return _replace(profile, energy=Energy(rest_watts, a, b, c, d))
