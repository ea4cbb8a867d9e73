"""Unread prompt rows leave the last layer after its attention, and no result changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

from weft.engine.runner.cpu.cpu_executor import CpuExecutor, CpuInputs, _Iteration
from weft.engine.runner.iteration.batch import Batch

Made = Callable[[str], Path]
PROMPTS = [np.random.default_rng(seed).integers(3, 190, length) for seed, length in enumerate((30, 3, 41, 17))]


class Watched:
    """An engine whose executor records how many rows its last layer keeps, and can be made to keep all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path, *, keep_all: bool, **options: Any) -> None:
        self.kept: list[int] = []
        keep, inputs = _Iteration.keep, CpuExecutor.inputs

        def noted(it: _Iteration, rows: torch.Tensor) -> None:
            self.kept.append(len(rows))
            keep(it, rows)

        def all_of_them(executor: CpuExecutor, batch: Batch, ids: torch.Tensor) -> CpuInputs:
            return inputs(executor, batch, ids)._replace(rows=None)

        with monkeypatch.context() as patch:
            patch.setattr(_Iteration, "keep", noted)
            if keep_all:
                patch.setattr(CpuExecutor, "inputs", all_of_them)
            self.harness = Harness(model, **{"page_size": 8, "num_pages": 60, "max_num_batched_tokens": 16, **options})
            self.handles = [
                self.harness.add(prompt, max_tokens=4, logprobs=2, **how, **GREEDY)
                for prompt, how in zip(PROMPTS, self.how(options), strict=True)
            ]
            self.harness.run()

    @staticmethod
    def how(options: dict[str, Any]) -> list[dict[str, Any]]:
        """One of them requests its prompt's log-probabilities; with batch invariance it may be among the others."""
        scored = {"prompt_logprobs": 1} if options.get("batch_invariant") else {}
        return [{}, scored, {}, {}]

    @property
    def output(self) -> list[Any]:
        harness = self.harness
        return [(harness.tokens[h], harness.logprobs[h], harness.prompt_logprobs[h]) for h in self.handles]


@pytest.mark.parametrize("family", ["llama2", "gemma3", "qwen3-moe", "phi", "olmo2"])
def test_with_batch_invariance_no_bit_changes(tiny_model: Made, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Chunks without a sampled row, prompts that request all rows, decodes; norms before and after, experts, and
    attention parallel to the MLP."""
    options = {"batch_invariant": True, "max_num_batched_tokens": 128, "dtype": "float32"}
    path = tiny_model(family)
    fewer, every = (Watched(monkeypatch, path, keep_all=keep_all, **options) for keep_all in (False, True))
    assert fewer.kept
    assert not every.kept
    assert fewer.output == every.output


@pytest.mark.parametrize("family", ["llama2", "gpt-oss", "granite", "opt"])
def test_tokens_stay_the_same(tiny_model: Made, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path = tiny_model(family)
    together, apart = ({"max_num_seqs": slots} for slots in (4, 1))
    fewer, every = (Watched(monkeypatch, path, keep_all=keep_all, **together) for keep_all in (False, True))
    same_tokens(fewer, every)
    alone = Watched(monkeypatch, path, keep_all=False, **apart)
    assert 0 in alone.kept, "a chunk in the middle of a prompt leaves with all its rows"
    same_tokens(alone, every)


def same_tokens(fewer: Watched, every: Watched) -> None:
    for one, other in zip(fewer.output, every.output, strict=True):
        assert one[0] == other[0]
        for a, b in zip(one[1], other[1], strict=True):
            np.testing.assert_allclose(a.values, b.values, atol=1e-4)


def test_ranks_drop_the_same_rows(tiny_model: Made) -> None:
    """They add up their partial sums together, so each must drop the same rows."""
    output = []
    for ranks in (1, 2):
        harness = Harness(
            tiny_model("llama2"), page_size=8, num_pages=60, max_num_batched_tokens=16, tensor_parallel_size=ranks
        )
        handles = [harness.add(prompt, max_tokens=4, **GREEDY) for prompt in PROMPTS]
        harness.run()
        harness.engine.close()
        output.append([harness.tokens[h] for h in handles])
    assert output[0] == output[1]
