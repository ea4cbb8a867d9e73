"""Weights that reach a GPU through staging, packed during the copies, equal those in the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft.engine.model import staging
from weft.engine.model.directory import read_spec
from weft.engine.model.weights import load_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("family", ["llama3.1", "qwen3", "mixtral", "gpt-oss"])
def test_staged_weights_are_those_of_the_checkpoint(
    tiny_model: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "AHEAD_BYTES", 4096)  # less than most tensors, so that memory is reused
    path = tiny_model(family)
    spec = read_spec(path)
    for part in (spec, spec.shard(1, 2)):
        for dtype in (torch.bfloat16, torch.float32):
            devices = (torch.device("cpu"), torch.device("cuda"))
            here, there = (load_weights(part, path, device=d, dtype=dtype, max_positions=8) for d in devices)
            for ours, theirs in zip(here.layers, there.layers, strict=True):
                for name in ours:
                    assert torch.equal(ours[name].weight, theirs[name].weight.cpu()), name
            assert torch.equal(here.lm_head, there.lm_head.cpu())
