"""Hidden states as embeddings on a GPU, and interpreted without one, equal those of the CPU's runner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import GREEDY, Harness

pytest.importorskip("triton")
from interpreted import interpreted_gpu

from weft.engine.plans import pipeline

PROMPTS = [np.arange(3, 3 + length) for length in (5, 21)]


def _pooled(path: Path, **options: object) -> list[np.ndarray]:
    harness = Harness(path, page_size=16, max_num_seqs=4, max_num_batched_tokens=16, num_pages=16, **options)
    harness.poison_pages()
    harness.add(PROMPTS[1][::-1], max_tokens=2, **GREEDY)
    harness.run()
    handles = [harness.add(p, max_tokens=0, pooling=pooling) for p in PROMPTS for pooling in ("last", "mean")]
    harness.run()
    return [harness.pooled[handle] for handle in handles]


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_they_are_those_of_the_cpu(
    impl: str, device: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks rows that stay in the last layer while others leave."""
    path = tiny_model("llama2")
    monkeypatch.setattr(pipeline, "UNREAD_FROM", 0)
    expected = _pooled(path, device="cpu", model_impl=impl)
    with interpreted_gpu(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        reported = _pooled(path, device="cuda", dtype="float16", model_impl=impl)
    for got, want in zip(reported, expected, strict=True):
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
