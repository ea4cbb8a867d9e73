"""The operand that attention, or the embedding, writes is bit-identical to that of a pass over rows of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from test_attention import BENT, LAYER, MORE, PLAIN, PORTABLE, Bent, pool, upload
from test_fp8_attention import eight, in_16_bits
from test_fp8_projections import poisoned

from weft.kernels.attention import fp8_attention
from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.output import Output, output_args
from weft.kernels.attention.prefill_attention import prefill_attention, prefill_workspace
from weft.kernels.attention.work_lists import (
    ITEM_FIELDS,
    SPLIT_FIELDS,
    TILE_FIELDS,
    decode_items,
    prefill_items,
    prefill_splits,
)
from weft.kernels.common.gpu import is_hopper, on_gpu
from weft.kernels.formats.fp8 import BLOCK, E4M3, Fp8Rows, KvScales
from weft.kernels.matmul import embedding, fp8_rows, projections, rows

pytestmark = pytest.mark.usefixtures("rounded")
D = BLOCK
FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture
def hopper(device: str) -> None:
    if not (on_gpu(torch.device(device)) and is_hopper()):
        pytest.skip("needs a Hopper GPU")


def assert_left(attend: Callable[[Output], object], q: Tensor, written: slice) -> None:
    """`attend` writes to an operand the same values as in 16 bits, quantized, and no row except those `written`."""
    tokens, width = len(q), q.shape[1] * D
    plain = torch.zeros(tokens, width, dtype=q.dtype, device=q.device)
    attend(plain)
    want = fp8_rows.quantize_rows(plain, out=poisoned(tokens, width, str(q.device)))
    got = poisoned(tokens, width, str(q.device))
    attend(got)
    assert torch.equal(got.values.view(torch.uint8)[written], want.values.view(torch.uint8)[written])
    assert torch.equal(got.scale[:, written], want.scale[:, written])
    assert len(want.scale[:, written].unique()) > 1, "heads of other sizes"
    rest = torch.ones(tokens, dtype=torch.bool)
    rest[written] = False
    assert bool(got.scale[:, rest].isnan().all())
    assert bool((got.values.view(torch.uint8)[rest] == 127).all())


def spread(kv: Tensor) -> None:
    """V of heads of widely different sizes; the first head's is zero."""
    plane = kv[:, LAYER, 1]
    heads = plane.shape[2]
    size = torch.logspace(-3, 3, heads, device=kv.device) if kv.dtype != E4M3 else torch.ones(heads, device=kv.device)
    size[0] = 0
    plane.copy_((plane.float() * size[:, None]).to(kv.dtype))


def check_decode(
    lengths: list[int], group: int, page: int, dtype: torch.dtype, device: str, num_sms: int, split_tokens: int = 0,
    kernel: Callable[..., object] = PORTABLE, bent: Bent = PLAIN, *, pages_of_eight: bool = False,
) -> None:  # fmt: skip
    kv_heads = 2
    places: tuple[Tensor | KvScales, ...]
    if pages_of_eight:
        kv, table, scales, _ = eight(lengths, page, kv_heads, D, device)
        places = kv, scales
    else:
        kv, table = pool(lengths, page, kv_heads, D, dtype, device)
        places = (kv,)
    spread(kv)
    q = torch.randn(len(lengths) + 2, group * kv_heads, D, device=device).to(dtype)
    items = decode_items(
        np.array(lengths), num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=256, split_tokens=split_tokens,
        window=bent.window, page_size=page,
    )  # fmt: skip
    work = upload(items, ITEM_FIELDS, device)
    space = decode_workspace(256, len(lengths), kv_heads, group, D, device)
    options = {"windowed": bent.window is not None, "softcap": bent.softcap, "sinks": bent.sinks(q.shape[1], device)}

    def attend(out: Output) -> object:
        space.partial.fill_(float("nan"))
        return kernel(q, *places, LAYER, table, *work, out=out, num_sms=num_sms, space=space, **options)

    assert_left(attend, q, slice(0, len(lengths)))


EIGHT = partial(fp8_attention.decode_attention, portable=True)
SHORT = [1, 64, 150, 33]


@pytest.mark.parametrize("split_tokens", [0, 128])
def test_decode(split_tokens: int, device: str, num_sms: int) -> None:
    check_decode(SHORT, 3, 16, FP16, device, num_sms, split_tokens, bent=Bent(40, 3.0, True))


@pytest.mark.parametrize("split_tokens", [0, 128])
def test_decode_over_pages_in_fp8(split_tokens: int, device: str, num_sms: int) -> None:
    check_decode(SHORT, 4, 16, BF16, device, num_sms, split_tokens, EIGHT, pages_of_eight=True)


HOPPER = [
    *((group, BF16, 64, PLAIN) for group in (1, 3, 4, 7, 8)), (4, FP16, 64, PLAIN), (16, FP16, 64, PLAIN),
    *((4, BF16, page, PLAIN) for page in (16, 32, 128)), *((4, BF16, 64, bent) for bent in BENT),
]  # fmt: skip
"""query heads of a KV head, dtype, page size, and the changes to scores"""


@pytest.mark.parametrize(("group", "dtype", "page", "bent"), HOPPER, ids=str)
@pytest.mark.parametrize("kernel", ["16 bits", "one program an SM", "programs of a warp"])
@pytest.mark.usefixtures("hopper")
def test_hopper_decode(
    kernel: str, group: int, dtype: torch.dtype, page: int, bent: Bent, device: str, num_sms: int
) -> None:
    from weft.kernels.attention import decode_hopper, fp8_decode, fp8_decode_warps

    launch: Callable[..., object] = {
        "16 bits": decode_hopper.launch_decode, "one program an SM": fp8_decode.launch_decode,
        "programs of a warp": fp8_decode_warps.launch_decode,
    }[kernel]  # fmt: skip
    options: dict[str, Any] = {"kernel": launch, "bent": bent, "pages_of_eight": kernel != "16 bits"}
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000]
    check_decode(lengths, group, page, dtype, device, num_sms, **options)
    check_decode(lengths, group, page, dtype, device, 3, 128, **options)
    check_decode([1 + 17 * i % 700 for i in range(200)], group, page, dtype, device, 24, **options)
    check_decode([9999, 1], group, page, dtype, device, num_sms, 512, **options)


def check_prefill(
    chunks: list[tuple[int, int]], group: int, page: int, dtype: torch.dtype, device: str, num_sms: int, way: str,
    bent: Bent = PLAIN,
) -> None:  # fmt: skip
    """chunks: (tokens already in pages, queries). way: "portable", "whole" tiles or tiles "cut" along their keys, over
    pages in 16 bits; pages in FP8 "directly", or "unpacked" first."""
    kv_heads, lengths, pages_of_eight = 2, [c + n for c, n in chunks], way in ("directly", "unpacked")
    queries, cached = np.array([n for _, n in chunks]), np.array([c for c, _ in chunks])
    first = np.cumsum(queries) - queries + 3
    q = torch.randn(int(queries.sum()) + 6, group * kv_heads, D, device=device).to(dtype)
    own, scales = np.arange(len(chunks)), None
    if pages_of_eight:
        kv, table, scales, _ = eight(lengths, page, kv_heads, D, device)
    else:
        kv, table = pool(lengths, page, kv_heads, D, dtype, device)
    spread(kv)
    if way == "unpacked":
        assert scales is not None
        pages = [-(-n // page) for n in lengths]
        own = np.cumsum(pages) - pages
        wide, table = in_16_bits(kv, scales, table, pages, dtype)
    items, fields, space = prefill_items(first, queries, cached, own, group=group), TILE_FIELDS, None
    if way == "cut":
        items = prefill_splits(items, num_kv_heads=kv_heads, num_programs=num_sms, max_slots=400, split_keys=256)
        fields, space = SPLIT_FIELDS, prefill_workspace(400, kv_heads, D, device)
    work = upload(items, fields, device)
    options = {"window": bent.window, "softcap": bent.softcap, "sinks": bent.sinks(q.shape[1], device)}

    def attend(out: Output) -> object:
        if way == "directly":
            assert scales is not None
            return fp8_attention.prefill_attention(
                q, kv, scales, LAYER, table, *work, out=out, num_sms=num_sms, **options
            )  # fmt: skip
        pages, layer = (wide, 0) if way == "unpacked" else (kv, LAYER)
        portable = way == "portable" or device == "cpu"
        return prefill_attention(
            q, pages, layer, table, *work, out=out, num_sms=num_sms, portable=portable, space=space, **options
        )  # fmt: skip

    assert_left(attend, q, slice(3, -3))


@pytest.mark.parametrize("way", ["portable", "directly", pytest.param("unpacked", marks=MORE)])
def test_prefill(way: str, device: str, num_sms: int) -> None:
    check_prefill([(0, 5), (70, 40)], 3, 16, FP16, device, num_sms, way, Bent(40, 3.0, True))


@pytest.mark.parametrize(("group", "dtype", "page", "bent"), HOPPER, ids=str)
@pytest.mark.parametrize("way", ["whole", "cut", "unpacked"])
@pytest.mark.usefixtures("hopper")
def test_hopper_prefill(
    way: str, group: int, dtype: torch.dtype, page: int, bent: Bent, device: str, num_sms: int
) -> None:
    if way == "cut" and bent.window is not None:
        pytest.skip("tiles are whole with a window")
    chunks = [(0, 1), (0, 33), (0, 128), (100, 28), (128, 300), (1000, 7), (63, 65), (640, 1), (5, 700)]
    check_prefill(chunks, group, page, dtype, device, num_sms, way, bent)


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.usefixtures("hopper")
def test_one_launch_of_decodes_and_chunks(group: int, device: str, num_sms: int) -> None:
    from weft.kernels.attention.pod_hopper import PodWork, launch_pod

    decodes, chunks, kv_heads = [1, 700, 5000, 64], [(0, 33), (3000, 128), (5, 300)], 2
    count, lengths = len(decodes), [*decodes, *(c + n for c, n in chunks)]
    queries = np.array([n for _, n in chunks])
    kv, table = pool(lengths, 64, kv_heads, D, BF16, device)
    spread(kv)
    q = torch.randn(count + int(queries.sum()) + 2, group * kv_heads, D, device=device).to(BF16)
    items = decode_items(np.array(decodes), num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=256)
    tiles = prefill_items(
        count + np.cumsum(queries) - queries, queries, np.array([c for c, _ in chunks]),
        count + np.arange(len(chunks)), group=group,
    )  # fmt: skip
    parts = prefill_splits(tiles, num_kv_heads=kv_heads, num_programs=num_sms, max_slots=2000)
    space = decode_workspace(256, len(lengths), kv_heads, group, D, device)
    prefills = prefill_workspace(2000, kv_heads, D, device)
    work = (*upload(items, ITEM_FIELDS, device), *upload(parts, SPLIT_FIELDS, device))
    for decoders in (0, num_sms // 3, num_sms):
        pod = PodWork(*work, torch.tensor([decoders], dtype=torch.int32, device=device))

        def attend(out: Output, pod: PodWork = pod) -> object:
            return launch_pod(
                q, kv, LAYER, table, pod, out=out, num_sms=num_sms, decodes=space, prefills=prefills
            )  # fmt: skip

        assert_left(attend, q, slice(0, -2))


def test_only_whole_blocks_may_be_heads(device: str, num_sms: int) -> None:
    kv, table = pool([3], 16, 2, 64, FP16, device)
    q, work = torch.randn(1, 4, 64, device=device).half(), upload(np.zeros((0, ITEM_FIELDS), np.int32), 8, device)
    with pytest.raises(ValueError, match="heads of 128"):
        decode_attention(
            q, kv, LAYER, table, *work, out=poisoned(1, 256, device), num_sms=num_sms,
            space=decode_workspace(4, 1, 2, 2, 64, device), portable=True,
        )  # fmt: skip
    with pytest.raises(ValueError, match="with a scale for each"):
        output_args(poisoned(1, 256, device, 256), 1, D)
    with pytest.raises(ValueError, match="scales must be"):
        output_args(poisoned(1, 256, device), 2, D)


@pytest.mark.parametrize("span", [128, 256])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("hidden", [48, 128, 2096, 4096])
def test_the_embedding_writes_the_first_layers_operand(hidden: int, norm: bool, span: int, device: str) -> None:
    table = (torch.randn(50, hidden, device=device) * torch.logspace(-3, 3, hidden, device=device)).to(BF16)
    table[7, :48] = 0.0
    ids = torch.tensor([3, 7, 49, 7], device=device)
    weight = torch.rand(hidden, device=device).to(BF16) + 0.5 if norm else None
    x, sumsq = torch.empty(4, hidden, dtype=BF16, device=device), projections.sumsq_buffer(hidden, 4, device)
    plain, plain_sums = embedding.embed(ids, table, scale=3.1, out=x.clone(), sumsq=sumsq.clone())
    got = poisoned(5, hidden, device, span)
    _, sums = embedding.embed(
        ids, table, scale=3.1, out=x, sumsq=sumsq, quantized=got.of_tokens(slice(0, 4)), next_norm=weight
    )  # fmt: skip
    assert torch.equal(x, plain)
    torch.testing.assert_close(sums, plain_sums)
    want = fp8_rows.quantize_rows(plain, weight, out=poisoned(4, hidden, device, span))
    assert torch.equal(got.values[:4].view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scale[:, :4], want.scale)
    assert bool(got.scale[:, 4].isnan().all())
    assert bool(got.values[4].float().isnan().all())


@pytest.mark.parametrize("width", [128, 2304])
def test_rows_of_an_operand_are_gathered_with_their_scales(width: int, device: str) -> None:
    a = Fp8Rows(
        torch.randint(0, 127, (6, width), dtype=torch.uint8, device=device).view(E4M3),
        torch.rand(width // BLOCK, 6, device=device),
    )  # fmt: skip
    x, x_out = (torch.randn(6, 64, device=device).half() for _ in range(2))
    at, count = torch.tensor([4, 1, 5, 0], dtype=torch.int32, device=device), torch.tensor([3], device=device)
    out = poisoned(7, width, device)
    rows.gather_rows(x, a, at, count.int(), x_out=x_out, a_out=out)
    picked = at[:3].long()
    assert torch.equal(x_out[:3], x[picked])
    assert torch.equal(out.values[:3].view(torch.uint8), a.values.view(torch.uint8)[picked])
    assert torch.equal(out.scale[:, :3], a.scale[:, picked])
    assert bool(out.scale[:, 3:].isnan().all())
    assert bool(out.values[3:].float().isnan().all())
    with pytest.raises(TypeError, match="both"):
        rows.gather_rows(x, a, at, count.int(), x_out=x_out, a_out=torch.empty(6, width, device=device))
