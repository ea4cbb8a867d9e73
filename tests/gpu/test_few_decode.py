"""Attention of a few requests, whose K and V are read before the kernel in front ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import test_attention
import test_fp8_attention
import triton
import triton.language as tl
from test_attention import BENT, MORE, PLAIN, Bent, pool, upload
from test_fp8_engine import PAGES, WEIGHTS, check_beside_twins, checkpoint  # noqa: F401 (checkpoint is a fixture)

from weft.kernels import attention_triton, fp8
from weft.kernels.attention_triton import TritonAttention
from weft.kernels.decode_attention import decode_attention
from weft.kernels.decode_workspace import decode_workspace
from weft.kernels.dependent_launch import begin, dependent_launch, pdl_options, release
from weft.kernels.few_decode import MOST_TOKENS, few_decode
from weft.kernels.work_lists import ITEM_FIELDS, decode_items

pytestmark = pytest.mark.usefixtures("rounded")


def of_16_bits(q: Tensor, kv: Tensor, layer: int, *rest: Any, **options: Any) -> Tensor:
    return few_decode(q, kv, None, layer, *rest, **options)


FORMATS = {
    "16 bits": partial(test_attention.check_decode, kernel=of_16_bits),
    "e4m3": partial(test_fp8_attention.check_decode, kernel=few_decode),
}


@pytest.fixture(params=list(FORMATS))
def check(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Decodes over a poisoned pool, twice, beside attention in float32."""
    return FORMATS[request.param]


@pytest.mark.parametrize(("page", "part_tokens"), [(16, 0), (64, 128)])
def test_short_requests(page: int, part_tokens: int, check: Callable[..., None], device: str, num_sms: int) -> None:
    check([1, 64, 150, 33, 2], 6, 2, 64, page, torch.float16, device, num_sms, part_tokens)


@pytest.mark.parametrize("length", [128, 129, 130, 257])
def test_the_own_token_may_be_all_of_a_part_or_the_last_of_a_block(
    length: int, check: Callable[..., None], device: str, num_sms: int
) -> None:
    check([length], 4, 1, 64, 64, torch.float16, device, num_sms, 128)


def test_parts_longer_than_a_block(check: Callable[..., None], device: str, num_sms: int) -> None:
    check([700, 300], 2, 1, 64, 64, torch.float16, device, num_sms, 256)


def test_more_parts_than_are_joined_at_once(check: Callable[..., None], device: str, num_sms: int) -> None:
    check([2600], 16, 1, 64, 128, torch.float16, device, num_sms, 128)


@pytest.mark.parametrize("bent", [Bent(24), Bent(40, 3.0, True)], ids=str)
def test_bent_scores(bent: Bent, check: Callable[..., None], device: str, num_sms: int) -> None:
    check([1, 64, 150, 33], 6, 2, 64, 16, torch.float16, device, num_sms, 128, bent=bent)


def test_heads_of_another_size(check: Callable[..., None], device: str, num_sms: int) -> None:
    check([1, 64, 70], 4, 2, 80, 16, torch.float16, device, num_sms)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("bent", [PLAIN, *BENT], ids=str)
@pytest.mark.parametrize(("group", "d"), [(1, 128), (3, 128), (4, 128), (8, 64), (16, 128), (4, 256), (5, 80)])
@pytest.mark.usefixtures("large")
def test_every_shape(
    group: int, d: int, bent: Bent, page: int, check: Callable[..., None], device: str, num_sms: int
) -> None:
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000, 9999]
    check(lengths, 2 * group, 2, d, page, torch.bfloat16, device, num_sms, bent=bent)
    check([20000, 1, 700], 2 * group, 2, d, page, torch.float16, device, 3, part_tokens=512, bent=bent)


def test_nothing_to_do_is_waited_for_and_done(device: str, num_sms: int) -> None:
    kv, table = pool([3], 16, 2, 64, torch.float16, device)
    out = torch.full((2, 256), float("nan"), dtype=torch.float16, device=device)
    few_decode(
        torch.randn(2, 4, 64, device=device).half(), kv, None, 1, table,
        *upload(np.zeros((0, ITEM_FIELDS), np.int32), ITEM_FIELDS, device), out=out, num_sms=num_sms,
        space=decode_workspace(4, 1, 2, 2, 64, device),
    )  # fmt: skip
    assert bool(out.isnan().all())


def test_pages_and_scales_must_fit(device: str, num_sms: int) -> None:
    kv, table = pool([3], 16, 2, 64, torch.float16, device)
    q = torch.randn(1, 4, 64, device=device).half()
    work = upload(np.zeros((0, ITEM_FIELDS), np.int32), ITEM_FIELDS, device)
    options: Any = {"out": q.flatten(1), "num_sms": num_sms, "space": decode_workspace(4, 1, 2, 2, 64, device)}
    with pytest.raises(TypeError, match="have scales"):
        few_decode(q, kv, fp8.unit_kv_scales(3, 2, device), 1, table, *work, **options)
    with pytest.raises(TypeError, match="need scales"):
        few_decode(q, kv.to(fp8.E4M3), None, 1, table, *work, **options)


@triton.jit
def _write_kernel(fresh, kv, row, query, q, N: tl.constexpr, M: tl.constexpr, NEXT: tl.constexpr, PDL: tl.constexpr):
    """K and V `fresh [2, N]` of one token to `kv` at `row`, NEXT numbers apart, and `query [M]` to `q`. The next kernel
    may start before any of it is written."""
    release(PDL)
    begin(PDL)
    n = tl.arange(0, N)
    for part in tl.static_range(2):
        tl.store(kv + row + part * NEXT + n, tl.load(fresh + part * N + n))
    m = tl.arange(0, M)
    tl.store(q + m, tl.load(query + m))


def test_what_the_kernel_in_front_writes_is_seen(device: str, num_sms: int) -> None:
    """Each layer's q, and K and V of the own token, come just before; on a GPU in a captured chain, in which a kernel
    may start before the one in front has written them."""
    on_gpu = device == "cuda"
    length, layers, heads, kv_heads, d = (1000, 24, 32, 8, 128) if on_gpu else (130, 2, 4, 2, 64)
    kv, table = pool([length], 64, kv_heads, d, torch.float16, device)
    kv = kv[:, 1:2].expand(-1, layers, -1, -1, -1, -1).contiguous()
    page, place = int(table[0, (length - 1) // 64]), (length - 1) % 64
    items = decode_items(np.array([length]), num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=64)
    work = upload(items, ITEM_FIELDS, device)
    spaces = [decode_workspace(64, 1, kv_heads, heads // kv_heads, d, device) for _ in range(2)]
    fresh = torch.empty(layers, 2, kv_heads * d, dtype=kv.dtype, device=device)
    queries = torch.empty(layers, 1, heads, d, dtype=kv.dtype, device=device)
    q = torch.empty_like(queries[0])
    mine, theirs = (torch.empty(layers, 1, heads * d, dtype=kv.dtype, device=device) for _ in range(2))

    def chain(out: Tensor, attend: Callable[..., object], space: Any) -> None:
        for layer in range(layers):
            row = ((page * layers + layer) * 2 * 64 + place) * kv_heads * d
            _write_kernel[(1,)](
                fresh[layer], kv, row, queries[layer], q, kv_heads * d, heads * d, 64 * kv_heads * d, **pdl_options()
            )  # fmt: skip
            attend(q, kv, layer, table, *work, out=out[layer], num_sms=num_sms, space=space)

    def replay() -> None:
        chain(mine, of_16_bits, spaces[0])

    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with dependent_launch(True):
            replay()
            with torch.cuda.graph(graph):
                replay()
    for _ in range(20 if on_gpu else 1):
        fresh.normal_()
        queries.normal_()
        q.fill_(float("nan"))
        kv[page, :, :, place] = float("nan")
        (graph.replay if on_gpu else replay)()
        with dependent_launch(False):
            chain(theirs, partial(decode_attention, portable=not on_gpu), spaces[1])
        assert test_attention.error(mine, theirs) < 6e-3


@pytest.mark.parametrize(
    "formats",
    [pytest.param({}, marks=MORE), pytest.param(PAGES, marks=MORE), WEIGHTS | PAGES],
    ids=["16 bits", "pages", "weights and pages"],
)
@pytest.mark.usefixtures("device")
def test_an_engines_tokens_are_those_of_the_twins(
    formats: dict[str, Any],
    checkpoint: Callable[[str], Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TritonAttention, "few", MOST_TOKENS)
    layers = []
    monkeypatch.setattr(attention_triton, "few_decode", lambda *a, **o: (layers.append(a[3]), few_decode(*a, **o))[1])
    path = checkpoint("qwen3, wide heads" if formats.get("quantization") else "llama3.1")
    check_beside_twins(path, formats, monkeypatch)
    assert set(layers) == {0, 1}


def test_a_decode_whose_sums_depend_on_nobody_is_left_to_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.attention import AttentionShape

    monkeypatch.setattr(TritonAttention, "few", MOST_TOKENS)
    shape = AttentionShape(4, 2, 64, 16, torch.float16, torch.device("meta"))
    assert TritonAttention(shape, 4).few == MOST_TOKENS
    assert TritonAttention(shape, 4, batch_invariant=True).few == 0
