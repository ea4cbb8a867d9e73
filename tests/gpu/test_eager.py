"""`--enforce-eager`: an engine on a GPU, or interpreted without one, captures and replays no graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

pytest.importorskip("triton")
from interpreted import interpreted_gpu

from weft.engine.runner.cuda import cuda_runner

PROMPTS = [np.arange(3, 3 + length) for length in (5, 21)]


class NoGraph:
    """A graph that is neither captured nor replayed: it has no such methods."""


def _tokens(path: Path, **options: Any) -> list[list[int]]:
    harness = Harness(path, page_size=16, max_num_seqs=4, max_num_batched_tokens=32, num_pages=16, **options)
    harness.poison_pages()
    handles = [harness.add(prompt, max_tokens=2, ignore_eos=True, **GREEDY) for prompt in PROMPTS]
    harness.run()
    return [harness.tokens[handle] for handle in handles]


def test_an_eager_engine_uses_no_graph_and_gives_the_same_tokens(
    device: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, capture = tiny_model("llama2"), cuda_runner.CudaRunner._capture
    expected = _tokens(path, device="cpu", dtype="float32", enforce_eager=True)  # accepted, without effect
    with interpreted_gpu(monkeypatch) if device == "cpu" else contextlib.nullcontext():
        monkeypatch.setattr(cuda_runner.CudaRunner, "_capture", capture)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
        assert _tokens(path, device="cuda", dtype="float16", enforce_eager=True) == expected
