"""`weft bench speculation`: the same real prompts with and without speculation, alternating, on two engines here."""

from __future__ import annotations

import argparse
import time
from itertools import product
from statistics import geometric_mean, median
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weft.engine.config import EngineConfig
from weft.engine.config.tokenizer import load_tokenizer
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError
from weft.engine.progress import ProgressBar, for_stdout
from weft.engine.wire.messages import AddRequest, SpeculationStats
from weft.engine.wire.sampling import SamplingParams
from weft.tools.bench.offline import Figures, machine, write_figures
from weft.tools.bench.real_prompts import KINDS, mixed


class Run(NamedTuple):
    """One pass over the prompts on one engine."""

    outputs: list[list[int]]
    seconds: float
    iterations: int

    @property
    def rate(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


class Served:
    """An engine that answers prompts, a number of them at a time."""

    def __init__(self, config: EngineConfig, bar: ProgressBar) -> None:
        self.engine = Engine(config, bar)
        self._handle = 0

    def run(self, prompts: list[bytes], params: SamplingParams, running: int) -> Run:
        engine, first = self.engine, self._handle
        self._handle += len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        waiting = list(enumerate(prompts))[::-1]
        before, begin, open_ = engine.stats().iterations, time.perf_counter(), 0
        while waiting or open_:
            while waiting and open_ < running:
                i, prompt = waiting.pop()
                engine.add(AddRequest(handle=first + i, prompt_token_ids=prompt, params=params))
                open_ += 1
            if (news := engine.step()) is None:
                continue
            for handle, token, finish in zip(*(column.tolist() for column in news.columns()), strict=True):
                if token >= 0:
                    outputs[handle - first].append(token)
                open_ -= finish != 0
        return Run(outputs, time.perf_counter() - begin, engine.stats().iterations - before)

    @property
    def drafts(self) -> SpeculationStats:
        return self.engine.stats().speculation


def _prompts(config: EngineConfig, kinds: tuple[str, ...], number: int) -> list[bytes]:
    tokenizer = load_tokenizer(config.tokenizer_path)
    made = []
    for _, text in mixed(number, kinds):
        message = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        made.append(np.array(tokenizer.encode(rendered, add_special_tokens=False), np.int32).tobytes())
    return made


def _figures(off: list[Run], on: list[Run], drafts: SpeculationStats, before: SpeculationStats) -> Figures:
    verified = drafts.drafts - before.drafts
    drafted = sum(drafts.draft_tokens.values()) - sum(before.draft_tokens.values())
    accepted = sum(drafts.accepted_tokens.values()) - sum(before.accepted_tokens.values())
    tokens = sum(len(output) for run in on for output in run.outputs)
    ratios = [one.rate / other.rate for one, other in zip(on, off, strict=True)]
    return {
        "tokens_per_second_without": median(run.rate for run in off),
        "tokens_per_second_with": median(run.rate for run in on),
        "ratio": geometric_mean(ratios),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
        "tokens_per_iteration_and_request": tokens / max(1, tokens - accepted),
        "acceptance_length": 1 + accepted / verified if verified else 1.0,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "pauses": drafts.pauses - before.pauses,
        "outputs": sum(len(run.outputs) for run in on),
        "equal_outputs": sum(
            one == other
            for run, same in zip(on, off, strict=True)
            for one, other in zip(run.outputs, same.outputs, strict=True)
        ),
    }


def run(config: EngineConfig, arguments: argparse.Namespace) -> int:
    """Alternate between two engines, with and without speculation, and print the ratio of their tokens per second."""
    kinds = tuple(dict.fromkeys(arguments.kind or KINDS))
    if unknown := next((kind for kind in kinds if kind not in KINDS), None):
        raise ConfigError(f"--kind {unknown}: choose among {', '.join(KINDS)}")
    if config.drafting is None:
        config = config.model_copy(update={"speculation": "auto"})
    without = config.model_copy(update={"speculation": "off", "speculation_depth": None, "speculative_config": None})
    with ProgressBar() as bar:
        off, on = Served(without, bar), Served(config, bar)
    groups = [(kind,) for kind in kinds] if arguments.by_kind else [kinds]
    cells: dict[str, Figures] = {}
    shown = Table(
        "prompts", "T", "running", "tokens/s without", "with", "ratio (least, largest)", "tokens a step", "equal"
    )
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        for group, temperature, running in progress.track(
            list(product(groups, arguments.temperature or [0.0, 0.7], arguments.running or [1, 4, 16]))
        ):
            number = arguments.requests or max(running, len(group) if running == 1 else 2 * running)
            prompts = _prompts(config, group, number)
            params = SamplingParams(
                max_tokens=arguments.output,
                temperature=temperature,
                top_p=0.95 if temperature else 1.0,
                seed=config.seed,
            )
            before, runs = on.drafts, dict[Served, list[Run]]({off: [], on: []})
            for turn in range(arguments.rounds):
                for served in (off, on) if turn % 2 == 0 else (on, off):
                    runs[served].append(served.run(prompts, params, running))
            figures = _figures(runs[off], runs[on], on.drafts, before)
            name = group[0] if len(group) == 1 else "mixed"
            cells[f"{name}, T {temperature:g}, {running} running"] = figures
            shown.add_row(
                name, f"{temperature:g}", str(running), f"{figures['tokens_per_second_without']:.1f}",
                f"{figures['tokens_per_second_with']:.1f}",
                f"{figures['ratio']:.2f} ({figures['least_ratio']:.2f}, {figures['largest_ratio']:.2f})",
                f"{figures['tokens_per_iteration_and_request']:.2f}",
                f"{figures['equal_outputs']} of {figures['outputs']}",
            )  # fmt: skip
            if arguments.json is not None:
                write_figures({"model": config.model_name, "cells": cells, **machine()}, arguments.json)
    for served in (off, on):
        served.engine.close()
    for_stdout().print(shown)
    return 0
