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
from test_attention import BENT, MORE, PLAIN, Bent, pool, upload
from test_fp8_engine import PAGES, WEIGHTS, check_beside_twins, checkpoint  # noqa: F401 (checkpoint is a fixture)

from weft.kernels import attention_triton, fp8
from weft.kernels.attention_triton import TritonAttention
from weft.kernels.decode_attention import decode_attention
from weft.kernels.decode_workspace import decode_workspace
from weft.kernels.dependent_launch import dependent_launch
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


@pytest.mark.usefixtures("large")
def test_what_the_kernel_in_front_writes_is_seen(device: str, num_sms: int) -> None:
    """In a captured chain of dependent launches: each layer's q, and K and V of the own token, come just before."""
    length, layers, heads, kv_heads, d = 1000, 24, 32, 8, 128
    kv, table = pool([length], 64, kv_heads, d, torch.bfloat16, device)
    kv = kv[:, 1:2].expand(-1, layers, -1, -1, -1, -1).contiguous()
    page, place = int(table[0, (length - 1) // 64]), (length - 1) % 64
    items = decode_items(np.array([length]), num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=64)
    work = upload(items, ITEM_FIELDS, device)
    spaces = [decode_workspace(64, 1, kv_heads, heads // kv_heads, d, device) for _ in range(2)]
    fresh = torch.empty(layers, 2, kv_heads, d, dtype=torch.bfloat16, device=device)
    q = torch.empty(layers, 1, heads, d, dtype=torch.bfloat16, device=device)
    mine, theirs = (torch.empty(layers, 1, heads * d, dtype=torch.bfloat16, device=device) for _ in range(2))

    def chain(out: Tensor, attend: Callable[..., object], space: Any) -> None:
        for layer in range(layers):
            kv[page, layer, :, place].copy_(fresh[layer])
            q[layer].mul_(1.0)
            attend(q[layer], kv, layer, table, *work, out=out[layer], num_sms=num_sms, space=space)

    with dependent_launch(True):
        chain(mine, of_16_bits, spaces[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain(mine, of_16_bits, spaces[0])
    for _ in range(20):
        fresh.normal_()
        q.normal_()
        kv[page, :, :, place] = float("nan")
        graph.replay()
        with dependent_launch(False):
            chain(theirs, decode_attention, spaces[1])
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
