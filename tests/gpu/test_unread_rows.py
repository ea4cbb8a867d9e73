"""Unread rows leave a GPU's last layer (or an interpreted one's), and no other row's bits change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tiny import make_tiny

pytest.importorskip("triton")
from interpreted import interpreted_gpu
from test_fp8_engine import SIZES, WIDE

from weft.engine.plans import pipeline
from weft.engine.runner.cuda import cuda_inputs
from weft.engine.runner.cuda.cuda_executor import CudaExecutor
from weft.engine.runner.options import resolve
from weft.kernels.common.gpu import Gpu

pytestmark = [pytest.mark.usefixtures("rounded", "device"), pytest.mark.nightly]
PROMPTS = [np.random.default_rng(seed).integers(3, 190, length) for seed, length in enumerate((21, 3, 30, 11))]


def results(path: Path, monkeypatch: pytest.MonkeyPatch, *, unread_from: int, **options: Any) -> tuple[list[Any], set]:
    """All results of requests of four kinds, and how many rows the last layer kept."""
    kept: set[int] = set()
    after_drop = CudaExecutor._after_drop
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "UNREAD_FROM", unread_from)

        def noted(executor: CudaExecutor, of: pipeline.Pipeline, *rest: Any, **named: Any) -> Any:
            if of.after_drop:
                kept.add(int(executor.inputs.count["kept"]))
            return after_drop(executor, of, *rest, **named)

        if not torch.cuda.is_available():  # if a graph is captured once
            patch.setattr(CudaExecutor, "_after_drop", noted)
        harness = Harness(
            path, **{
                "page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 40,
                "prefix_caching": False, "device": "cuda", "tuning_seconds": 0, **options,
            },
        )  # fmt: skip
        harness.poison_pages()
        requested: list[dict[str, Any]] = [
            {"max_tokens": 3}, {"max_tokens": 2, "prompt_logprobs": 1}, {"max_tokens": 0, "pooling": "mean"},
            {"max_tokens": 2},
        ]  # fmt: skip
        handles = [
            harness.add(prompt, logprobs=1, ignore_eos=True, **how, **GREEDY)
            for prompt, how in zip(PROMPTS, requested, strict=True)
        ]
        harness.run()
    reported = [
        (
            harness.tokens[h],
            harness.logprobs[h],
            harness.prompt_logprobs[h],
            harness.pooled.get(h, np.zeros(0)).tolist(),
        )
        for h in handles
    ]
    return reported, kept


EIGHT = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    ("family", "formats"),
    [
        ("llama2", {}), ("llama2", EIGHT), ("llama2, wide heads", EIGHT), ("qwen3-moe", {}), ("olmo2", {}),
        ("gemma3", {}),
    ],
)  # fmt: skip
def test_no_bit_changes(
    family: str, formats: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Chunks in the middle of a prompt, decodes with them, a prompt whose rows are all scored, one that is pooled."""
    gpu, (family, _, wide) = torch.cuda.is_available(), family.partition(", ")
    path = tiny_model(family)
    if formats:
        path = tmp_path / "model"
        make_tiny(family, **SIZES | (WIDE if wide else {})).save_pretrained(path)
        monkeypatch.setattr(cuda_inputs, "unpacking_is_faster", lambda _: True)  # tiles of both lists leave
    if not gpu:
        monkeypatch.setattr(resolve, "gpu", lambda *_: Gpu("interpreter", (8, 9), 4))
    with contextlib.nullcontext() if gpu else interpreted_gpu(monkeypatch):
        options = {"dtype": "bfloat16" if gpu else "float16", **formats}
        fewer, kept = results(path, monkeypatch, unread_from=0, **options)
        every, none = results(path, monkeypatch, unread_from=10**9, **options)
    assert fewer == every
    assert not none
    assert gpu or min(kept) < 3 < 10 < max(kept), "chunks of which nobody reads much, and ones that are read whole"
