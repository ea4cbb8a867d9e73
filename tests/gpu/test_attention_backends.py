"""The attention back ends on a GPU, ours in a captured graph, against attention by its definition."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from paged import LAYER, Iteration, assert_attention, empty_out, iteration

pytest.importorskip("triton")
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.backends import make_host_attention
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.triton_backend import DecodeWork, TritonAttention, TritonStep
from weft.kernels.attention.work_lists import decode_items, prefill_items

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DECODES, CHUNKS = [1, 64, 65, 300, 1000], [(0, 33), (100, 28), (256, 300), (640, 1)]


def shape_of(it: Iteration) -> AttentionShape:
    return AttentionShape(it.q.shape[1], it.kv.shape[4], it.kv.shape[5], it.kv.shape[3], it.kv.dtype, it.kv.device)


def triton_step(it: Iteration, num_sms: int, windows: tuple[int | None, ...] = (None,)) -> TritonStep:
    requests, shape = it.requests, shape_of(it)
    d, device = requests.num_decodes, it.q.device
    decodes = {
        window: decode_items(
            requests.kv_len[:d], num_kv_heads=shape.num_kv_heads, num_programs=4 * num_sms, max_slots=1024,
            window=window, page_size=shape.page_size,
        )
        for window in windows
    }  # fmt: skip
    starts = np.cumsum(requests.query_len) - requests.query_len
    rows = np.arange(len(requests.query_len))
    prefill = prefill_items(
        starts[d:], requests.query_len[d:], (requests.kv_len - requests.query_len)[d:], rows[d:], group=shape.group
    )
    space = decode_workspace(1024, max(d, 1), shape.num_kv_heads, shape.group, shape.head_dim, device)

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

    return TritonStep(
        there(requests.page_table),
        {window: DecodeWork(there(items), there(np.array([len(items)]))) for window, items in decodes.items()},
        there(prefill), there(np.array([len(prefill)])), space,
    )  # fmt: skip


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 2, 128), (4, 4, 64), (14, 2, 64)])
def test_triton_attends_as_defined_inside_a_graph(heads: int, kv_heads: int, d: int, page: int, num_sms: int) -> None:
    it = iteration(DECODES, CHUNKS, heads, kv_heads, d, page, torch.bfloat16, "cuda")
    backend = TritonAttention(shape_of(it), num_sms)
    assert backend.captured
    step, out = triton_step(it, num_sms), empty_out(it)
    backend.attend(it.q, it.kv, LAYER, step, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.attend(it.q, it.kv, LAYER, step, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert_attention(out, it, 6e-3)


@pytest.mark.parametrize("windows", [(None, 100), (100, None), (None,), (300,)], ids=str)
@pytest.mark.parametrize(("softcap", "scale", "has_sinks"), [(0.0, None, False), (5.0, 0.2, True)])
@pytest.mark.parametrize("d", [64, 128])
def test_triton_applies_the_score_changes_of_a_layer(
    windows: tuple[int | None, ...], softcap: float, scale: float | None, has_sinks: bool, d: int, num_sms: int
) -> None:
    it = iteration(DECODES, CHUNKS, 8, 2, d, 64, torch.bfloat16, "cuda")
    sinks = torch.linspace(-2, 4, 8, device="cuda") if has_sinks else None
    shape = shape_of(it)._replace(windows=windows, softcap=softcap, scale=scale, sinks=has_sinks)
    backend = TritonAttention(shape, num_sms)
    step, out = triton_step(it, num_sms, windows), empty_out(it)
    for attend in (backend.decode, backend.prefill):
        attend(it.q, it.kv, LAYER, step, out=out, sinks=sinks)
    assert_attention(out, it, 6e-3, window=shape.window(LAYER), softcap=softcap, scale=scale, sinks=sinks)


@pytest.mark.parametrize("page", [16, 256])
def test_torch_attends_as_defined(page: int) -> None:
    it = iteration(DECODES, CHUNKS, 14, 2, 64, page, torch.bfloat16, "cuda")
    backend = make_host_attention("torch", shape_of(it))
    assert_attention(backend.attend(it.q, it.kv, LAYER, backend.prepare(it.requests), out=empty_out(it)), it, 1e-2)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
@pytest.mark.parametrize("d", [64, 128])
def test_flash_attn_attends_as_defined(d: int) -> None:
    it = iteration(DECODES, CHUNKS, 8, 2, d, 256, torch.bfloat16, "cuda")
    backend = make_host_attention("flash-attn", shape_of(it))
    assert_attention(backend.attend(it.q, it.kv, LAYER, backend.prepare(it.requests), out=empty_out(it)), it, 1e-2)
