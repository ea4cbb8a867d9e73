"""Attention, layers, steps and samplers with prepared operands, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.prefill_attention import prefill_attention
from weft.kernels.attention.work_lists import decode_items, prefill_items
from weft.kernels.matmul import gemm_launch
from weft.kernels.matmul.tuned import Shape
from weft.kernels.sampling.sampler import sample, sample_scratch
from weft.kernels.tuning.calls import DEVICE, DTYPE, HEAD_DIM, gemm_call, weights
from weft.kernels.tuning.measure import burst


def layer_shapes(hidden: int, inter: int, heads: int, kv_heads: int, head_dim: int = HEAD_DIM) -> list[Shape]:
    return [
        Shape("qkv", (heads + 2 * kv_heads) * head_dim, hidden),
        Shape("residual", hidden, heads * head_dim),
        Shape("gate_up", 2 * inter, hidden),
        Shape("residual", hidden, inter),
    ]


LLAMA_8B = layer_shapes(4096, 14336, 32, 8)
LLAMA_1B = layer_shapes(2048, 8192, 32, 8, 64)


def cublas(tokens: int, weight: Tensor) -> Callable[[], object]:
    a = torch.randn(tokens, weight.shape[1], device=DEVICE, dtype=DTYPE)
    out = torch.empty(tokens, weight.shape[0], device=DEVICE, dtype=DTYPE)
    return lambda: torch.mm(a, weight.t(), out=out)


def decode_calls(
    batch: int, context: int, page: int, layers: int = 8, heads: int = 32, kv_heads: int = 8, head_dim: int = HEAD_DIM,
    lengths: np.ndarray | None = None, num_sms: int = 132, kernel: Callable[..., object] = decode_attention,
    **options: Any,
) -> tuple[list[Callable[[], object]], float]:  # fmt: skip
    """Return decode attention calls for every layer of a pool with randomly placed pages, and the bytes of one call."""
    lengths = np.full(batch, context) if lengths is None else lengths
    per = -(-int(lengths.max()) // page)
    kv = torch.empty(batch * per + 1, layers, 2, page, kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
    for piece in kv.view(-1).chunk(16):
        piece.normal_()
    table = (torch.randperm(batch * per, device=DEVICE, dtype=torch.int32) + 1).view(batch, per)
    q = torch.randn(batch, heads, head_dim, device=DEVICE, dtype=DTYPE)
    items = decode_items(
        lengths, num_kv_heads=kv_heads, num_programs=num_sms * options.get("per_sm", 4), max_slots=1024
    )
    work = torch.from_numpy(items).to(DEVICE)
    count = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    space = decode_workspace(1024, batch, kv_heads, heads // kv_heads, head_dim, DEVICE)
    out = torch.empty(batch, heads * head_dim, device=DEVICE, dtype=DTYPE)

    def call(layer: int) -> Callable[[], object]:
        return lambda: kernel(q, kv, layer, table, work, count, out=out, num_sms=num_sms, space=space, **options)

    return [call(layer) for layer in range(layers)], float(lengths.sum()) * kv_heads * head_dim * 4


def prefill_calls(
    batch: int, queries: int, page: int, context: int = 0, heads: int = 32, kv_heads: int = 8,
    head_dim: int = HEAD_DIM, num_sms: int = 132, portable: bool = False, layers: int = 4,
) -> tuple[list[Callable[[], object]], float]:  # fmt: skip
    """Return prefill attention calls of `batch` chunks, and the FLOPs of one call (causal: half a square)."""
    per = -(-(queries + context) // page)
    kv = torch.randn(batch * per + 1, layers, 2, page, kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
    table = (torch.randperm(batch * per, device=DEVICE, dtype=torch.int32) + 1).view(batch, per)
    q = torch.randn(batch * queries, heads, head_dim, device=DEVICE, dtype=DTYPE)
    rows = np.arange(batch)
    items = prefill_items(
        rows * queries, np.full(batch, queries), np.full(batch, context), rows, group=heads // kv_heads
    )
    work = torch.from_numpy(items).to(DEVICE)
    count = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    out = torch.empty(batch * queries, heads * head_dim, device=DEVICE, dtype=DTYPE)

    def call(layer: int) -> Callable[[], object]:
        return lambda: prefill_attention(q, kv, layer, table, work, count, out=out, num_sms=num_sms, portable=portable)

    flops = 4.0 * batch * heads * head_dim * queries * (context + queries / 2)
    return [call(layer) for layer in range(layers)], flops


def sdpa_calls(batch: int, queries: int, heads: int = 32, head_dim: int = HEAD_DIM) -> list[Callable[[], object]]:
    """Return the same prefill through cuDNN, on dense K and V already repeated for every query head."""
    q, k, v = (torch.randn(batch, heads, queries, head_dim, device=DEVICE, dtype=DTYPE) for _ in range(3))

    def call() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return [call] * 4


def layer_calls(
    shapes: list[Shape], tokens: int, layers: int, num_sms: int, fused: bool, head_dim: int = HEAD_DIM
) -> tuple[list[Callable[[], object]], float, float]:
    """Return the GEMMs of `layers` layers in sequence; FLOPs and weight bytes of one layer."""
    space = gemm_launch.workspace(DEVICE, 1 << 24)
    calls = []
    for _ in range(layers):
        for shape in shapes:
            weight = weights(shape, 1)[0]
            calls.append(
                gemm_call(shape, tokens, weight, space, num_sms, None, head_dim) if fused else cublas(tokens, weight)
            )
    size = float(sum(s.features * s.depth for s in shapes))
    return calls, 2 * tokens * size, 2 * size


def step_calls(
    batch: int, context: int, layers: int, num_sms: int, attention: bool = True
) -> tuple[list[Callable[[], object]], float]:
    """Return a decode step of the 8B shape without embedding and sampling, and the bytes it must read."""
    space = gemm_launch.workspace(DEVICE, 1 << 24)
    attend, kv_bytes = decode_calls(batch, context, 64, layers=layers, num_sms=num_sms)
    calls, total = [], 0.0
    for layer in range(layers):
        for shape in LLAMA_8B:
            total += shape.features * shape.depth * 2
            calls.append(gemm_call(shape, batch, weights(shape, 1)[0], space, num_sms, None))
            if shape.kind == "qkv" and attention:
                calls.append(attend[layer])
                total += kv_bytes
    head = Shape("logits", 128256, 4096)
    calls.append(gemm_call(head, batch, weights(head, 1)[0], space, num_sms, None))
    return calls, total + head.features * head.depth * 2


def run_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def sample_call(rows: int, vocabulary: int, temperature: float, top_k: int, top_p: float) -> Callable[[], object]:
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 2
    t, p, m, u = (torch.full((rows,), v, device=DEVICE) for v in (temperature, top_p, 0.0, 0.5))
    k = torch.full((rows,), top_k, device=DEVICE, dtype=torch.int32)
    out = torch.empty(rows, device=DEVICE, dtype=torch.int64)
    scratch = sample_scratch(rows, DEVICE)
    return lambda: sample(logits, t, k, p, m, u, out=out, scratch=scratch)


def copy_bandwidth() -> float:
    """Return TB/s of a scaled copy, counting bytes read and written."""
    a, b = (torch.empty(1 << 28, device=DEVICE).normal_() for _ in range(2))
    return 2 * 4 * a.numel() / burst([lambda: torch.mul(a, 1.5, out=b)] * 20) / 1e9
