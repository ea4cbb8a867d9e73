"""`EngineBench`: measures one warm engine at successive slot limits, each in a steady state."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from weft import __version__
from weft.autosearch.advisor.activity import activity_of
from weft.autosearch.advisor.curve import Machine, Point, RateRun, Times
from weft.autosearch.workload import Lengths
from weft.engine.config import Objective
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.runner.options.footprint import memory_bytes
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.slot_limit_keeper import Pace
from weft.engine.wire.messages import AddRequest, EngineStats, Outputs
from weft.engine.wire.sampling import SamplingParams

SPARE = 8  # Minimum queue length, so that no slot stays free.
MIN_ITERATIONS = 30
RAMP_SECONDS = 60.0  # Maximum time to reach the steady state of a slot limit.
MAX_EXTENSION = 20.0  # Factor by which a measurement may be extended until a request has started in it.
GROWING = 0.05
"""The queue grows if the last tenth of the requests waits this share of the run longer than the first."""
STUCK = 20
"""Iterations limited by memory, not slots, after which no more requests are assumed to fit."""


class EngineBench(Listener):
    """Keeps the queue full, so that the slot limit alone sets the number of running requests.

    The first requests enter in mid-life, with some of their output already in the prompt. Their ends are then spread as
    in the steady state. A higher slot limit keeps the running requests."""

    def __init__(
        self, engine: Engine, lengths: Lengths, seconds: float, seed: int = 0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """seconds: duration of a measurement."""
        longest = max(p + d for p, d in lengths)
        if longest > engine.resolved.max_model_len:
            raise ConfigError(
                f"--workload: one request has {longest} tokens, the model allows {engine.resolved.max_model_len}"
            )
        self.engine, self._seconds = engine, seconds
        self.lengths = lengths
        self.capacity = engine.resolved.max_num_seqs
        self._rng = np.random.default_rng(seed)
        self._stop_requested = stop_requested
        self._next = 0
        self._open: dict[int, bool] = {}  # Handle -> whether it has produced a token.
        self._pace = Pace([], engine.scheduler.slots, 0.0)
        self._gaps: list[np.ndarray] = []
        self._prefill_seconds = self._busy_seconds = 0.0
        self._last: tuple[int, int] = (0, 0)
        self._activity, self._no_activity = activity_of(engine.resolved.device)
        engine.listeners.add(self)

    def machine(self) -> Machine:
        engine, described = self.engine, self.engine.describe()
        memory = described.memory
        device = engine.resolved.device
        usable = memory_bytes(device)
        if device.type == "cuda":
            import torch

            name = torch.cuda.get_device_name(device)
            usable = int(usable * engine.resolved.gpu_memory_utilization)
        else:
            name = cpu_name()
        return Machine(
            device=str(device), name=name, memory=usable, weights=memory.weights, working=memory.working,
            page_bytes=engine.resolved.kv.page_bytes, page_size=described.page_size, pages=described.num_pages - 1,
            joules=described.energy_source, no_joules=described.energy_missing, no_activity=self._no_activity,
            versions=f"weft {__version__}",
        )  # fmt: skip

    def measure(self, bound: int) -> Point:
        engine, scheduler = self.engine, self.engine.scheduler
        scheduler.limit_running(bound)
        begun = [handle for handle, has_tokens in self._open.items() if has_tokens]
        stay = spread(begun, bound)
        for handle in set(self._open) - set(stay):  # a lower limit does not end running requests
            engine.abort(handle)
            del self._open[handle]
        self._ramp(bound)
        self._gaps, self._prefill_seconds, self._busy_seconds = [], 0.0, 0.0
        if self._activity is not None:
            self._activity.begin()
        before = latest = engine.stats()
        begin = time.perf_counter()
        ttft: list[float] = []
        weighted = shares = 0.0
        most, at, finished = 0, begin, 0
        while True:
            outputs = self._step(bound)
            now = time.perf_counter()
            if outputs is not None:
                latest = outputs.stats
            stats = latest.scheduler
            weighted += (now - at) * stats.running
            shares += (now - at) * stats.pages_held / stats.pages_total
            most, at = max(most, stats.pages_held), now
            if outputs is not None:
                ttft += [started.prefill_seconds for started in outputs.started]
                finished += int(np.count_nonzero(outputs.columns()[2]))
            elapsed = now - begin
            iterations = latest.iterations - before.iterations
            # as many requests end as run, so that every phase of a request is represented
            enough = elapsed >= self._seconds and iterations >= MIN_ITERATIONS and finished >= stats.running
            long = elapsed >= 4 * self._seconds and (ttft or elapsed >= MAX_EXTENSION * self._seconds)
            if enough or long or self._stop_requested():
                break
        activity = self._activity.end() if self._activity is not None else None
        after = engine.stats()
        tokens = after.scheduler.generation_tokens - before.scheduler.generation_tokens
        dram, sm, warps = activity or (None, None, None)
        return Point(
            bound=bound, batch=weighted / elapsed, seconds=elapsed, iterations=after.iterations - before.iterations,
            output_per_s=tokens / elapsed, itl=Times.of(np.concatenate([np.zeros(0), *self._gaps])),
            ttft=Times.of(np.array(ttft)), kv_pages=most, kv_share=shares / elapsed,
            idle_share=max(0.0, after.iterations_idle_seconds - before.iterations_idle_seconds) / elapsed,
            prefill_share=self._prefill_seconds / max(self._busy_seconds, 1e-9),
            joules_per_token=_joules(before, after, tokens), dram_share=dram, sm_share=sm, warps_share=warps,
        )  # fmt: skip

    def serve(self, bound: int, rate: float, seed: int, seconds: float, objectives: Sequence[Objective]) -> RateRun:
        """Serve Poisson arrivals for `seconds` on an idle engine, until all have a first token."""
        self.drop()
        engine, rng = self.engine, np.random.default_rng((seed, 11))
        engine.scheduler.limit_running(bound)
        due = np.cumsum(rng.exponential(1 / rate, max(8, int(2 * rate * seconds) + 8)))
        due = due[due < seconds] if due[0] < seconds else due[:1]
        self._gaps = []
        waiting: dict[int, float] = {}
        ttft: list[float] = []
        sent, begin = 0, time.perf_counter()
        hopeless = False
        while sent < len(due) or waiting:
            now = time.perf_counter() - begin
            while sent < len(due) and due[sent] <= now:
                waiting[self._next] = float(due[sent])
                self._add(*self.lengths[int(rng.integers(len(self.lengths)))])
                sent += 1
            if not engine.has_work:
                time.sleep(min(0.001, max(0.0, due[sent] - now)))
                continue
            outputs = self._advance()
            now = time.perf_counter() - begin
            for started in outputs.started if outputs is not None else ():
                if (at := waiting.pop(started.handle, None)) is not None:
                    ttft.append(now - at)
            hopeless = _hopeless(ttft, [now - at for at in waiting.values()], len(due), objectives)
            if hopeless or self._stop_requested():
                break
        first = np.array(ttft)
        times = {"ttft": Times.of(first), "itl": Times.of(np.concatenate([np.zeros(0), *self._gaps]))}
        late = any(times[o.measure].at(o.statistic) > o.limit for o in objectives)
        # a rate at which the queue grows cannot be advised
        tenth = max(1, len(first) // 10)
        growing = len(first) > bound and first[-tenth:].mean() - first[:tenth].mean() > GROWING * seconds
        self.drop()
        return RateRun(
            bound=bound, rate=rate, seconds=seconds, seed=seed, objectives=tuple(map(str, objectives)),
            kept=not (hopeless or late or growing), requests=len(first), **times,
        )  # fmt: skip

    def ready(self, bound: int) -> None:
        """Reach the steady state of a slot limit."""
        self.engine.scheduler.limit_running(bound)
        self._ramp(bound)

    def run(self, bound: int) -> None:
        """Run one iteration without measuring."""
        self._step(bound)
        self._gaps.clear()

    def drop(self) -> None:
        """Abort all requests."""
        for handle in self._open:
            self.engine.abort(handle)
        self._open.clear()
        while self.engine.has_work:
            self.engine.step()

    def close(self) -> None:
        """Detach from the engine, which stays open."""
        self.drop()
        self.engine.listeners.remove(self)

    def _ramp(self, bound: int) -> None:
        """Run until as many requests as possible are running and have a first token."""
        scheduler = self.engine.scheduler
        missing = bound - len(self._open)
        for _ in range(missing):
            prompt, output = self._draw()
            lived = int(self._rng.integers(0, output))
            self._add(prompt + lived, output - lived)
        until, stuck = time.perf_counter() + RAMP_SECONDS, 0
        while time.perf_counter() < until and not self._stop_requested():
            self._step(bound)
            stuck = stuck + 1 if scheduler.num_running < bound and not scheduler.short_of_slots else 0
            begun = sum(self._open.values())
            if begun >= 0.95 * bound or (stuck >= STUCK and begun >= 0.95 * scheduler.num_running):
                return

    def _step(self, bound: int) -> Outputs | None:
        """Run one iteration with a full queue."""
        while len(self._open) < bound + SPARE + bound // 8:
            self._add(*self._draw())
        return self._advance()

    def _advance(self) -> Outputs | None:
        outputs = self.engine.step()
        if outputs is None:
            return None
        for started in outputs.started:
            if started.handle in self._open:
                self._open[started.handle] = True
        handles, _, finish = outputs.columns()
        for handle in handles[np.flatnonzero(finish)].tolist():
            self._open.pop(handle, None)
        seconds, tokens = outputs.stats.iteration.seconds, max(1, self._last[0])
        self._busy_seconds += seconds
        self._prefill_seconds += seconds * self._last[1] / tokens
        return outputs

    def on_result(self, result: StepResult, now: float) -> None:
        batch = result.batch
        self._gaps.append(self._pace.committed(batch, now))
        self._last = batch.num_tokens, batch.num_tokens - batch.num_decodes

    def _draw(self) -> tuple[int, int]:
        prompt, output = self.lengths[int(self._rng.integers(len(self.lengths)))]
        return prompt, output

    def _add(self, prompt: int, output: int) -> None:
        handle, self._next = self._next, self._next + 1
        ids = self._rng.integers(0, self.engine.spec.vocab_size, prompt).astype(np.int32)
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self._open[handle] = False
        self.engine.add(AddRequest(handle=handle, prompt_token_ids=ids.tobytes(), params=params))


def spread(handles: Sequence[int], number: int) -> list[int]:
    """Pick `number` handles of all ages. The oldest alone would end together, and so would their successors."""
    if len(handles) <= number:
        return list(handles)
    return [handles[i * len(handles) // number] for i in range(number)]


def _hopeless(ttft: list[float], waits: list[float], number: int, objectives: Sequence[Objective]) -> bool:
    """Whether the run is sure to miss a percentile of the time to first token. number: all requests."""
    for objective in objectives:
        if objective.measure == "ttft" and objective.statistic is not None:
            late = sum(t > objective.limit for t in ttft) + sum(t > objective.limit for t in waits)
            if late > (1 - objective.statistic / 100) * number + 1:
                return True
    return False


def _joules(before: EngineStats, after: EngineStats, tokens: int) -> float | None:
    if before.energy is None or after.energy is None or tokens <= 0:
        return None
    joules = after.energy.joules - before.energy.joules
    return joules / tokens if math.isfinite(joules) and joules > 0 else None


def means(lengths: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return mean (prompt, output) tokens per request."""
    return float(np.mean([p for p, _ in lengths])), float(np.mean([d for _, d in lengths]))


def cpu_name() -> str:
    """The processor's model name, or its architecture if the system names no model."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
