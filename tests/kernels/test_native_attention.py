"""Decode attention in C++: equal to a direct computation, and a request's bits do not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.native_backend import NativeAttention, serves
from weft.kernels.attention.torch_backend import TorchAttention
from weft.kernels.native import library

LAYERS, PAGES = 3, 60


class Requests(NamedTuple):
    num_decodes: int
    query_len: np.ndarray
    kv_len: np.ndarray
    page_table: np.ndarray
    until: np.ndarray | None = None


@pytest.fixture(scope="module", params=[name for name, _, _ in library.VARIANTS])
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Load each variant in turn; the cache is that of the products' tests."""
    if request.param not in library.variants(library.cpu_flags()):
        pytest.skip(f"this CPU has no {request.param}")
    try:
        found = library.open_variant(request.param, tmp_path_factory.getbasetemp())
    except library.NoLibrary as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_loaded", found)
        yield request.param


def shape_of(head_dim: int = 64, heads: int = 6, kv_heads: int = 2, **others: object) -> AttentionShape:
    return AttentionShape(
        heads, kv_heads, head_dim, 4, torch.float32, torch.device("cpu"), windows=(None, 7, 40)
    )._replace(**others)  # fmt: skip


def requests_of(lengths: list[int], seed: int = 0, chunk: int = 0) -> Requests:
    """Decodes of these lengths, with pages in any order; then one request with a chunk."""
    rng = np.random.default_rng(seed)
    every = np.array([*lengths, *([chunk + 3] if chunk else [])], np.int32)
    pages = -(-every // 4)
    table = np.zeros((len(every), int(pages.max()) + 2), np.int32)
    free = rng.permutation(np.arange(1, PAGES))
    for row, count in enumerate(pages):
        table[row, :count], free = free[:count], free[count:]
    queries = np.array([1] * len(lengths) + ([chunk] if chunk else []), np.int32)
    return Requests(len(lengths), queries, every, table)


def pool(shape: AttentionShape) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(PAGES, LAYERS, 2, 4, shape.num_kv_heads, shape.head_dim, generator=generator)
    return made.to(shape.dtype)


def expected(q: Tensor, kv: Tensor, layer: int, asked: Requests, shape: AttentionShape, sinks: Tensor | None) -> Tensor:
    """Attention in float64, one head after the other."""
    scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
    out = torch.zeros(asked.num_decodes, shape.num_heads, shape.head_dim, dtype=torch.float64)
    for row in range(asked.num_decodes):
        length = int(asked.kv_len[row])
        positions = range(max(0, length - (shape.window(layer) or length)), length)
        pages = [int(asked.page_table[row, p // 4]) for p in positions]
        for head in range(shape.num_heads):
            own = kv[pages, layer, :, [p % 4 for p in positions], head // shape.group].double()  # [keys, 2, D]
            scores = own[:, 0] @ q[row, head].double() * scale
            if shape.softcap:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            out[row, head] = scores.softmax(0)[: len(positions)] @ own[:, 1]
    return out.flatten(1)


SHAPES = (
    shape_of(16), shape_of(64), shape_of(128, heads=4, kv_heads=4), shape_of(256, heads=4, kv_heads=1, scale=0.2),
    shape_of(80, heads=16, kv_heads=1), shape_of(64, softcap=5.0), shape_of(32, sinks=True),
    shape_of(64, dtype=torch.bfloat16, sinks=True), shape_of(256, dtype=torch.bfloat16),
)  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_attention_in_float64(variant: str, shape: AttentionShape) -> None:
    assert serves(shape)
    attention, kv = NativeAttention(shape), pool(shape)
    asked = requests_of([1, 2, 7, 8, 33, 64, 70])
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(7, shape.num_heads, shape.head_dim, generator=generator).to(shape.dtype)
    sinks = torch.randn(shape.num_heads, generator=generator) if shape.sinks else None
    step = attention.prepare(asked)
    for layer in range(LAYERS):
        out = torch.full((9, shape.num_heads * shape.head_dim), 7.0, dtype=shape.dtype)
        attention.decode(q, kv, layer, step, out=out, sinks=sinks)
        want = expected(q, kv, layer, asked, shape, sinks)
        bound = 2e-2 if shape.dtype == torch.bfloat16 else 2e-6
        assert (out[:7].double() - want).abs().max() < bound, (variant, layer)
        assert (out[7:] == 7).all()


def test_a_request_has_the_same_bits_in_any_batch_on_any_threads(variant: str) -> None:
    shape = shape_of()
    attention, kv = NativeAttention(shape), pool(shape)
    asked = requests_of([70, 1, 33, 16, 32, 17])
    q = torch.randn(6, 6, 64)
    whole = attention.decode(q, kv, 1, attention.prepare(asked), out=torch.empty(6, 384))
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for row in range(6):
                part = slice(row, row + 1)
                own = Requests(1, asked.query_len[part], asked.kv_len[part], asked.page_table[part])
                alone = attention.decode(q[part], kv, 1, attention.prepare(own), out=torch.empty(1, 384))
                assert torch.equal(alone, whole[part]), variant
    finally:
        torch.set_num_threads(before)


def test_chunks_are_left_to_torch(variant: str) -> None:
    shape = shape_of()
    native, plain, kv = NativeAttention(shape), TorchAttention(shape), pool(shape)
    asked = requests_of([9, 30], chunk=12)
    q, sizes = torch.randn(14, 6, 64), (14, 384)
    for layer in range(LAYERS):
        got, want = torch.zeros(sizes), torch.zeros(sizes)
        for attention, out in ((native, got), (plain, want)):
            step = attention.prepare(asked)
            attention.decode(q, kv, layer, step, out=out)  # type: ignore[attr-defined]
            attention.prefill(q, kv, layer, step, out=out)  # type: ignore[attr-defined]
        assert torch.equal(got[2:], want[2:]), variant
        assert (got - want).abs().max() < 1e-5


def test_nan_stays_in_its_request(variant: str) -> None:
    shape = shape_of()
    attention, kv = NativeAttention(shape), pool(shape)
    asked = requests_of([5, 9])
    kv[int(asked.page_table[0, 0]), 0, 0, 1] = torch.nan
    out = attention.decode(torch.randn(2, 6, 64), kv, 0, attention.prepare(asked), out=torch.empty(2, 384))
    assert out[0].isnan().all(), variant
    assert out[1].isfinite().all()


def test_what_it_does_not_serve(variant: str) -> None:
    assert not serves(shape_of(24)), variant
    assert not serves(shape_of(512))
    assert not serves(shape_of(64, heads=34, kv_heads=2))
    assert not serves(shape_of(64, kv_dtype=torch.bfloat16))
    assert not serves(shape_of(64, latent=32))
