"""`weft bench multiround`: conversations of several rounds that do not fit the GPU, with and without tiers below it."""

from __future__ import annotations

import argparse
import copy
import time

import numpy as np

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError
from weft.engine.memory.transfer import GIB
from weft.engine.wire.messages import AddRequest, EngineStats
from weft.engine.wire.sampling import SamplingParams
from weft.tools.bench.offline import Figures, machine, report

OVERCOMMIT = 3.0
"""Default size of the conversations after their last round, as a multiple of the KV pool on the GPU."""
WARM_UP_CONVERSATIONS, WARM_UP_ROUNDS = 16, 2
RESTORES = 5
SINK_SECONDS = 60.0


class _Driver:
    """Conversations in a closed loop: each sends its next turn, with its full history, after an answer."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self._rng = np.random.default_rng(seed)
        self._handle = 0

    def send(self, tokens: np.ndarray, output_tokens: int) -> int:
        self._handle += 1
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        prompt = tokens.astype(np.int32).tobytes()
        self.engine.add(AddRequest(handle=self._handle, prompt_token_ids=prompt, params=params))
        return self._handle

    def tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self.engine.spec.vocab_size, count).astype(np.int32)

    def converse(self, conversations: int, rounds: int, turn: int, output: int) -> Figures:
        open_turns: dict[int, int] = {}
        history = [self.tokens(turn) for _ in range(conversations)]
        done = [0] * conversations
        sent: dict[int, float] = {}
        first_token: list[list[float]] = [[] for _ in range(rounds)]
        prompt_tokens = cached_tokens = 0
        before = copy.deepcopy(self.engine.stats())
        begin = time.perf_counter()
        for i, tokens in enumerate(history):
            open_turns[handle := self.send(tokens, output)] = i
            sent[handle] = begin
            prompt_tokens += len(tokens)
        answers: dict[int, list[int]] = {handle: [] for handle in open_turns}
        while self.engine.has_work:
            outputs = self.engine.step()
            if outputs is None:
                continue
            now = time.perf_counter()
            for started in outputs.started:
                cached_tokens += started.cached_tokens
                first_token[done[open_turns[started.handle]]].append(now - sent[started.handle])
            for handle, token, finish in zip(*(c.tolist() for c in outputs.columns()), strict=True):
                answers[handle].append(token)
                if not finish:
                    continue
                i = open_turns.pop(handle)
                done[i] += 1
                if done[i] == rounds:
                    continue
                said = np.array(answers.pop(handle), np.int32)
                history[i] = np.concatenate((history[i], said, self.tokens(turn)))
                open_turns[handle := self.send(history[i], output)] = i
                answers[handle], sent[handle] = [], now
                prompt_tokens += len(history[i])
        seconds = time.perf_counter() - begin
        self.engine.drain_in_flight()
        total = prompt_tokens + conversations * rounds * output
        stats = self.engine.stats()
        iterations = stats.iterations - before.iterations
        end, was = stats.scheduler, before.scheduler
        prefilled, decoded = end.prefill_tokens - was.prefill_tokens, end.decode_tokens - was.decode_tokens
        return {
            "seconds": seconds,
            "total_tokens_per_second": total / seconds,
            "prompt_tokens": prompt_tokens,
            "cached_share_of_prompt_tokens": cached_tokens / prompt_tokens,
            "computed_prompt_tokens": prefilled,
            "iterations": iterations,
            "mean_tokens_of_an_iteration": (prefilled + decoded) / max(1, iterations),
            "mean_ttft_s_of_the_first_round": float(np.mean(first_token[0])),
            "mean_ttft_s_of_the_last_round": float(np.mean(first_token[-1])),
            "preemptions": end.preemptions - was.preemptions,
            **_tier_figures(self.engine, before),
        }

    def first_token_seconds(self, tokens: np.ndarray) -> tuple[float, int]:
        """Seconds to the first token and cached tokens of a request that runs alone."""
        begin = time.perf_counter()
        handle = self.send(tokens, 2)
        seconds, cached = 0.0, 0
        while self.engine.has_work:
            outputs = self.engine.step()
            for started in outputs.started if outputs is not None else ():
                if started.handle == handle:
                    seconds, cached = time.perf_counter() - begin, started.cached_tokens
        self.engine.drain_in_flight()
        return seconds, cached


def _tier_figures(engine: Engine, before: EngineStats) -> Figures:
    figures: Figures = {}
    if engine.tiers is None:
        return figures
    for name, stats in engine.stats().scheduler.tiers.items():
        was = before.scheduler.tiers[name]
        figures[f"{name}_hit_tokens"] = stats.hit_tokens - was.hit_tokens
        figures[f"{name}_evicted_pages"] = stats.evictions - was.evictions
        if name != "gpu":
            figures[f"{name}_gb_in"] = (stats.bytes_in - was.bytes_in) / 1e9
            figures[f"{name}_gb_out"] = (stats.bytes_out - was.bytes_out) / 1e9
            figures[f"{name}_failures"] = stats.failures - was.failures
    return figures | _speeds(engine)


def _speeds(engine: Engine) -> Figures:
    assert engine.tiers is not None
    speeds, names = engine.tiers.speeds.bytes_per_second, engine.stats().scheduler.tiers
    below = {"host": "gpu", "ssd": "host"}
    return {f"{name}_to_{below[name]}_gb_per_second": speeds[name] / 1e9 for name in below if name in names}


def _restore(engine: Engine, tokens: int, seed: int) -> Figures:
    """The first token of a second turn over a history of `tokens`: computed, and restored from each lower tier.

    An engine restores only a part if it expects computing to be faster than loading.
    """
    tiers = engine.tiers
    assert tiers is not None
    driver = _Driver(engine, seed + 1)
    driver.first_token_seconds(driver.tokens(tokens))  # warm
    computed: list[float] = []
    figures: Figures = {"history_tokens": tokens}
    for name in ("host",) if tiers.ssd.store is None else ("host", "ssd"):
        restored, cached = [], 0
        for _ in range(RESTORES):
            history = driver.tokens(tokens)
            computed.append(driver.first_token_seconds(np.concatenate((history, driver.tokens(32))))[0])
            if name == "host":
                engine.scheduler.pool.evict_all()
            else:
                tiers.sink(SINK_SECONDS)
            seconds, cached = driver.first_token_seconds(np.concatenate((history, driver.tokens(32))))
            restored.append(seconds)
        figures[f"tokens_from_{name}"] = cached
        figures[f"ttft_s_from_{name}_median"] = float(np.median(restored))
        figures[f"ttft_from_{name}_share_of_computed"] = float(np.median(restored) / np.median(computed))
    return {**figures, "ttft_s_computed_median": float(np.median(computed)), **_speeds(engine)}


def run_multiround(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Run the conversations with and without the tiers of `config`; print throughput, hits and the ratio."""
    rounds, turn, output = arguments.rounds, arguments.turn_tokens, arguments.output_tokens
    if not config.host_kv_gib:
        raise ConfigError("weft bench multiround needs --host-kv-gib: it measures what the tiers are worth")
    if min(rounds, turn, output) < 1 or arguments.restore_tokens < 0:
        raise ConfigError("--rounds, --turn-tokens and --output-tokens must be at least 1, --restore-tokens at least 0")
    longest = max(rounds * (turn + output), arguments.restore_tokens + 64)
    figures: Figures = {}
    count: int | None = arguments.conversations
    for name in ("tiers",) if arguments.no_baseline else ("tiers", "plain"):
        plain = {"host_kv_gib": 0.0, "ssd_kv_path": None}
        options = {} if name == "tiers" else plain
        engine = Engine(config.for_measuring().model_copy(update=options))
        if longest > engine.resolved.max_model_len:
            raise ConfigError(
                f"the longest history has {longest} tokens, a request takes {engine.resolved.max_model_len}"
            )
        pool_tokens = engine.scheduler.pool.capacity * config.page_size
        if count is None:
            count = max(1, round(OVERCOMMIT * pool_tokens / (rounds * (turn + output))))
        if name == "tiers":
            figures |= {
                "model": config.model_name,
                "dtype": str(engine.resolved.compute_dtype).removeprefix("torch."),
                "workload": f"{count} conversations of {rounds} rounds, {turn} new tokens and {output} out",
                "gpu_pool_gib": engine.runner.num_pages * engine.resolved.kv.page_bytes / GIB,
                "host_pool_gib": config.host_kv_gib,
                "last_rounds_exceed_the_pool": count * rounds * (turn + output) / pool_tokens,
            }
        driver = _Driver(engine, config.seed)
        # The first iteration of a kind pays for compilation, which belongs to no tier.
        driver.converse(min(count, WARM_UP_CONVERSATIONS), min(rounds, WARM_UP_ROUNDS), turn, output)
        engine.reset_prefix_cache()
        run = driver.converse(count, rounds, turn, output)
        figures |= {f"{name}_{key}": value for key, value in run.items()}
        if name == "tiers" and arguments.restore_tokens:
            engine.reset_prefix_cache()
            figures |= {f"restore_{k}": v for k, v in _restore(engine, arguments.restore_tokens, config.seed).items()}
        engine.close()
        del engine, driver
    if "plain_seconds" in figures:
        figures["ratio_to_plain"] = figures["plain_seconds"] / figures["tiers_seconds"]
    report("weft bench multiround", {**figures, **machine()}, arguments.json)
    return 0
