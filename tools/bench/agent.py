"""`weft bench agent`: a long conversation like a coding agent's, and what its turns find in each KV tier."""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import numpy as np

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError
from weft.engine.memory.transfer import GIB
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
from weft.tools.bench.offline import Figures, machine, report

SINK_SECONDS = 60.0


class _Turn(NamedTuple):
    """The figures of one turn."""

    prompt: int
    cached: int
    output: list[int]
    ttft: float
    """Time to the first token in seconds."""


class _Agent:
    """Sends the full conversation with every turn. Tokens are random; an answer is part of the next prompt."""

    def __init__(self, engine: Engine, seed: int, output_tokens: int) -> None:
        self.engine = engine
        self.history = np.zeros(0, np.int32)
        self.turns: list[_Turn] = []
        self._rng = np.random.default_rng(seed)
        self._output = output_tokens
        self._name = seed.to_bytes(16)

    def ask(self, new_tokens: int) -> _Turn:
        """Run one turn with `new_tokens` new prompt tokens, alone in the engine."""
        engine = self.engine
        new = self._rng.integers(0, engine.spec.vocab_size, new_tokens).astype(np.int32)
        prompt = np.concatenate((self.history, new))
        params = SamplingParams(max_tokens=self._output, temperature=0.0, ignore_eos=True)
        begin = time.perf_counter()
        message = AddRequest(
            handle=len(self.turns), prompt_token_ids=prompt.tobytes(), params=params, names=(self._name,)
        )
        engine.add(message)
        output: list[int] = []
        ttft, cached = 0.0, 0
        while engine.has_work:
            outputs = engine.step()
            if outputs is None:
                continue
            for started in outputs.started:
                ttft, cached = time.perf_counter() - begin, started.cached_tokens
            output += [token for token in outputs.columns()[1].tolist() if token >= 0]
        engine.drain_in_flight()
        self.history = np.concatenate((prompt, np.array(output, np.int32)))
        self.turns.append(_Turn(len(prompt), cached, output, ttft))
        return self.turns[-1]

    def announce(self) -> None:
        """Announce the next turn to the engine and wait until its pages are loaded."""
        self.engine.prefetch((self._name,))
        while self.engine.tiers is not None and self.engine.tiers.num_loading:
            self.engine.step()


def found_share(turns: list[_Turn]) -> float:
    """The share of tokens found in a cache, of those that turns after the first had sent or received before."""
    seen = sum(before.prompt + len(before.output) for before in turns[:-1])
    return sum(turn.cached for turn in turns[1:]) / seen


def run_agent(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Run one conversation, then turns of it whose prefix lies in each lower tier; print hits and first tokens."""
    context, turns, new, output = (
        arguments.context_tokens, arguments.turns, arguments.turn_tokens, arguments.output_tokens,
    )  # fmt: skip
    if min(context, new, output, arguments.restores) < 1 or turns < 2:
        raise ConfigError("--turns must be at least 2; --context-tokens, --turn-tokens, --output-tokens, --restores 1")
    tiers = ("host", "ssd")[: (config.host_kv_gib > 0) + (config.ssd_kv_path is not None)]
    engine = Engine(config.for_measuring())
    longest = context + (turns + len(tiers) * (arguments.restores + 1)) * (new + output)
    if longest > engine.resolved.max_model_len:
        engine.close()
        raise ConfigError(
            f"the conversation grows to {longest} tokens, a request takes {engine.resolved.max_model_len}: "
            "lower --context-tokens, or raise --max-model-len or the KV pool"
        )
    # The first iteration of a kind pays for compilation, which belongs to no turn.
    warm = _Agent(engine, config.seed + 1, output)
    for _ in range(3):
        warm.ask(new)
    engine.reset_prefix_cache()
    agent = _Agent(engine, config.seed, output)
    agent.ask(context)
    for _ in range(turns - 1):
        agent.ask(new)
    later = [turn.ttft for turn in agent.turns[1:]]
    figures: Figures = {
        "model": config.model_name,
        "dtype": str(engine.resolved.compute_dtype).removeprefix("torch."),
        "workload": f"{turns} turns over {context} tokens, {new} new ones and {output} out each",
        "gpu_pool_gib": engine.runner.num_pages * engine.resolved.kv.page_bytes / GIB,
        "host_pool_gib": config.host_kv_gib,
        "found_share_of_tokens_seen": found_share(agent.turns),
        "ttft_ms_first_turn": 1e3 * agent.turns[0].ttft,
        "ttft_ms_second_turn": 1e3 * agent.turns[1].ttft,
        "ttft_ms_later_turns_median": 1e3 * float(np.median(later)),
        "ttft_ms_later_turns_max": 1e3 * max(later),
    }
    for tier in tiers:
        if tier == "ssd" and (engine.tiers is None or engine.tiers.ssd.store is None):
            break  # the engine has logged why
        figures |= _restored(agent, tier, arguments.restores, new)
    if engine.tiers is not None:
        figures |= {
            f"{tier}_gb_per_second": speed / 1e9 for tier, speed in engine.tiers.speeds.bytes_per_second.items()
        }
    engine.close()
    report("weft bench agent", {**figures, **machine()}, arguments.json)
    return 0


def _restored(agent: _Agent, tier: str, turns: int, new_tokens: int) -> Figures:
    """Figures of turns whose prefix is in this tier alone, and of one announced turn."""
    restored = []
    for _ in range(turns):
        _sink(agent.engine, tier)
        restored.append(agent.ask(new_tokens))
    _sink(agent.engine, tier)
    agent.announce()
    announced = agent.ask(new_tokens)
    return {
        f"{tier}_found_share_of_tokens_seen": found_share(agent.turns[-turns - 2 :]),
        f"{tier}_ttft_ms_first": 1e3 * restored[0].ttft,
        f"{tier}_ttft_ms_median": 1e3 * float(np.median([turn.ttft for turn in restored])),
        f"{tier}_ttft_ms_announced": 1e3 * announced.ttft,
        f"{tier}_pages_fetched_ahead": agent.engine.stats().scheduler.tiers[tier].prefetched,
    }


def _sink(engine: Engine, tier: str) -> None:
    """Move the pages to a lower tier, so that no other tier has them."""
    tiers = engine.tiers
    assert tiers is not None
    if tier == "host":
        tiers.drain()
        engine.scheduler.pool.evict_all()
    else:
        tiers.sink(SINK_SECONDS)
