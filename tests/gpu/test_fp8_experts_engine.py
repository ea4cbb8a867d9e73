"""An engine with experts in FP8 on a GPU (or interpreted), compared with the CPU's, which uses the references."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tiny import make_tiny

pytest.importorskip("triton")
from interpreted import interpreted_gpu

from weft.engine.runner.options import resolve
from weft.kernels.common.gpu import Gpu

pytestmark = pytest.mark.usefixtures("rounded", "device")
HERE = torch.cuda.is_available()
SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 208, "moe_intermediate_size": 80, "shared_expert_intermediate_size": 144,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 2,
    "initializer_range": 0.05,
}  # fmt: skip
PROMPTS = [np.random.default_rng(2).integers(3, 199, n) for n in (5, 20)]


def checkpoint(family: str, path: Path) -> Path:
    model = make_tiny(family, **SIZES)
    for name, weight in model.named_parameters():
        if "norm" in name:  # an operand must have been multiplied by these
            torch.nn.init.uniform_(weight, 0.4, 1.6)
    model.save_pretrained(path)
    return path


def served(path: Path, prompts: list[np.ndarray] = PROMPTS, **options: Any) -> tuple[list[list[int]], list[list[Any]]]:
    harness = Harness(
        path,
        **{"page_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32, "num_pages": 24} | options,
        prefix_caching=False,
    )
    harness.poison_pages()
    handles = [harness.add(p, max_tokens=2, ignore_eos=True, logprobs=1, **GREEDY) for p in prompts]
    harness.run()
    return [harness.tokens[h] for h in handles], [harness.logprobs[h] for h in handles]


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-moe",  # experts, one of them shared with a gate, and a layer without them
        pytest.param("qwen3-moe", marks=pytest.mark.nightly),
        pytest.param("glm4-moe", marks=pytest.mark.nightly),
        pytest.param("gpt-oss", marks=pytest.mark.nightly),
        pytest.param("granite-moe", marks=pytest.mark.nightly),
    ],
)
def test_its_tokens_are_those_of_the_references(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks with decodes, and pages in FP8: one iteration writes operands for GEMMs of several sizes."""
    path = checkpoint(family, tmp_path)
    formats = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    want, known = served(path, device="cpu", dtype="float32", **formats)
    if HERE:
        got, mine = served(path, device="cuda", dtype="float16", tuning_seconds=0, **formats)
    else:
        monkeypatch.setattr(resolve, "gpu", lambda *_: Gpu("interpreter", (8, 9), 4))
        with interpreted_gpu(monkeypatch):
            got, mine = served(path, device="cuda", dtype="float16", **formats)
    for theirs, ours, exact, logged in zip(want, got, known, mine, strict=True):
        for token, other, e, m in zip(theirs, ours, exact, logged, strict=True):
            assert float(m.values[0]) == pytest.approx(float(e.values[0]), abs=0.15)
            if token != other:  # two that are equally good: the text after it differs
                break
    assert any(theirs[0] == ours[0] for theirs, ours in zip(want, got, strict=True))


@pytest.mark.parametrize("family", ["qwen2-moe", pytest.param("gpt-oss", marks=pytest.mark.nightly)])
def test_with_batch_invariance_a_request_has_the_same_bits_in_any_batch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(family, tmp_path)
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "tuning_seconds": 0, "batch_invariant": True, "quantization": "fp8",
        "max_num_batched_tokens": 128,
    }  # fmt: skip
    if not HERE:
        monkeypatch.setattr(resolve, "gpu", lambda *_: Gpu("interpreter", (8, 9), 4))
    with contextlib.nullcontext() if HERE else interpreted_gpu(monkeypatch):
        (alone,), (known,) = served(path, PROMPTS[:1], **options)
        (among, _), (logged, _) = served(path, PROMPTS, **options)
    assert among == alone
    assert [list(one.values) for one in logged] == [list(one.values) for one in known]
