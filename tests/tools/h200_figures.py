"""The shipped H200 profile compared with measured runs: `python tests/tools/h200_figures.py` prints the table of
docs/simulator.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.deploy.fleet.engine import EngineOptions
from weft.deploy.fleet.front import FrontOptions
from weft.deploy.fleet.profile import load_profile
from weft.deploy.fleet.simulation import Fleet, Result, simulate
from weft.loadgen.lengths import PRESETS, Lengths
from weft.loadgen.prompts import PromptMaker
from weft.loadgen.traces import Trace, TraceRow
from weft.loadgen.workload import ArrivalOptions, ContentOptions, build

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "jobs"))
from sharegpt import sharegpt  # the load of the H200 run

EVERYTHING = 10**9


class Row(NamedTuple):
    what: str
    unit: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def at_once(content: ContentOptions, count: int, pages: int | None = None) -> Result:
    """All requests are queued at once, as `weft bench offline` does."""
    profile = load_profile("llama-3-8b-h200")
    limits = profile.limits
    engine = EngineOptions(
        limits.page_size, pages or limits.num_pages, limits.max_num_seqs, limits.max_num_batched_tokens,
        limits.max_model_len,
    )  # fmt: skip
    arrival = ArrivalOptions("constant", rate=1e9, count=count)
    workload = build(arrival, content, PromptMaker("ids", 0), limits.max_model_len)
    front = FrontOptions(1, max_queued_requests=EVERYTHING, max_queued_tokens=EVERYTHING)
    return simulate(Fleet(profile, engine, front), workload)


def fixed(inputs: int, outputs: int) -> ContentOptions:
    return ContentOptions(Lengths("constant", inputs), Lengths("constant", outputs))


def total(result: Result) -> float:
    per_second = result.throughput()
    return per_second["prompt_tokens_per_second"] + per_second["output_tokens_per_second"]


OFFLINE = (
    ("1024/512, 2,000 requests", fixed(1024, 512), 2000, 28590, 2094, 691),
    ("1024/512, 1,000", fixed(1024, 512), 1000, 27508, None, 685),
    ("1024/512, 300", fixed(1024, 512), 300, 25429, 674, 683),
    ("512/512, 1,500", fixed(512, 512), 1500, 27505, 1249, 693),
    ("512/512, 1,000", fixed(512, 512), 1000, 27755, None, 690),
    ("Splitwise lengths, 2,000 (redrawn)", ContentOptions(*PRESETS["splitwise"]), 2000, 32269, None, 693),
    ("LMSYS lengths, 4,000 (redrawn)", ContentOptions(*PRESETS["lmsys"]), 4000, 26780, None, 681),
    ("ShareGPT lengths, 3,000 (redrawn)", ContentOptions(*PRESETS["sharegpt"]), 3000, 26351, None, 681),
)


def offline(*names: str) -> Iterator[Row]:
    """Offline workloads whose description starts with one of `names`."""
    for what, content, count, tokens, iterations, watts in OFFLINE:
        if not names or what.startswith(names):
            result = at_once(content, count)
            yield Row(what, "tokens/s", tokens, total(result))
            if iterations is not None:
                yield Row(what, "iterations", iterations, result.iterations)
            assert result.joules is not None
            yield Row(what, "tokens/J", tokens / watts, total(result) * result.span / result.joules)


def online(*rates: float) -> Iterator[Row]:
    """ShareGPT lengths over HTTP: the same 22 s of requests that a daemon with 512 slots and no prefix cache
    received."""
    profile = load_profile("llama-3-8b-h200")
    limits = profile.limits
    engine = EngineOptions(
        limits.page_size, limits.num_pages, 512, limits.max_num_batched_tokens, 6000, prefix_caching=False
    )  # fmt: skip
    front = FrontOptions(1, max_queued_requests=EVERYTHING, max_queued_tokens=EVERYTHING)
    measured = ((29.2, 7.41, 6.89, 29.1), (38.6, 10.06, 7.78, 38.0), (14.4, 5.38, 5.01, 20.7))
    for seed, (rate, tpot, itl, ttft) in enumerate(measured):
        if rate in (rates or (rate,)):
            trace = Trace([TraceRow(**row) for row in sharegpt(rate, 22.0, seed)])
            content = ContentOptions(trace=trace)
            workload = build(ArrivalOptions(rate=None), content, PromptMaker("ids", seed), limits.max_model_len)
            result = simulate(Fleet(profile, engine, front), workload, warmup=5.0)
            what = f"ShareGPT lengths over HTTP, {rate} a second"
            yield Row(what, "TPOT, mean, ms", tpot, 1e3 * result.distributions["tpot"].mean)
            yield Row(what, "time between tokens, median, ms", itl, 1e3 * result.distributions["itl"].p50)
            yield Row(what, "TTFT, mean, ms", ttft, 1e3 * result.distributions["ttft"].mean)


def one_request() -> Iterator[Row]:
    record = at_once(fixed(1024, 256), 1).everything
    yield Row("one request, 1024/256", "TPOT, ms", 1e3 / 231.5, 1e3 * float(record.tpot[0]))
    yield Row("one request, 1024/256", "output tokens/s with prefill", 223, 256 / float(record.e2e[0]))
    yield Row("6,144 tokens alone", "TTFT, s", 0.153, float(at_once(fixed(6144, 2), 1).everything.ttft[0]))


def conversations() -> Iterator[Row]:
    """147 of eight rounds at once in 12 GiB of pages, as `weft bench multiround` does, without tiers."""
    content = ContentOptions(Lengths("constant", 200), Lengths("constant", 50), turns=Lengths("constant", 8))
    result = at_once(content, 147, pages=12 * 2**30 // (131_072 * 64))
    what = "147 conversations of 8 rounds, 12 GiB"
    last = [r.first - r.start for r in result.everything.records if r.turn == 7]
    yield Row(what, "tokens/s", 41739, total(result))
    yield Row(what, "TTFT of the last round, s", 4.61, float(np.mean(last)))
    yield Row(what, "cached share of prompt tokens", 0.058, result.hit_share)


if __name__ == "__main__":
    print("| run | | measured | simulated | error |\n|---|---|---|---|---|")
    for row in (*offline(), *online(), *one_request(), *conversations()):
        numbers = (f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in (row.measured, row.simulated))
        print(f"| {row.what} | {row.unit} | {' | '.join(numbers)} | {100 * row.error:+.1f} % |", flush=True)
