"""The ways of `weft bench attention` on a GPU: what is timed attends, each way to the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from weft.kernels.foreign_attention import NAMES
from weft.kernels.gpu import is_hopper, on_gpu
from weft.kernels.hybrid_batches import Hybrid
from weft.kernels.hybrid_calls import HybridCalls


@pytest.mark.parametrize("model", ["llama-3-8b", "yi-6b"])
def test_every_way_attends_to_the_same(model: str, device: str) -> None:
    if not (on_gpu(torch.device(device)) and is_hopper()):
        pytest.skip("needs a Hopper GPU")
    calls = HybridCalls(model, pages=512, largest=(16, 512, 8192))
    calls.capture()
    assert not calls.left_out
    for batch in (Hybrid(model, 300, 4000, 9, 3000), Hybrid(model, 64, 8000, 16, 500), Hybrid(model, 512, 0, 1, 8000)):
        calls.load(batch)
        rows, want = batch.decodes + batch.chunk, None
        for name in calls.names(every=True):
            if name in ("decode", "prefill", *NAMES):
                continue
            calls.out.fill_(float("nan"))
            assert calls.burst(name, 500.0) > 0
            got = calls.out[:rows].double()
            assert bool(calls.out[rows:].isnan().all())
            want = got if want is None else want
            assert float((got - want).norm() / want.norm()) < 6e-3, name
        assert calls.same_bits()
        for name in NAMES:  # where they are installed, they run
            assert not calls.prepare(name) or calls.burst(name, 500.0) > 0
