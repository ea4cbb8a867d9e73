"""Paged attention against plain attention in float32, over a pool that is NaN except for the requests' own tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.prefill_attention import prefill_attention
from weft.kernels.attention.work_lists import ITEM_FIELDS, TILE_FIELDS, decode_items, prefill_items

LAYERS, LAYER = 3, 1


class Bent(NamedTuple):
    """Changes of a model to scores, in addition to the causal mask."""

    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False

    def sinks(self, heads: int, device: str) -> Tensor | None:
        return torch.linspace(-3, 6, heads, device=device) if self.has_sinks else None


MORE = () if torch.cuda.is_available() else pytest.mark.nightly
"""of cases that the interpreter takes a second or two for each"""
PLAIN = Bent()
BENT = [
    Bent(window=1), Bent(window=24), Bent(window=100), Bent(softcap=2.0), Bent(has_sinks=True), Bent(40, 3.0, True)
]  # fmt: skip
PORTABLE = partial(decode_attention, portable=True)


def pool(
    lengths: list[int], page: int, kv_heads: int, d: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """A poisoned pool and the page table of requests of these lengths, at random positions."""
    counts = [-(-n // page) for n in lengths]
    total = sum(counts) + 2
    kv = torch.full((total, LAYERS, 2, page, kv_heads, d), float("nan"), dtype=dtype, device=device)
    ids = (torch.randperm(total - 1)[: sum(counts)] + 1).tolist()
    # at least one row, as in an engine: kernels read it before they know whether there is work
    table = torch.zeros(max(1, len(lengths)), max(counts, default=0) + 1, dtype=torch.int32)
    for i, (n, c) in enumerate(zip(lengths, counts, strict=True)):
        mine = [ids.pop() for _ in range(c)]
        table[i, :c] = torch.tensor(mine, dtype=torch.int32)
        for j, p in enumerate(mine):
            kv[p, LAYER, :, : min(page, n - j * page)] = torch.randn(
                2, min(page, n - j * page), kv_heads, d, device=device
            ).to(dtype)
    return kv, table.to(device)


def forget(kv: Tensor, table: Tensor, first_seen: list[int], page: int) -> None:
    """Free the pages that lie wholly before what is seen: other requests may have written anything there."""
    for row, seen in zip(table, first_seen, strict=True):
        for j in range(seen // page):
            kv[int(row[j])] = float("nan")
            row[j] = 0


def attend(
    q: Tensor, kv: Tensor, pages: Tensor, length: int, bent: Bent = PLAIN, until: Tensor | None = None
) -> Tensor:
    """Attention of the last queries `q [Q, Hq, D]` of one request, in float32: `[Q, Hq * D]`. until `[Q]`: the last
    position that each sees; None: its own."""
    k, v = (kv[pages.long(), LAYER, i].flatten(0, 1)[:length].float() for i in (0, 1))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,nhd->hqn", q.float(), k) * q.shape[-1] ** -0.5
    if bent.softcap:
        scores = bent.softcap * (scores / bent.softcap).tanh()
    key = torch.arange(length, device=q.device)[None]
    query = length - q.shape[0] + torch.arange(q.shape[0], device=q.device)[:, None]
    unseen = key > (query if until is None else until[:, None])
    if bent.window is not None:
        unseen |= key <= query - bent.window
    scores = scores.masked_fill(unseen, float("-inf"))
    if (sinks := bent.sinks(q.shape[1], str(q.device))) is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, q.shape[0], 1)), -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqn,nhd->qhd", weights, v.masked_fill(unseen.all(0)[:, None, None], 0)).flatten(1)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def upload(items: np.ndarray, fields: int, device: str) -> tuple[Tensor, Tensor]:
    """Work items in a larger buffer, as in an engine, and their number."""
    room = torch.full((len(items) + 5, fields), -1, dtype=torch.int32)
    room[: len(items)] = torch.from_numpy(items)
    return room.to(device), torch.tensor([len(items)], dtype=torch.int32, device=device)


def check_decode(
    lengths: list[int], heads: int, kv_heads: int, d: int, page: int, dtype: torch.dtype, device: str, num_sms: int,
    split_tokens: int = 0, kernel: Callable[..., Tensor] = PORTABLE, bent: Bent = PLAIN,
) -> None:  # fmt: skip
    kv, table = pool(lengths, page, kv_heads, d, dtype, device)
    q = torch.randn(len(lengths) + 2, heads, d, device=device).to(dtype)
    items = decode_items(
        np.array(lengths), num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=256, split_tokens=split_tokens,
        window=bent.window, page_size=page,
    )  # fmt: skip
    options: dict[str, Any] = {}
    if bent.window is None:
        assert sum(e - b for _, _, b, e, *_ in items.tolist()) == sum(lengths)
    else:
        forget(kv, table, [max(0, n - bent.window) for n in lengths], page)
    if bent != PLAIN:
        options = {
            "windowed": bent.window is not None, "softcap": bent.softcap, "sinks": bent.sinks(heads, device)
        }  # fmt: skip
    space = decode_workspace(256, len(lengths), kv_heads, heads // kv_heads, d, device)
    out = torch.full((len(q), heads * d), float("nan"), dtype=dtype, device=device)
    work = upload(items, ITEM_FIELDS, device)
    space.partial.fill_(float("nan"))
    kernel(q, kv, LAYER, table, *work, out=out, num_sms=num_sms, space=space, **options)
    again = out.clone()
    space.partial.fill_(float("nan"))
    kernel(q, kv, LAYER, table, *work, out=again, num_sms=num_sms, space=space, **options)
    assert torch.equal(again[: len(lengths)], out[: len(lengths)])
    want = torch.cat([attend(q[i : i + 1], kv, table[i, : -(-n // page)], n, bent) for i, n in enumerate(lengths)])
    assert error(out[: len(lengths)], want) < 6e-3
    assert bool(out[len(lengths) :].isnan().all())
    assert int(space.arrived.abs().sum()) == 0
    assert space.tickets.tolist() == [0, 0]


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("split_tokens", [0, 128])
def test_decode_of_short_requests(page: int, split_tokens: int, device: str, num_sms: int) -> None:
    check_decode([1, 64, 150, 33], 6, 2, 64, page, torch.float16, device, num_sms, split_tokens)


@pytest.mark.parametrize(
    ("split_tokens", "page"), [(0, 64), (128, 16), pytest.param(0, 16, marks=MORE), pytest.param(128, 64, marks=MORE)]
)
@pytest.mark.parametrize("bent", BENT, ids=str)
def test_decode_with_bent_scores(bent: Bent, page: int, split_tokens: int, device: str, num_sms: int) -> None:
    check_decode([1, 64, 150, 301], 6, 2, 64, page, torch.float16, device, num_sms, split_tokens, bent=bent)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("bent", [*BENT, Bent(1024), Bent(4096, 50.0)], ids=str)
def test_hopper_decode_with_bent_scores(
    bent: Bent, page: int, device: str, num_sms: int, hopper: Callable[..., Tensor]
) -> None:
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000, 9999]
    check_decode(lengths, 16, 2, 128, page, torch.bfloat16, device, num_sms, kernel=hopper, bent=bent)
    check_decode(lengths, 8, 2, 64, page, torch.float16, device, 3, split_tokens=128, kernel=hopper, bent=bent)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("group", "d", "dtype"),
    [(g, 128, torch.bfloat16) for g in range(1, 9)]
    + [(1, 64, torch.float16), (4, 64, torch.bfloat16), (7, 64, torch.float16)],
)
@pytest.mark.usefixtures("large")
def test_decode(group: int, d: int, dtype: torch.dtype, page: int, device: str, num_sms: int) -> None:
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000]
    check_decode(lengths, 2 * group, 2, d, page, dtype, device, num_sms)
    check_decode([1 + 17 * i % 700 for i in range(300)], 2 * group, 2, d, page, dtype, device, num_sms)


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.usefixtures("large")
def test_decode_of_one_long_request_is_split(page: int, device: str, num_sms: int) -> None:
    check_decode([9999], 32, 8, 128, page, torch.bfloat16, device, num_sms)
    check_decode([20000, 1, 700], 32, 8, 128, page, torch.bfloat16, device, num_sms, split_tokens=512)


@pytest.mark.parametrize(("d", "bent"), [(80, PLAIN), (96, Bent(40, 3.0, True)), (256, Bent(40))])
def test_decode_and_prefill_of_other_heads(d: int, bent: Bent, device: str, num_sms: int) -> None:
    check_decode([1, 64, 150], 4, 2, d, 64, torch.float16, device, num_sms, bent=bent)
    check_decode([33, 301], 4, 2, d, 16, torch.float16, device, num_sms, split_tokens=128, bent=bent)
    check_prefill([(0, 5), (150, 50)], 4, 2, d, 16, torch.float16, device, num_sms, True, bent)


@pytest.fixture
def hopper(device: str) -> Callable[..., Tensor]:
    """The kernel with one program per SM."""
    if device == "cpu" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from weft.kernels.attention.decode_hopper import launch_decode

    return launch_decode


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("group", "d", "dtype"),
    [(g, 128, torch.bfloat16) for g in range(1, 9)]
    + [(1, 64, torch.float16), (4, 64, torch.bfloat16), (7, 64, torch.float16), (16, 128, torch.float16)],
)
def test_hopper_decode(
    group: int, d: int, dtype: torch.dtype, page: int, device: str, num_sms: int, hopper: Callable[..., Tensor]
) -> None:
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000]
    check_decode(lengths, 2 * group, 2, d, page, dtype, device, num_sms, kernel=hopper)
    check_decode(lengths, 2 * group, 2, d, page, dtype, device, 3, split_tokens=128, kernel=hopper)
    check_decode([1 + 17 * i % 700 for i in range(300)], 2 * group, 2, d, page, dtype, device, 24, kernel=hopper)


@pytest.mark.parametrize(
    ("group", "d", "page"), [(1, 80, 64), (1, 96, 16), (4, 192, 64), (2, 256, 16), (8, 256, 64), (3, 48, 64)]
)
@pytest.mark.parametrize("bent", [PLAIN, Bent(1024, 50.0, True)], ids=str)
def test_hopper_attention_of_other_heads(
    bent: Bent, group: int, d: int, page: int, device: str, num_sms: int, hopper: Callable[..., Tensor]
) -> None:
    lengths = [1, 2, page, page + 1, 127, 128, 129, 1000, 3000]
    check_decode(lengths, 2 * group, 2, d, page, torch.bfloat16, device, num_sms, kernel=hopper, bent=bent)
    check_decode(lengths, 2 * group, 2, d, page, torch.bfloat16, device, 3, split_tokens=128, kernel=hopper, bent=bent)
    chunks = [(0, 1), (0, 33), (100, 28), (128, 300), (1000, 7), (63, 65), (5, 700), (1500, 300)]
    check_prefill(chunks, 2 * group, 2, d, page, torch.bfloat16, device, num_sms, False, bent)


@pytest.mark.parametrize("page", [16, 64, 128])
def test_hopper_decode_of_one_long_request_is_split(
    page: int, device: str, num_sms: int, hopper: Callable[..., Tensor]
) -> None:
    check_decode([9999], 32, 8, 128, page, torch.bfloat16, device, num_sms, kernel=hopper)
    check_decode([20000, 1, 700], 32, 8, 128, page, torch.bfloat16, device, num_sms, split_tokens=512, kernel=hopper)


def test_hopper_decode_does_not_depend_on_timing(device: str, num_sms: int, hopper: Callable[..., Tensor]) -> None:
    count, length, page = 16, 4096, 64
    kv, table = pool([length] * count, page, 8, 128, torch.bfloat16, device)
    q = torch.randn(count, 32, 128, device=device).to(torch.bfloat16)
    items = decode_items(np.full(count, length), num_kv_heads=8, num_programs=4 * num_sms, max_slots=256)
    work = upload(items, ITEM_FIELDS, device)
    space = decode_workspace(256, count, 8, 4, 128, device)
    outs = []
    for sms in (num_sms, 48) * 200:
        space.partial.fill_(float("nan"))
        out = torch.full((count, 32 * 128), float("nan"), dtype=q.dtype, device=device)
        outs.append(hopper(q, kv, LAYER, table, *work, out=out, num_sms=sms, space=space))
    assert not any(bool((out != outs[0]).any()) for out in outs)
    want = torch.cat([attend(q[i : i + 1], kv, table[i, : length // page], length) for i in range(count)])
    assert error(outs[0], want) < 6e-3


def test_hopper_decode_of_no_request_writes_nothing(device: str, num_sms: int, hopper: Callable[..., Tensor]) -> None:
    kv, table = pool([1], 64, 2, 128, torch.bfloat16, device)
    q = torch.randn(1, 8, 128, device=device).to(torch.bfloat16)
    out = torch.full((1, 8 * 128), float("nan"), dtype=torch.bfloat16, device=device)
    work = upload(np.zeros((0, ITEM_FIELDS), np.int32), ITEM_FIELDS, device)
    hopper(q, kv, LAYER, table, *work, out=out, num_sms=num_sms, space=decode_workspace(4, 1, 2, 4, 128, device))
    assert bool(out.isnan().all())


def check_prefill(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, d: int, page: int, dtype: torch.dtype, device: str,
    num_sms: int, portable: bool, bent: Bent = PLAIN, images: list[tuple[int, int]] | None = None,
) -> None:  # fmt: skip
    """chunks: (tokens already in pages, queries). images: (begin, end) positions, in any chunk that has them, whose
    queries see all of them; None: attention is causal."""
    lengths = [c + n for c, n in chunks]
    kv, table = pool(lengths, page, kv_heads, d, dtype, device)
    if bent.window is not None:
        forget(kv, table, [max(0, c + 1 - bent.window) for c, _ in chunks], page)
    options = {"window": bent.window, "softcap": bent.softcap, "sinks": bent.sinks(heads, device)}
    queries = np.array([n for _, n in chunks])
    first = np.cumsum(queries) - queries + 3
    q = torch.randn(int(queries.sum()) + 6, heads, d, device=device).to(dtype)
    items = prefill_items(
        first, queries, np.array([c for c, _ in chunks]), np.arange(len(chunks)), group=heads // kv_heads
    )
    out = torch.full((len(q), heads * d), float("nan"), dtype=dtype, device=device)
    work = upload(items, TILE_FIELDS, device)
    if images is not None:
        until = torch.full((len(q),), -1, dtype=torch.int32)  # rows of no chunk are not read
        for at, (context, count) in zip(first.tolist(), chunks, strict=True):
            until[at : at + count] = torch.arange(context, context + count)
            for begin, end in images:
                if context <= begin and end <= context + count:
                    until[at + begin - context : at + end - context] = end - 1
        options["until"] = until.to(device)
    prefill_attention(q, kv, LAYER, table, *work, out=out, num_sms=num_sms, portable=portable, **options)
    again = out.clone()
    prefill_attention(q, kv, LAYER, table, *work, out=again, num_sms=num_sms, portable=portable, **options)
    assert torch.equal(again[3:-3], out[3:-3])
    for i, n in enumerate(lengths):
        rows = slice(int(first[i]), int(first[i] + queries[i]))
        own = None if images is None else options["until"][rows]
        assert error(out[rows], attend(q[rows], kv, table[i, : -(-n // page)], n, bent, own)) < 6e-3
    assert bool(out[:3].isnan().all())
    assert bool(out[-3:].isnan().all())


@pytest.mark.parametrize("bent", [PLAIN, Bent(24), pytest.param(Bent(40, 3.0, True), marks=MORE)], ids=str)
def test_queries_see_all_of_their_image(bent: Bent, device: str, num_sms: int) -> None:
    images = [(1, 3), (30, 75), (75, 76), (80, 180)]
    check_prefill([(0, 5), (20, 200), (75, 9), (77, 104)], 4, 2, 32, 16, torch.float16, device, num_sms, True, bent,
                  images)  # fmt: skip


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "page"), [(8, 4, 256, 16), (8, 4, 256, 64), (16, 2, 128, 128), (6, 2, 64, 64)]
)
@pytest.mark.parametrize("bent", [PLAIN, Bent(24), Bent(1024, 50.0)], ids=str)
@pytest.mark.usefixtures("large")
def test_queries_see_all_of_a_large_image(
    bent: Bent, heads: int, kv_heads: int, d: int, page: int, portable: bool, device: str, num_sms: int
) -> None:
    chunks = [(0, 1), (0, 33), (0, 512), (100, 28), (128, 300), (1000, 700), (63, 65), (5, 1900), (5000, 300)]
    images = [(0, 20), (20, 30), (64, 128), (130, 386), (390, 400), (1024, 1280), (1290, 1546), (5001, 5257)]
    check_prefill(chunks, heads, kv_heads, d, page, torch.bfloat16, device, num_sms, portable, bent, images)


def test_prefill_of_short_chunks(device: str, num_sms: int) -> None:
    check_prefill([(0, 5), (20, 50), (3, 1)], 6, 2, 64, 16, torch.float16, device, num_sms, True)


@pytest.mark.parametrize(
    ("bent", "page"),
    [*((bent, 16) for bent in BENT), *(pytest.param(bent, 64, marks=MORE) for bent in BENT[:-1]), (BENT[-1], 64)],
    ids=str,
)
def test_prefill_with_bent_scores(bent: Bent, page: int, device: str, num_sms: int) -> None:
    check_prefill([(0, 5), (150, 50), (70, 1)], 6, 2, 64, page, torch.float16, device, num_sms, True, bent)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("bent", [*BENT, Bent(1024), Bent(4096, 50.0)], ids=str)
@pytest.mark.usefixtures("large")
def test_long_prefill_with_bent_scores(bent: Bent, page: int, portable: bool, device: str, num_sms: int) -> None:
    chunks = [(0, 1), (0, 33), (0, 128), (100, 28), (128, 300), (1000, 7), (63, 65), (640, 1), (5, 700), (5000, 300)]
    check_prefill(chunks, 16, 2, 128, page, torch.bfloat16, device, num_sms, portable, bent)
    check_prefill(chunks, 8, 2, 64, page, torch.float16, device, num_sms, portable, bent)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("group", "d", "dtype"),
    [(g, 128, torch.bfloat16) for g in range(1, 9)]
    + [(1, 64, torch.float16), (4, 64, torch.bfloat16), (7, 64, torch.float16)],
)
@pytest.mark.usefixtures("large")
def test_prefill(group: int, d: int, dtype: torch.dtype, page: int, portable: bool, device: str, num_sms: int) -> None:
    chunks = [(0, 1), (0, 33), (0, 128), (100, 28), (128, 300), (1000, 7), (63, 65), (640, 1), (5, 700)]
    check_prefill(chunks, 2 * group, 2, d, page, dtype, device, num_sms, portable)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.usefixtures("large")
def test_prefill_of_many_long_chunks(page: int, device: str, num_sms: int) -> None:
    check_prefill(
        [(0, 2048), (4096, 777), (333, 1500), (9, 2000)], 32, 8, 128, page, torch.bfloat16, device, num_sms, False
    )


def test_plans_without_requests_are_empty() -> None:
    none = np.zeros(0, np.int64)
    assert decode_items(none, num_kv_heads=8, num_programs=132, max_slots=64).shape == (0, ITEM_FIELDS)
    assert prefill_items(none, none, none, none, group=4).shape == (0, TILE_FIELDS)


def test_decode_splits_fit_the_workspace_and_cover_every_token_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 40000, rng.integers(1, 80))
        items = decode_items(lengths, num_kv_heads=8, num_programs=396, max_slots=64)
        begin, end = items[:, 2], items[:, 3]
        assert (np.diff(end - begin) <= 0).all()
        split = items[items[:, 5] > 1]
        places = split[:, 4] + split[:, 6]
        assert len(np.unique(places)) == len(places)
        assert len(places) == 0 or places.max() < 64
        for row, length in enumerate(lengths):
            mine = items[items[:, 0] == row]
            mine = mine[np.argsort(mine[:, 6])]
            assert mine[0, 2] == 0
            assert mine[-1, 3] == length
            assert (mine[1:, 2] == mine[:-1, 3]).all()
