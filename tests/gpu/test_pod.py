"""One launch for a hybrid batch gives the bits of its two halves alone, in any order of work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from test_attention import LAYER, PLAIN, Bent, attend, error, pool, upload

from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.attention.decode_workspace import decode_workspace
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

SLOTS = 2000
"""splits of tiles: three chunks of 400 over 6,000 tokens, cut at 256, are 1,900"""


@pytest.fixture(autouse=True)
def hopper(device: str) -> None:
    if not (on_gpu(torch.device(device)) and is_hopper()):
        pytest.skip("needs a Hopper GPU")


def check(
    decodes: list[int], chunks: list[tuple[int, int]], heads: int, kv_heads: int, d: int, page: int,
    dtype: torch.dtype, device: str, num_sms: int, bent: Bent = PLAIN, split_keys: int | None = None,
    whole: bool = False, together: bool = False,
) -> None:  # fmt: skip
    """chunks: (tokens already in pages, queries). whole: tiles are not cut. together: of `pod_together`, whose sums are
    made in another order."""
    from weft.kernels.attention.pod_hopper import PodWork, launch_pod
    from weft.kernels.attention.pod_together import launch_together

    lengths = [*decodes, *(c + n for c, n in chunks)]
    group, count = heads // kv_heads, len(decodes)
    kv, table = pool(lengths, page, kv_heads, d, dtype, device)
    queries = np.array([n for _, n in chunks], int)
    first = count + np.cumsum(queries) - queries
    q = torch.randn(count + int(queries.sum()) + 2, heads, d, device=device).to(dtype)
    options = {"softcap": bent.softcap, "sinks": bent.sinks(heads, device)}
    decode = decode_items(
        np.array(decodes, int), num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=256, window=bent.window,
        page_size=page,
    )  # fmt: skip
    tiles = prefill_items(
        first, queries, np.array([c for c, _ in chunks], int), count + np.arange(len(chunks)), group=group
    )
    parts = prefill_splits(tiles, num_kv_heads=kv_heads, num_programs=num_sms, max_slots=SLOTS, split_keys=split_keys)
    decode_work, part_work = upload(decode, ITEM_FIELDS, device), upload(parts, SPLIT_FIELDS, device)
    if whole or bent.window is not None:  # tiles are cut if there is no window
        part_work, parts = upload(tiles, TILE_FIELDS, device), parts[:0]
    cuts = part_work[0].shape[1] == SPLIT_FIELDS
    space = decode_workspace(256, len(lengths), kv_heads, group, d, device)
    prefills = prefill_workspace(SLOTS, kv_heads, d, device)

    def empty() -> torch.Tensor:
        space.partial.fill_(float("nan"))
        prefills.partial.fill_(float("nan"))
        return torch.full((len(q), heads * d), float("nan"), dtype=dtype, device=device)

    want = empty()
    decode_attention(
        q, kv, LAYER, table, *decode_work, out=want, num_sms=num_sms, space=space, windowed=bent.window is not None,
        **options,
    )  # fmt: skip
    prefill_attention(
        q, kv, LAYER, table, *part_work, out=want, num_sms=num_sms, space=prefills if cuts else None,
        window=bent.window, **options,
    )  # fmt: skip
    for decoders in (0, 0) if together else (0, 1, num_sms // 3, num_sms):
        out = empty()
        work = PodWork(*decode_work, *part_work, torch.tensor([decoders], dtype=torch.int32, device=device))
        (launch_together if together else launch_pod)(
            q, kv, LAYER, table, work, out=out, num_sms=num_sms, decodes=space, prefills=prefills, window=bent.window,
            **options,
        )  # fmt: skip
        if together:
            assert not len(want[:-2]) or error(out[:-2], want[:-2]) < 6e-3
        else:
            assert torch.equal(out[:-2], want[:-2])
        assert bool(out[-2:].isnan().all())
    assert not any(int(t.abs().sum()) for t in (space.arrived, space.tickets, prefills.arrived, prefills.tickets))
    at = 0
    for i, (length, rows) in enumerate(zip(lengths, [*[1] * count, *queries.tolist()], strict=True)):
        got = want[at : at + rows]
        assert error(got, attend(q[at : at + rows], kv, table[i, : -(-length // page)], length, bent)) < 6e-3
        at += rows
    if cuts and split_keys is None and (parts[:, 7] & 65535).max(initial=1) == 1 and len(chunks):
        plain = empty()
        prefill_attention(
            q, kv, LAYER, table, *upload(tiles, TILE_FIELDS, device), out=plain, num_sms=num_sms, **options
        )  # fmt: skip
        assert torch.equal(plain[count:-2], want[count:-2])


@pytest.mark.parametrize(
    ("group", "d", "page", "dtype"),
    [(g, d, 64, torch.bfloat16) for g, d in ((1, 64), (4, 64), (1, 128), (3, 128), (8, 128), (16, 128))]
    + [(4, 128, page, torch.float16) for page in (16, 32, 64, 128)],
)
def test_pod_is_its_two_halves(group: int, d: int, page: int, dtype: torch.dtype, device: str, num_sms: int) -> None:
    chunks = [(0, 1), (0, 33), (4000, 128), (100, 28), (1000, 7), (63, 65), (5, 700)]
    check([1, 700, 5000, 64, 65], chunks, 2 * group, 2, d, page, dtype, device, num_sms)
    check([1, 700, 64], chunks, 2 * group, 2, d, page, dtype, device, num_sms, split_keys=256)


@pytest.mark.parametrize(
    ("group", "d", "page", "dtype"),
    [(g, d, 64, torch.bfloat16) for g, d in ((1, 64), (4, 64), (1, 128), (3, 128), (8, 128), (16, 128))]
    + [(4, 128, page, torch.float16) for page in (16, 32, 64, 128)],
)
def test_both_halves_together(
    group: int, d: int, page: int, dtype: torch.dtype, device: str, num_sms: int
) -> None:  # fmt: skip
    chunks = [(0, 1), (0, 33), (4000, 128), (100, 28), (1000, 7), (63, 65), (5, 700)]
    check([1, 700, 5000, 64, 65], chunks, 2 * group, 2, d, page, dtype, device, num_sms, together=True)
    check([1, 700, 64], chunks, 2 * group, 2, d, page, dtype, device, num_sms, split_keys=256, together=True)


@pytest.mark.parametrize("together", [False, True])
def test_either_list_may_be_empty(together: bool, device: str, num_sms: int) -> None:
    for decodes, chunks in (([], [(3000, 200)]), ([500, 3], []), ([], [])):
        check(decodes, chunks, 32, 8, 128, 64, torch.bfloat16, device, num_sms, together=together)


@pytest.mark.parametrize("bent", [Bent(softcap=5.0), Bent(has_sinks=True)], ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_pod_with_bent_scores(bent: Bent, together: bool, device: str, num_sms: int) -> None:
    check([900, 40], [(3000, 150), (0, 30)], 16, 4, 128, 64, torch.bfloat16, device, num_sms, bent, split_keys=512,
          together=together)  # fmt: skip


@pytest.mark.parametrize("bent", [Bent(window=1), Bent(window=100), Bent(1000, 3.0, True)], ids=str)
@pytest.mark.parametrize("d", [64, 80, 128])
def test_pod_with_a_window_leaves_tiles_whole(bent: Bent, d: int, device: str, num_sms: int) -> None:
    chunks = [(0, 33), (4000, 128), (63, 65), (5, 300)]
    check([1, 700, 5000, 65], chunks, 8, 2, d, 64, torch.bfloat16, device, num_sms, bent)
    check([900, 64], [(3000, 150)], 8, 2, d, 32, torch.float16, device, num_sms, whole=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("large")
def test_random_hybrid_batches(seed: int, device: str, num_sms: int) -> None:
    rng = np.random.default_rng(seed)
    for i in range(250):
        decodes = rng.integers(1, rng.choice([80, 3000]), rng.integers(0, 40)).tolist()
        chunks = [
            (int(rng.integers(0, rng.choice([2, 200, 6000]))), int(rng.integers(1, rng.choice([3, 400]))))
            for _ in range(rng.integers(0, 4))
        ]
        heads, kv_heads, d = [(32, 8, 128), (8, 1, 64)][seed % 2]
        cut = [None, 256, 1024][rng.integers(3)]
        check(decodes, chunks, heads, kv_heads, d, 64, torch.bfloat16, device, num_sms, split_keys=cut,
              together=i % 5 == 4)  # fmt: skip
