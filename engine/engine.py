"""`Engine`: a plain synchronous object: `add`, `abort`, `step() -> Outputs`. Tokens in, tokens out.

The engine process, the offline `LLM` and the benchmarks all drive this one.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from weft.engine.config import EngineConfig
from weft.engine.device import resolve
from weft.engine.errors import OutOfMemory, RequestError
from weft.engine.events import Events
from weft.engine.messages import AddRequest, EngineReady, EngineStats, Finish, Outputs
from weft.engine.pages import PagePool
from weft.engine.prefix import PrefixIndex
from weft.engine.request import Request, check_request
from weft.engine.runner import InFlight, Runner, make_runner
from weft.engine.scheduler import Scheduler
from weft.engine.slots import SlotTable
from weft.engine.spec import read_spec
from weft.engine.weights import Progress, Weights, load_weights


class Engine:
    """Loads the model and serves requests one iteration at a time.

    Raises `WeftError` from the constructor when the model or the options cannot work, each with one clear line.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        begin = time.perf_counter()
        self.config = config
        self.spec = read_spec(config.model_path)
        plan = resolve(config, self.spec)

        def load() -> Weights:
            torch.set_num_threads(plan.cpu_threads)
            return load_weights(
                self.spec,
                config.model_path,
                device=plan.device,
                dtype=plan.dtype,
                max_positions=plan.max_model_len,
                dummy_seed=config.seed if config.load_format == "dummy" else None,
                progress=progress,
            )

        # In a thread that ends: a team of OpenMP threads left behind here would slow the runner's (see CpuRunner).
        try:
            with ThreadPoolExecutor(1) as loader:
                weights = loader.submit(load).result()
            self.runner: Runner = make_runner(self.spec, weights, plan)
        except torch.OutOfMemoryError:
            raise OutOfMemory(
                "the model and its buffers do not fit the GPU: use a smaller model, "
                "or lower --max-num-seqs or --max-num-batched-tokens"
            ) from None
        num_pages = self.runner.num_pages
        # A request that can never fit is refused at the door: the context limit is what the pool can hold.
        longest = min(plan.max_model_len, (num_pages - 1) * config.page_size)
        self.plan = plan = replace(plan, num_pages=num_pages, max_model_len=longest)
        self.scheduler = Scheduler(
            SlotTable(plan.max_num_seqs, plan.max_model_len, config.page_size),
            PagePool(num_pages, config.page_size, PrefixIndex(f"{config.model_path}|{plan.dtype}")),
            max_num_batched_tokens=plan.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
        )
        self._depth = 1 if config.async_scheduling else 0
        self._in_flight: deque[InFlight] = deque()
        self._step = 0
        self._arrivals = 0
        self._refused: list[tuple[int, str]] = []
        self._seeds = np.random.default_rng(config.seed)
        self._iterations = 0
        self._last: EngineStats = EngineStats()
        self.load_seconds = time.perf_counter() - begin

    def describe(self) -> EngineReady:
        plan = self.plan
        return EngineReady(
            model_type=self.spec.architecture,
            num_parameters=self.spec.num_parameters,
            dtype=str(plan.dtype).removeprefix("torch."),
            device=str(plan.device),
            vocab_size=self.spec.vocab_size,
            max_model_len=plan.max_model_len,
            page_size=self.config.page_size,
            num_pages=self.runner.num_pages,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            eos_token_ids=self.spec.eos_token_ids,
            load_seconds=self.load_seconds,
        )

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises `RequestError` when it can never be served."""
        params = message.params
        tokens = np.frombuffer(message.prompt, np.int32)
        limit = check_request(
            tokens,
            params,
            max_model_len=self.plan.max_model_len,
            vocab_size=self.spec.vocab_size,
            max_tokens_in_pool=self.scheduler.pool.capacity * self.config.page_size,
        )
        eos = () if params.ignore_eos else self.spec.eos_token_ids
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        self._arrivals += 1
        self.scheduler.add(
            Request(
                handle=message.handle,
                tokens=tokens,
                prompt_len=len(tokens),
                params=params,
                limit=limit,
                priority=message.priority,
                order=self._arrivals,
                arrival=time.monotonic(),
                salt=message.cache_salt,
                stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
                seed=seed % 2**64,
            )
        )

    def add_or_refuse(self, message: AddRequest) -> None:
        """As `add`, but a refusal becomes the request's terminal event."""
        try:
            self.add(message)
        except RequestError as error:
            self._refused.append((message.handle, str(error)))

    def abort(self, handle: int) -> None:
        """End a request early. Idempotent; unknown handles are ignored."""
        self.scheduler.abort(handle)

    def reset_prefix_cache(self) -> None:
        self.scheduler.pool.reset_index()

    @property
    def has_work(self) -> bool:
        """Requests are open, results are in flight, or events wait to be told."""
        s = self.scheduler
        return bool(s.num_requests or self._in_flight or s.has_events() or self._refused)

    def step(self) -> Outputs | None:
        """Schedule and launch the next iteration, then commit the one before it. None when there is nothing to tell."""
        begin = time.perf_counter()
        batch = self.scheduler.schedule(self._step + 1)
        if batch is not None:
            self._step += 1
            self._in_flight.append(self.runner.launch(batch))
        busy = time.perf_counter() - begin
        if not self._in_flight or (batch is not None and len(self._in_flight) <= self._depth):
            if self.scheduler.has_events() or self._refused:
                return self._outputs(self.scheduler.idle_events(), self.stats())
            return None
        result = self._in_flight.popleft().wait()
        begin = time.perf_counter()
        events = self.scheduler.commit(result)
        self._iterations += 1
        self._last = EngineStats(
            iteration_tokens=result.batch.num_tokens,
            iteration_requests=result.batch.num_requests,
            iteration_seconds=result.seconds,
            iteration_idle_seconds=result.idle_seconds,
            schedule_seconds=busy + time.perf_counter() - begin,
        )
        return self._outputs(events, self.stats())

    def stats(self) -> EngineStats:
        """The scheduler's state and the last committed iteration's figures."""
        s, last = self.scheduler.stats(), self._last
        return EngineStats(
            **{f: getattr(s, f) for f in s.__struct_fields__ if not f.startswith(("iteration", "schedule"))},
            iterations=self._iterations,
            iteration_tokens=last.iteration_tokens,
            iteration_requests=last.iteration_requests,
            iteration_seconds=last.iteration_seconds,
            iteration_idle_seconds=last.iteration_idle_seconds,
            schedule_seconds=last.schedule_seconds,
        )

    def _outputs(self, events: Events, stats: EngineStats) -> Outputs:
        refused, self._refused = self._refused, []
        events = events.ended([handle for handle, _ in refused], Finish.ERROR)
        return Outputs(
            handles=events.handles.astype(np.int64).tobytes(),
            tokens=events.tokens.astype(np.int32).tobytes(),
            finish=events.finish.astype(np.uint8).tobytes(),
            started=events.started,
            logprobs=events.logprobs,
            prompt_logprobs=events.prompt_logprobs,
            errors=dict(refused),
            stats=stats,
        )

    def drain_in_flight(self) -> None:
        """Commit what is still in flight although nobody waits for it, so that its fences pass."""
        while self._in_flight:
            self.scheduler.commit(self._in_flight.popleft().wait())

    def close(self) -> None:
        self.runner.close()
