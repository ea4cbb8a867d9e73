"""Attention back ends on the CPU: results against the definition, requirements with clear errors."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import LAYER, Iteration, assert_attention, empty_out, iteration
from torch import Tensor

from weft.kernels.attention import torch_backend as attention_torch
from weft.kernels.attention.backend import AttentionShape, AttentionUnavailable, HostAttention
from weft.kernels.attention.backends import check, choose, make_host_attention
from weft.kernels.attention.torch_backend import TorchAttention

CPU = torch.device("cpu")


def shape_of(it: Iteration) -> AttentionShape:
    return AttentionShape(it.q.shape[1], it.kv.shape[4], it.kv.shape[5], it.kv.shape[3], it.kv.dtype, it.kv.device)


def run(backend: HostAttention[Any], it: Iteration) -> Tensor:
    return backend.attend(it.q, it.kv, LAYER, backend.prepare(it.requests), out=empty_out(it))


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 4, 16), (6, 2, 32), (14, 2, 16), (12, 6, 16)])
def test_torch_attends_as_defined(heads: int, kv_heads: int, d: int, page: int) -> None:
    it = iteration(
        [1, page, page + 1, 3 * page - 1, 40], [(0, 5), (page, 33), (7, 1), (0, 70)], heads, kv_heads, d, page
    )
    assert_attention(run(TorchAttention(shape_of(it)), it), it, 1e-5)


@given(
    decodes=st.lists(st.integers(1, 90), max_size=5),
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=4),
    page=st.sampled_from([16, 32]),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_torch_attends_as_defined_in_any_mix(
    decodes: list[int], chunks: list[tuple[int, int]], page: int, seed: int
) -> None:
    if decodes or chunks:
        it = iteration(decodes, chunks, 4, 2, 8, page, seed=seed)
        assert_attention(run(TorchAttention(shape_of(it)), it), it, 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (12, 6)])
@pytest.mark.parametrize(
    "parts",
    [{"window": 1}, {"window": 21}, {"softcap": 2.0}, {"scale": 0.7}, {"sinks": True}, {"window": 50, "softcap": 1.0}],
)
def test_torch_attends_with_every_part_as_defined(heads: int, kv_heads: int, parts: dict[str, Any]) -> None:
    it = iteration([1, 16, 90, 33], [(0, 5), (70, 33), (20, 1), (0, 70)], heads, kv_heads, 16, 16)
    window, sinks = parts.get("window"), torch.randn(heads) if parts.pop("sinks", False) else None
    if window:  # pages that no query sees any more may belong to another request
        for row, (queries, length) in enumerate(zip(it.requests.query_len, it.requests.kv_len, strict=True)):
            unseen = max(0, length - queries - window + 1) // 16
            it.kv[it.requests.page_table[row, :unseen]] = float("nan")
            it.requests.page_table[row, :unseen] = 0
    named = {"windows": (None, window), **{k: v for k, v in parts.items() if k != "window"}, "sinks": sinks is not None}
    backend = TorchAttention(shape_of(it)._replace(**named))
    step = backend.prepare(it.requests)
    out = backend.decode(it.q, it.kv, LAYER, step, out=empty_out(it), sinks=sinks)
    assert_attention(backend.prefill(it.q, it.kv, LAYER, step, out=out, sinks=sinks), it, 1e-5, sinks=sinks, **parts)


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"windows": (64,)}, "windows"),
        ({"softcap": 1.0}, "soft-cap"),
        ({"sinks": True}, "sinks"),
        ({"scale": 1.0}, "scale"),
    ],
)
def test_a_part_that_flash_attn_does_not_support_here_is_named(part: dict[str, Any], word: str) -> None:
    shape = AttentionShape(8, 2, 64, 16, torch.bfloat16, torch.device("cuda"), **part)
    with pytest.raises(AttentionUnavailable, match=word):
        check("flash-attn", shape)
    check("triton", shape)


def test_torch_bounds_the_memory_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    it = iteration([60] * 12, [(30, 9)] * 5, 4, 2, 8, 16)
    whole = TorchAttention(shape_of(it)).prepare(it.requests)[None]
    assert (len(whole.decode.groups), len(whole.prefill.groups)) == (1, 1)
    monkeypatch.setattr(attention_torch, "GROUP_ELEMENTS", 4 * 4 * 16 * 2 * 8)
    backend = TorchAttention(shape_of(it))
    step = backend.prepare(it.requests)
    assert len(step[None].decode.groups) == 3
    assert len(step[None].prefill.groups) > 1
    assert_attention(backend.attend(it.q, it.kv, LAYER, step, out=empty_out(it)), it, 1e-5)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q `[n, Hq, D]` after k, v `[m, Hkv, D]`, with the causal mask aligned to the bottom right corner."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    o = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen
    )
    return o.transpose(0, 1)


class FakeFlash:
    """The package's functions in torch, with the documented arguments that we use and their requirements.

    Like the real ones, they read no key after a sequence's length. An unsupported argument is a TypeError.
    """

    def __init__(self, version: int) -> None:
        self.version, self.splits = version, set[int]()
        self.calls: list[str] = []

    def _attend(
        self, q: tuple[Tensor, ...], k: Tensor, v: Tensor, lengths: Tensor, table: Tensor, name: str
    ) -> list[Tensor]:
        self.calls.append(name)
        if k.stride(-1) != 1 or v.stride(-1) != 1 or table.stride(-1) != 1:
            raise RuntimeError("the last dimension must be contiguous")
        if lengths.dtype != torch.int32 or table.dtype != torch.int32:
            raise RuntimeError("lengths and page table must be int32")
        if self.version == 2 and k.shape[1] % 256:
            raise RuntimeError("pages must be multiples of 256 tokens")
        pages = [
            (k[p.long()].flatten(0, 1)[:n], v[p.long()].flatten(0, 1)[:n])
            for p, n in zip(table, lengths.tolist(), strict=True)
        ]
        return [_attend_dense(part, *dense) for part, dense in zip(q, pages, strict=True)]

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, *, causal: bool, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        queries, keys = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert causal
        assert (max_seqlen_q, max_seqlen_k) == (int(queries.max()), int(keys.max()))
        return torch.cat(self._attend(q.split(queries.tolist()), k, v, keys, block_table, "varlen"))

    def kvcache_2(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, causal: bool,
        num_splits: int,
    ) -> Tensor:  # fmt: skip
        assert causal
        self.splits.add(num_splits)
        return torch.stack(self._attend(q.unbind(), k_cache, v_cache, cache_seqlens, block_table, "kvcache"))

    def kvcache_3(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, causal: bool,
        num_splits: int, cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None,
    ) -> Tensor:  # fmt: skip
        if cu_seqlens_q is None:
            return self.kvcache_2(
                q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table, causal=causal,
                num_splits=num_splits,
            )  # fmt: skip
        queries = cu_seqlens_q.diff()
        assert causal
        assert max_seqlen_q == int(queries.max())
        self.splits.add(num_splits)
        return torch.cat(
            self._attend(q.split(queries.tolist()), k_cache, v_cache, cache_seqlens, page_table, "kvcache")
        )


@pytest.fixture(params=[2, 3])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    fake = FakeFlash(request.param)
    name = "flash_attn_interface" if fake.version == 3 else "flash_attn"
    module: Any = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.flash_attn_varlen_func = fake.varlen
    module.flash_attn_with_kvcache = fake.kvcache_3 if fake.version == 3 else fake.kvcache_2
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("weft.kernels.attention.flash_backend._has_version_3", lambda _: fake.version == 3)
    return fake


MIXES = {
    "decodes": ([1, 256, 257, 700], []),
    "chunks": ([], [(0, 5), (256, 33), (300, 1)]),
    "both": ([3, 512], [(0, 300), (7, 2)]),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_flash_attn_attends_as_defined(fake: FakeFlash, mix: str, heads: int, kv_heads: int) -> None:
    it = iteration(*MIXES[mix], heads, kv_heads, 16, 256, torch.bfloat16)
    backend = make_host_attention("flash-attn", shape_of(it))
    out = run(backend, it)
    assert_attention(out, it, 1e-2)
    wanted = {"decodes": ["kvcache"], "chunks": ["chunks"], "both": ["kvcache", "chunks"]}[mix]
    assert fake.calls == [("varlen" if fake.version == 2 else "kvcache") if c == "chunks" else c for c in wanted]
    assert fake.splits <= {0}
    assert torch.equal(out.isnan(), run(TorchAttention(shape_of(it)), it).isnan())


@pytest.mark.parametrize("fake", [3], indirect=True)
def test_flash_attn_3_accepts_small_pages(fake: FakeFlash) -> None:
    it = iteration([70], [(16, 9)], 4, 2, 16, 16, torch.float16)
    assert_attention(run(make_host_attention("flash-attn", shape_of(it)), it), it, 1e-2)
    assert fake.version == 3


def test_batch_invariant_flash_attn_does_not_split(fake: FakeFlash) -> None:
    it = iteration([700], [(0, 4)], 4, 2, 16, 256, torch.bfloat16)
    run(make_host_attention("flash-attn", shape_of(it), batch_invariant=True), it)
    assert fake.splits == {1}


def test_host_back_ends_are_not_captured(fake: FakeFlash) -> None:
    it = iteration([2], [], 2, 2, 16, 256, torch.bfloat16)
    assert fake.version
    assert not make_host_attention("flash-attn", shape_of(it)).captured
    assert not make_host_attention("torch", shape_of(it)).captured


GPU_SHAPE = AttentionShape(32, 8, 128, 64, torch.bfloat16, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("triton", {"page_size": 256}, "pages of 16, 32, 64 or 128 tokens, not 256"),
        ("triton", {"head_dim": 72}, "the model has 72; use flash-attn or torch"),
        ("triton", {"num_heads": 32, "num_kv_heads": 1}, "up to 16 query heads per KV head"),
        ("triton", {"device": CPU}, "needs a GPU; on a CPU use auto or torch"),
        ("flash-attn", {"device": CPU}, "needs a GPU; on a CPU use auto or torch"),
    ],
)
def test_a_shape_that_a_back_end_cannot_serve_is_a_one_line_error(
    name: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(AttentionUnavailable, match=message) as error:
        check(name, GPU_SHAPE._replace(**change))
    assert "\n" not in str(error.value)


def test_triton_serves_common_shapes() -> None:
    for page in (16, 32, 64, 128):
        for head_dim in (64, 80, 96, 128, 192, 256):
            check("triton", GPU_SHAPE._replace(page_size=page, head_dim=head_dim))


@pytest.mark.parametrize("fake", [2], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 64}, "multiple of 256 tokens, not 64: set the page size to 256"),
        ({"dtype": torch.float32}, "bfloat16 or float16"),
        ({"head_dim": 320}, "multiple of 8 up to 256, the model has 320"),
    ],
)
def test_flash_attn_reports_its_requirements(fake: FakeFlash, change: dict[str, Any], message: str) -> None:
    fits = AttentionShape(4, 2, 64, 256, torch.bfloat16, CPU)
    make_host_attention("flash-attn", fits)
    with pytest.raises(AttentionUnavailable, match=message):
        make_host_attention("flash-attn", fits._replace(**change))
    assert not fake.calls


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(AttentionUnavailable, match=r"pip install -e '\.\[flash-attn\]'"):
        make_host_attention("flash-attn", AttentionShape(4, 2, 64, 256, torch.bfloat16, CPU))


def test_auto_depends_on_the_device() -> None:
    assert choose("auto", CPU) == "torch"
    assert choose("auto", torch.device("cuda")) == "triton"
    assert choose("flash-attn", torch.device("cuda")) == "flash-attn"
    with pytest.raises(AttentionUnavailable, match="unknown"):
        choose("xformers", CPU)


def test_triton_is_not_planned_on_the_host() -> None:
    with pytest.raises(AttentionUnavailable):
        make_host_attention("triton", GPU_SHAPE)


def test_the_oracle_matches_a_closed_form() -> None:
    """Equal keys: every weight is the same, the result is the mean of the visible values."""
    it = iteration([5], [(2, 3)], 2, 1, 8, 16)
    it.kv[:, LAYER, 0] = 1.0
    out = run(TorchAttention(shape_of(it)), it)
    pages = it.requests.page_table[:, 0]
    means = [it.kv[pages[0], LAYER, 1, :5].mean(0)] + [it.kv[pages[1], LAYER, 1, :n].mean(0) for n in (3, 4, 5)]
    want = torch.stack([m.expand(2, -1).flatten() for m in means])
    torch.testing.assert_close(out[:4], want)


def test_an_iteration_without_chunks_leaves_their_output_unchanged() -> None:
    it = iteration([9, 4], [], 4, 2, 8, 16)
    backend = TorchAttention(shape_of(it))
    out = backend.prefill(it.q, it.kv, LAYER, backend.prepare(it.requests), out=empty_out(it))
    assert bool(out.isnan().all())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.floats(0, 40))
def test_decodes_are_grouped_at_the_lowest_cost(pages: list[int], group_pages: float) -> None:
    """Some best grouping cuts the sorted lengths, so trying all cuts finds the lowest cost."""

    def cost(groups: list[list[int]]) -> float:
        return sum(group_pages + len(group) * max(group) for group in groups)

    ordered, lowest = sorted(pages), math.inf
    for cuts in itertools.product((False, True), repeat=len(pages) - 1):
        groups = [[ordered[0]]]
        for length, cut in zip(ordered[1:], cuts, strict=True):
            if cut:
                groups.append([])
            groups[-1].append(length)
        lowest = min(lowest, cost(groups))
    rows = list(attention_torch._cheapest(np.array(pages, np.int32), group_pages))
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(pages)))
    assert cost([[pages[row] for row in group] for group in rows]) == pytest.approx(lowest)
