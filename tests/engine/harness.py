"""Drives an `Engine` in a test: submits, steps, checks the invariants of docs/design.md after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.scheduling.admission import OutputLengths
from weft.engine.wire.messages import AddRequest, Finish, Image, Outputs, TokenLogprobs
from weft.engine.wire.sampling import SamplingParams
from weft.engine.wire.weight_exchange import WeightExchange

GREEDY = {"temperature": 0.0}


class Harness:
    """An engine with all of its output, by handle."""

    def __init__(self, model: Any, exchange: WeightExchange | None = None, **options: Any) -> None:
        config = EngineConfig(model=str(model), **{"dtype": "float32", "wait_for_plan": True, **options})
        self.engine = Engine(config, exchange=exchange)
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.pooled: dict[int, np.ndarray] = {}
        self.steps = 0

    def add(
        self, prompt: Sequence[int] | np.ndarray, salt: str = "", priority: int = 0, adapter: str = "",
        images: Sequence[Image] = (), tenant: int = 0, max_drafts: int | None = None,
        prediction: Sequence[int] = (), **params: Any,
    ) -> int:  # fmt: skip
        handle = len(self.tokens)
        self.engine.add(
            AddRequest(
                handle=handle,
                prompt_token_ids=np.asarray(prompt, np.int32).tobytes(),
                params=SamplingParams(**{"max_tokens": 16, **params}),
                cache_salt=salt,
                priority=priority,
                adapter=adapter,
                images=tuple(images),
                tenant=tenant,
                max_drafts=max_drafts,
                prediction=np.asarray(prediction, np.int32).tobytes(),
            )
        )
        self.tokens[handle] = []
        self.logprobs[handle] = []
        self.prompt_logprobs[handle] = []
        return handle

    def step(self) -> Outputs | None:
        outputs = self.engine.step()
        self.steps += 1
        self.engine.scheduler.check()
        if outputs is None:
            return None
        for handle, token, reason in zip(*(c.tolist() for c in outputs.columns()), strict=True):
            assert handle not in self.finish, "an event after the terminal one"
            if token >= 0:
                self.tokens[handle].append(token)
            if reason:
                self.finish[handle] = Finish(reason)
        for started in outputs.started:
            assert started.handle not in self.cached, "started twice"
            self.cached[started.handle] = started.cached_tokens
        for handle, entries in outputs.logprobs.items():
            self.logprobs[handle] += entries
        for handle, entries in outputs.prompt_logprobs.items():
            self.prompt_logprobs[handle] += entries
        for handle, state in outputs.pooled.items():
            self.pooled[handle] = np.frombuffer(state, np.float32)
        return outputs

    def run(self, each_step: Callable[[int], None] = lambda _: None) -> None:
        """Step until no request is left, then check that nothing is still held."""
        while self.engine.has_work:
            self.step()
            each_step(self.steps)
            assert self.steps < 20_000, "the engine makes no progress"
        self.engine.drain_in_flight()
        scheduler = self.engine.scheduler
        scheduler.check()
        assert scheduler.pool.num_held == 0
        assert not len(scheduler.fences)
        assert set(self.finish) == set(self.tokens), "a request without its terminal event"

    def expect_short_outputs(self) -> None:
        """Make admission expect tiny outputs, so that it admits too many requests and must preempt."""
        self.engine.scheduler.output_lengths = OutputLengths(mean=0.0, weight=1e9)

    def poison_pages(self) -> None:
        """Fill every page with NaN: nothing may read what it did not write."""
        with torch.inference_mode():
            self.engine.runner.kv[1:] = float("nan")
