"""Measures the host's cost of an iteration on a GPU, and the share of attention's work lists, without a GPU.

    python -P tests/engine/host_step.py [--iterations 400]

A step here is schedule, build, commit, and the writes of `DeviceInputs.send` without its transfer. The whole step also
launches, so the shares are slightly too large. Batches of a Llama-3-8B on an H200: 256 decodes of 1,024 tokens; 64 such
decodes and 4 chunks of 480 tokens, at the beginning of their prompts and after 7,680 tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import weft
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.model.directory import read_spec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import serial_period
from weft.engine.runner.cuda.cuda_inputs import PARTIAL_ROWS, DeviceInputs
from weft.engine.runner.iteration.attention_lists import AttentionGrid, AttentionLists
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.runner.iteration.input_layout import Layout
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.sampling import SamplingParams

PAGE, LENGTH, SLOTS, TOKENS, SMS, PER_SM = 64, 1024, 256, 2048, 132, 4
MAX_LEN = 16384
CHUNKS, CHUNK_TOKENS, CONTEXT = 4, 480, 7680
WARM_UP = 50


class Host:
    """A scheduler, the slab of a GPU in ordinary memory, and the seconds of CPU time of both."""

    def __init__(self, decodes: int, chunks: int, context: int, iterations: int) -> None:
        spec = read_spec(Path(weft.__file__).parent / "engine" / "model" / "presets" / "llama-3-8b")
        self.chunks, self.context, self.iterations = chunks, context, iterations
        pages = (decodes + 8 * CHUNKS) * -(-MAX_LEN // PAGE) + 1
        self.scheduler = Scheduler(
            SlotTable(SLOTS, MAX_LEN, PAGE),
            PagePool(pages, PAGE, PrefixIndex("host")),
            max_num_batched_tokens=TOKENS,
            prefix_caching=True,
        )
        self.rng, self.handle = np.random.default_rng(0), 0
        for _ in range(decodes):
            self._add(LENGTH, MAX_LEN - LENGTH)
        layout = Layout.of(TOKENS, SLOTS, spec.heads_per_kv, prefill_slots=PARTIAL_ROWS // spec.num_kv_heads)
        self.inputs = DeviceInputs(layout, torch.device("cpu"), SLOTS, -(-MAX_LEN // PAGE))
        self.inputs.slab = _Slab()  # type: ignore[assignment]
        self.grid = AttentionGrid(spec.num_kv_heads, spec.heads_per_kv, PER_SM, page_size=PAGE)
        self.pipeline = Pipeline(serial_period(spec, TOKENS, SMS), spec)
        self.samples = self.rng.integers(2, 1000, SLOTS).astype(np.int32)

    def _add(self, length: int, output: int) -> None:
        ids = self.rng.integers(0, 1000, length).astype(np.int32)
        self.scheduler.add(
            Request(
                handle=self.handle, token_ids=ids, prompt_len=length, params=SamplingParams(max_tokens=output),
                max_total_tokens=length + output, priority=0, order=self.handle, arrival=0.0, salt="", stop_ids=(1,),
                seed=self.handle,
            )
        )  # fmt: skip
        self.handle += 1

    def run(self, lists: list[float]) -> dict[str, float]:
        """Median microseconds of each part. lists: times written by the clock around `AttentionLists`; it is
        emptied."""
        parts: dict[str, list[float]] = {"step": [], "send": [], "attention lists": []}
        pending: Batch | None = None
        step = pending = 0
        while len(parts["step"]) < self.iterations + WARM_UP:
            step += 1
            waiting = self.chunks and not self.scheduler.num_waiting
            for _ in range(self.chunks if waiting else 0):
                self._add(CHUNK_TOKENS, 1)
            begin = time.thread_time()
            batch = self.scheduler.schedule(step)
            if pending is not None:
                self.scheduler.commit(StepResult(pending, self.samples[: len(pending.sampled_rows)], None, (), 0.0))
            between = time.thread_time()
            pending = batch
            if batch is None:
                continue
            whole = batch.num_decodes and batch.num_chunks == self.chunks
            sent = batch
            if self.context:
                kv_len = batch.kv_len.copy()
                kv_len[batch.num_decodes :] += self.context
                sent = batch._replace(kv_len=kv_len)
            lists.clear()
            before = time.thread_time()
            self.inputs.send(sent, self.pipeline, self.grid)
            end = time.thread_time()
            if whole:
                parts["step"].append(between - begin + end - before)
                parts["send"].append(end - before)
                parts["attention lists"].append(sum(lists))
            elif (pending := pending + 1) > 1000:
                raise RuntimeError("the wanted batch does not come about")
        return {name: 1e6 * float(np.median(times[WARM_UP:])) for name, times in parts.items()}


class _Slab:
    """A transfer that takes no time: the copy engine does it."""

    def copy_(self, *_: Any, **__: Any) -> None:
        pass


def clocked(lists: list[float]) -> Callable[[], None]:
    """Record the seconds of each call of `AttentionLists` by `send`. Returns a function that undoes it."""
    kept = AttentionLists.add, AttentionLists.keep_rows, AttentionLists.__init__

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*args, **options)
            finally:
                lists.append(time.thread_time() - begin)

        return call

    AttentionLists.add, AttentionLists.keep_rows, AttentionLists.__init__ = map(timed, kept)  # type: ignore[method-assign]

    def undo() -> None:
        AttentionLists.add, AttentionLists.keep_rows, AttentionLists.__init__ = kept  # type: ignore[method-assign]

    return undo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=400)
    options = parser.parse_args()
    zeros = torch.zeros
    torch.zeros = lambda *shape, **o: zeros(*shape, **{**o, "pin_memory": False})
    print(f"numpy {version('numpy')}, torch {version('torch')}; median us of CPU time an iteration")
    print(f"{'batch':40} {'step':>8} {'send':>8} {'lists':>8} {'share':>7}")
    lists: list[float] = []
    undo = clocked(lists)
    for decodes, chunks, context in ((256, 0, 0), (64, CHUNKS, 0), (64, CHUNKS, CONTEXT)):
        of = Host(decodes, chunks, context, options.iterations).run(lists)
        name = f"{decodes} decodes" + (f", {chunks} chunks after {context} tokens" if chunks else "")
        share = of["attention lists"] / of["step"]
        print(f"{name:40} {of['step']:8.0f} {of['send']:8.0f} {of['attention lists']:8.0f} {share:7.1%}", flush=True)
    undo()


if __name__ == "__main__":
    main()
