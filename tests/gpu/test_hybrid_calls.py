"""The variants of `weft bench attention` on a GPU: the timed calls attend, and all give the same result."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from weft.kernels.common.gpu import is_hopper, on_gpu
from weft.tools.kernels.foreign_attention import FLASH_PAGE, NAMES
from weft.tools.kernels.hybrid_batches import Hybrid
from weft.tools.kernels.hybrid_calls import LAYERS, HybridCalls


@pytest.mark.parametrize("model", ["llama-3-8b", "yi-6b"])
def test_every_variant_gives_the_same_attention(model: str, device: str) -> None:
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
        prepared = [name for name in NAMES if calls.prepare(name)]  # those that are installed run
        for name in prepared:
            assert calls.burst(name, 500.0) > 0
        for name in prepared:  # after all others' captures, whose memory would be the first one's if it were not kept
            if name.startswith("flash"):
                calls.burst(name, 500.0)
                want, got = over_wide_pages(calls, batch), calls.attended(name).float()
                assert float((got - want).norm() / want.norm()) < 6e-3, name


def over_wide_pages(calls: HybridCalls, batch: Hybrid) -> torch.Tensor:
    """The expected result of flash-attn in the last layer: the same memory in pages of its size. `[T, Hq * D]`
    float32."""
    heads, dim = calls.pool.shape[4:]
    wide = calls.pool.view(-1, LAYERS, 2, FLASH_PAGE, heads, dim)
    ids = calls.table.long() % len(wide)

    def attend(q: torch.Tensor, row: int, keys: int) -> torch.Tensor:
        pages = wide[ids[row, : -(-keys // FLASH_PAGE)], LAYERS - 1].float()
        k, v = (pages[:, i].reshape(-1, heads, dim)[:keys] for i in range(2))
        scores = torch.einsum("qhgd,khd->hgqk", q.float().unflatten(1, (heads, -1)), k) * dim**-0.5
        visible = torch.arange(keys - len(q), keys, device=q.device)[:, None] >= torch.arange(keys, device=q.device)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1)

    q, d = calls.q, batch.decodes
    decodes = [attend(q[i : i + 1], i, batch.length) for i in range(d)]
    return torch.cat((*decodes, attend(q[d : d + batch.chunk], d, batch.context + batch.chunk)))
