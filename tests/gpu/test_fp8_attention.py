"""Paged attention over pages in e4m3 against plain attention in float32 over their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import reference_fp8 as fp8_reference
from test_attention import BENT, LAYER, LAYERS, PLAIN, Bent, attend, error, forget, pool, upload

from weft.kernels.attention import fp8_attention, fp8_unpack
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.prefill_attention import prefill_attention
from weft.kernels.attention.work_lists import ITEM_FIELDS, TILE_FIELDS, decode_items, prefill_items
from weft.kernels.formats import fp8
from weft.kernels.formats.fp8 import KvScales

pytestmark = pytest.mark.usefixtures("rounded")
PORTABLE = partial(fp8_attention.decode_attention, portable=True)
SHORT = [1, 64, 150, 33]


def eight(lengths: list[int], page: int, kv_heads: int, d: int, device: str) -> tuple[Tensor, Tensor, KvScales, Tensor]:
    """A poisoned pool in e4m3, its page table, its scales (all different), and its values."""
    values, table = pool(lengths, page, kv_heads, d, torch.float32, device)
    scale = torch.linspace(0.004, 0.02, LAYERS * 2 * kv_heads, device=device).view(LAYERS, 2, kv_heads)
    scales = fp8.kv_scales(scale)
    kv = fp8.saturated(values * scales.inverse[:, :, None, :, None])
    return kv, table, scales, fp8_reference.kv_values(kv, scales)


def check_decode(
    lengths: list[int], heads: int, kv_heads: int, d: int, page: int, dtype: torch.dtype, device: str, num_sms: int,
    split_tokens: int = 0, kernel: Callable[..., Tensor] = PORTABLE, bent: Bent = PLAIN,
) -> None:  # fmt: skip
    kv, table, scales, values = eight(lengths, page, kv_heads, d, device)
    q = torch.randn(len(lengths) + 2, heads, d, device=device).to(dtype)
    items = decode_items(
        np.array(lengths), num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=256, split_tokens=split_tokens,
        window=bent.window, page_size=page,
    )  # fmt: skip
    options: dict[str, Any] = {}
    if bent.window is not None:
        first_seen = [max(0, n - bent.window) for n in lengths]
        forget(values, table.clone(), first_seen, page)
        bytes_of = kv.view(torch.uint8)
        for row, seen in zip(table, first_seen, strict=True):
            for j in range(seen // page):
                bytes_of[int(row[j])] = 127
                row[j] = 0
    if bent != PLAIN:
        options = {
            "windowed": bent.window is not None, "softcap": bent.softcap, "sinks": bent.sinks(heads, device)
        }  # fmt: skip
    space = decode_workspace(256, len(lengths), kv_heads, heads // kv_heads, d, device)
    out = torch.full((len(q), heads * d), float("nan"), dtype=dtype, device=device)
    work = upload(items, ITEM_FIELDS, device)
    space.partial.fill_(float("nan"))
    kernel(q, kv, scales, LAYER, table, *work, out=out, num_sms=num_sms, space=space, **options)
    again = out.clone()
    space.partial.fill_(float("nan"))
    kernel(q, kv, scales, LAYER, table, *work, out=again, num_sms=num_sms, space=space, **options)
    assert torch.equal(again[: len(lengths)], out[: len(lengths)])
    want = torch.cat([attend(q[i : i + 1], values, table[i, : -(-n // page)], n, bent) for i, n in enumerate(lengths)])
    assert error(out[: len(lengths)], want) < 6e-3
    assert bool(out[len(lengths) :].isnan().all())
    assert int(space.arrived.abs().sum()) == 0
    assert space.tickets.tolist() == [0, 0]


@pytest.mark.parametrize(("page", "split_tokens"), [(16, 0), (64, 128)])
def test_decode_of_short_requests(page: int, split_tokens: int, device: str, num_sms: int) -> None:
    check_decode(SHORT, 6, 2, 64, page, torch.bfloat16, device, num_sms, split_tokens)


@pytest.mark.parametrize("bent", [Bent(24), Bent(40, 3.0, True)], ids=str)
def test_decode_with_bent_scores(bent: Bent, device: str, num_sms: int) -> None:
    check_decode(SHORT, 6, 2, 64, 16, torch.float16, device, num_sms, 128, bent=bent)


def test_decode_of_heads_of_another_size(device: str, num_sms: int) -> None:
    check_decode([1, 64, 70], 4, 2, 80, 16, torch.float16, device, num_sms)


@pytest.fixture(params=["one program an SM", "programs of a warp"])
def hopper(device: str, request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """A kernel for Hopper."""
    if device == "cpu" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from weft.kernels.attention import fp8_decode, fp8_decode_warps

    return fp8_decode.launch_decode if "one" in request.param else fp8_decode_warps.launch_decode


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("group", "d", "dtype"),
    [(g, 128, torch.bfloat16) for g in range(1, 9)]
    + [(1, 64, torch.float16), (4, 64, torch.bfloat16), (16, 128, torch.float16), (8, 256, torch.bfloat16)],
)
def test_hopper_decode(
    group: int, d: int, dtype: torch.dtype, page: int, device: str, num_sms: int, hopper: Callable[..., Tensor]
) -> None:
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000]
    check_decode(lengths, 2 * group, 2, d, page, dtype, device, num_sms, kernel=hopper)
    check_decode(lengths, 2 * group, 2, d, page, dtype, device, 3, split_tokens=128, kernel=hopper)
    check_decode([1 + 17 * i % 700 for i in range(300)], 2 * group, 2, d, page, dtype, device, 24, kernel=hopper)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_both_kernels_for_hopper_give_the_same_bits(d: int, device: str, num_sms: int) -> None:
    if device == "cpu" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from weft.kernels.attention import fp8_decode, fp8_decode_warps

    lengths = [1, 64, 65, 700, 5000]
    kv, table, scales, _ = eight(lengths, 64, 2, d, device)
    q = torch.randn(len(lengths), 8, d, device=device).to(torch.bfloat16)
    items = decode_items(np.array(lengths), num_kv_heads=2, num_programs=4 * num_sms, max_slots=256)
    work = upload(items, ITEM_FIELDS, device)
    outs = []
    for launch in (fp8_decode.launch_decode, fp8_decode_warps.launch_decode):
        out = torch.full((len(lengths), 8 * d), float("nan"), dtype=torch.bfloat16, device=device)
        space = decode_workspace(256, len(lengths), 2, 4, d, device)
        outs.append(launch(q, kv, scales, LAYER, table, *work, out=out, num_sms=num_sms, space=space))
    assert torch.equal(*outs)


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("bent", BENT, ids=str)
def test_hopper_decode_with_bent_scores(
    bent: Bent, page: int, device: str, num_sms: int, hopper: Callable[..., Tensor]
) -> None:
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000, 9999]
    check_decode(lengths, 16, 2, 128, page, torch.bfloat16, device, num_sms, kernel=hopper, bent=bent)
    check_decode(lengths, 8, 2, 64, page, torch.float16, device, 3, split_tokens=128, kernel=hopper, bent=bent)


@pytest.mark.parametrize("page", [16, 64, 128])
def test_hopper_decode_of_one_long_request_is_split(
    page: int, device: str, num_sms: int, hopper: Callable[..., Tensor]
) -> None:
    check_decode([9999], 32, 8, 128, page, torch.bfloat16, device, num_sms, kernel=hopper)
    check_decode([20000, 1, 700], 32, 8, 128, page, torch.bfloat16, device, num_sms, split_tokens=512, kernel=hopper)


def in_16_bits(kv: Tensor, scales: KvScales, table: Tensor, pages: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A request's pages after those of the previous one: pages of 16 bits of one layer, and their table."""
    numbers = torch.cat([table[i, :count] for i, count in enumerate(pages)]).to(torch.int32)
    none = torch.zeros(0, dtype=torch.int32, device=kv.device)
    room = sum(pages) + 2
    wide = torch.full((room, 1, 2, *kv.shape[3:]), float("nan"), dtype=dtype, device=kv.device)
    what = fp8_unpack.Unpacked(
        torch.cat((numbers, torch.full((2,), 10**6, dtype=torch.int32, device=kv.device))),
        torch.tensor([sum(pages)], dtype=torch.int32, device=kv.device), none, none, wide,
        fp8_unpack.counting_table(room, max(pages), kv.device),
    )  # fmt: skip
    fp8_unpack.unpack_pages(kv, scales, LAYER, what, num_sms=2)
    assert bool(wide[sum(pages) :].isnan().all())
    return wide, what.table


def check_prefill(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, d: int, page: int, dtype: torch.dtype, device: str,
    num_sms: int, way: str, bent: Bent = PLAIN,
) -> None:  # fmt: skip
    """chunks: (tokens already in pages, queries)."""
    lengths = [c + n for c, n in chunks]
    kv, table, scales, values = eight(lengths, page, kv_heads, d, device)
    queries = np.array([n for _, n in chunks])
    first = np.cumsum(queries) - queries + 3
    q = torch.randn(int(queries.sum()) + 6, heads, d, device=device).to(dtype)
    pages = [-(-n // page) for n in lengths]
    own = np.cumsum(pages) - pages if way == "unpacked" else np.arange(len(chunks))
    items = prefill_items(first, queries, np.array([c for c, _ in chunks]), own, group=heads // kv_heads)
    out = torch.full((len(q), heads * d), float("nan"), dtype=dtype, device=device)
    work = upload(items, TILE_FIELDS, device)
    options = {"out": out, "num_sms": num_sms, "window": bent.window, "softcap": bent.softcap,
               "sinks": bent.sinks(heads, device)}  # fmt: skip
    if way == "unpacked":
        wide, places = in_16_bits(kv, scales, table, pages, dtype)
        prefill_attention(q, wide, 0, places, *work, portable=device == "cpu", **options)
    else:
        fp8_attention.prefill_attention(q, kv, scales, LAYER, table, *work, **options)
    for i, n in enumerate(lengths):
        rows = slice(int(first[i]), int(first[i] + queries[i]))
        assert error(out[rows], attend(q[rows], values, table[i, : -(-n // page)], n, bent)) < 6e-3
    assert bool(out[:3].isnan().all())
    assert bool(out[-3:].isnan().all())


@pytest.mark.parametrize(("bent", "page"), [(PLAIN, 64), (Bent(40, 3.0, True), 16)], ids=str)
@pytest.mark.parametrize("way", ["directly", "unpacked"])
def test_prefill_of_short_chunks(way: str, bent: Bent, page: int, device: str, num_sms: int) -> None:
    check_prefill([(0, 5), (70, 40)], 6, 2, 64, page, torch.float16, device, num_sms, way, bent)


@pytest.mark.parametrize("way", ["directly", "unpacked"])
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize(("group", "d"), [(1, 128), (4, 128), (7, 64), (4, 256)])
@pytest.mark.usefixtures("large")
def test_prefill(group: int, d: int, page: int, way: str, device: str, num_sms: int) -> None:
    chunks = [(0, 1), (0, 33), (0, 128), (100, 28), (128, 300), (1000, 7), (63, 65), (640, 1), (5, 700)]
    check_prefill(chunks, 2 * group, 2, d, page, torch.bfloat16, device, num_sms, way)


def test_pages_of_another_format_are_refused(device: str, num_sms: int) -> None:
    kv, table = pool([3], 16, 2, 64, torch.float16, device)
    q = torch.randn(1, 4, 64, device=device).half()
    work = upload(np.zeros((0, ITEM_FIELDS), np.int32), ITEM_FIELDS, device)
    with pytest.raises(TypeError, match="e4m3"):
        fp8_attention.decode_attention(
            q, kv, fp8.unit_kv_scales(LAYERS, 2, device), LAYER, table, *work, out=torch.empty(1, 256, device=device),
            num_sms=num_sms, space=decode_workspace(4, 1, 2, 2, 64, device),
        )  # fmt: skip
