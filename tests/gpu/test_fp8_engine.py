"""An engine with weights in FP8 on a GPU (or interpreted) against the one on the CPU, which computes by the twins."""

from __future__ import annotations

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

from weft.engine.runner import resolve
from weft.kernels.gpu import Gpu

pytestmark = pytest.mark.usefixtures("rounded", "device")
HERE = torch.cuda.is_available()
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 336, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 2, "initializer_range": 0.05,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def made(family: str) -> Path:
        path, model = tmp_path_factory.mktemp(family), make_tiny(family, **SIZES)
        for name, weight in model.named_parameters():
            if "norm" in name:  # which an operand must have been multiplied by
                torch.nn.init.uniform_(weight, 0.4, 1.6)
        model.save_pretrained(path)
        return path

    return made


def served(path: Path, prompts: list[np.ndarray], **options: Any) -> tuple[list[list[int]], list[list[Any]]]:
    harness = Harness(
        path, page_size=16, max_num_seqs=2, max_num_batched_tokens=32, num_pages=24, prefix_caching=False,
        quantization="fp8", **options,
    )  # fmt: skip
    harness.poison_pages()
    handles = [harness.add(p, max_tokens=2, ignore_eos=True, logprobs=1, **GREEDY) for p in prompts]
    harness.run()
    return [harness.tokens[h] for h in handles], [harness.logprobs[h] for h in handles]


@pytest.mark.parametrize("family", ["llama3.1", pytest.param("qwen3", marks=pytest.mark.nightly)])
def test_its_tokens_are_those_of_the_twins(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decodes: operands that one iteration leaves for products of several sizes."""
    path = checkpoint(family)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 199, n) for n in (5, 36)]
    want, known = served(path, prompts, device="cpu", dtype="float32")
    if HERE:
        got, mine = served(path, prompts, device="cuda", dtype="bfloat16", tuning_seconds=0)
    else:
        monkeypatch.setattr(resolve, "gpu", lambda *_: Gpu("interpreter", (8, 9), 4))
        with interpreted_gpu(monkeypatch):
            got, mine = served(path, prompts, device="cuda", dtype="float16")
    for theirs, ours, exact, logged in zip(want, got, known, mine, strict=True):
        for token, other, e, m in zip(theirs, ours, exact, logged, strict=True):
            assert float(m.values[0]) == pytest.approx(float(e.values[0]), abs=0.15)
            if token != other:  # two that are equally good: what follows is another text
                break
    assert sum(theirs == ours for theirs, ours in zip(want, got, strict=True)) >= 1
