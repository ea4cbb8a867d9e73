"""Latent attention of decodes: equal to the definition over paged rows, in any split, and blind to stale rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.kernels.attention.work_lists import decode_items
from weft.tools.kernels import bench_latent
from weft.tools.kernels import latent_decode as kernels

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # The interpreter's GEMMs take no bfloat16.
LAYERS, LAYER = 3, 1


def by_definition(q: Tensor, rows: list[Tensor], scale: float, rank: int) -> Tensor:
    """q `[R, H, C + R]`, the rows `[tokens, C + R]` of each request -> `[R, H * C]` float32."""
    found = []
    for own, keys in zip(q.float(), rows, strict=True):
        weights = torch.softmax(own @ keys.float().T * scale, -1)
        found.append((weights @ keys.float()[:, :rank]).flatten())
    return torch.stack(found)


def drawn(seed: int, *shape: int) -> Tensor:
    """The same numbers for the same seed, so that a request of some length is the same request in every batch."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed % 1000))


def attend(
    device: str, num_sms: int, heads: int, rank: int, rotated: int, lengths: list[int], dtype: torch.dtype, *,
    page_size: int = 16, split: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the kernel's and the expected output. Rows after a request's last token, and other layers, are NaN."""
    width, scale = rank + rotated, 0.11
    counts = [-(-length // page_size) for length in lengths]
    order = 1 + torch.randperm(sum(counts))
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    pool = torch.full((sum(counts) + 1, LAYERS, 1, page_size, 1, width), float("nan"), dtype=dtype)
    rows, used = [], 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = order[used : used + count]
        used += count
        table[i, :count] = own
        rows.append(drawn(length, length, width).to(dtype))
        token = torch.arange(length)
        pool[own[token // page_size], LAYER, 0, token % page_size, 0] = rows[-1]
    q = torch.stack([drawn(-length, heads, width) for length in (*lengths, 0)]).to(dtype)
    blocks, slots = kernels.head_blocks(heads), 64
    items = decode_items(
        np.array(lengths), num_kv_heads=blocks, num_programs=num_sms, max_slots=slots, split_tokens=split
    )
    space = kernels.latent_workspace(slots, len(lengths), heads, rank, device)
    out = torch.full((len(q), heads * rank), float("nan"), dtype=dtype, device=device)
    kernels.latent_decode(
        q.to(device), pool.to(device), LAYER, table.to(device), torch.from_numpy(items).to(device),
        torch.tensor([len(items)], dtype=torch.int32, device=device), out=out, num_sms=num_sms, space=space,
        scale=scale, rank=rank,
    )  # fmt: skip
    assert out[-1].isnan().all(), "a row without items is not written"
    assert not space.arrived.any()
    return out[:-1], by_definition(q[:-1], rows, scale, rank)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert not a.isnan().any()
    assert (a.float().cpu() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "dtype", "split"),
    [(3, 32, 16, torch.float32, 0), (20, 24, 8, torch.float32, 128), (16, 32, 16, HALF, 0)],
)
def test_it_equals_the_definition(
    device: str, num_sms: int, heads: int, rank: int, rotated: int, dtype: torch.dtype, split: int
) -> None:
    """Odd numbers of heads, several blocks of heads, widths that are no powers of two, splits, one-token requests."""
    found, expected = attend(device, num_sms, heads, rank, rotated, [300, 1, 17, 128], dtype, split=split)
    close(found, expected, 2e-4 if dtype == torch.float32 else 1e-2)


def test_rows_that_arrive_by_tma(device: str, num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper, if pages hold whole blocks of keys."""
    if device == "cpu":
        monkeypatch.setattr(kernels, "is_hopper", lambda: True)
        monkeypatch.setattr(kernels, "tile", lambda: kernels.Tile(16, 16, 1, 4))
    rank, rotated, page = (512, 64, 64) if device == "cuda" else (32, 16, 32)
    found, expected = attend(device, num_sms, 32, rank, rotated, [100, 1, 64], HALF, page_size=page)
    close(found, expected, 1e-2)


def test_a_fixed_split_gives_the_same_bits_next_to_any_requests(device: str, num_sms: int) -> None:
    alone, _ = attend(device, num_sms, 4, 32, 16, [200], torch.float32, split=128)
    others, _ = attend(device, num_sms, 4, 32, 16, [300, 31, 200, 5], torch.float32, split=128)
    assert torch.equal(alone[0], others[2])


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(("heads", "lengths"), [(128, [5000, 33, 1, 1024, 700]), (16, [64] * 40 + [9000])])
def test_deepseek(device: str, num_sms: int, heads: int, lengths: list[int]) -> None:
    for page_size in (16, 64):
        found, expected = attend(device, num_sms, heads, 512, 64, lengths, HALF, page_size=page_size)
        close(found, expected, 1e-2)


def test_pages_without_latents_are_refused(num_sms: int) -> None:
    q, kv = torch.zeros(1, 2, 48), torch.zeros(2, 1, 2, 16, 1, 48)
    table, items = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
    space = kernels.latent_workspace(1, 1, 2, 32, "cpu")
    with pytest.raises(ValueError, match="hold no latents"):
        kernels.latent_decode(
            q, kv, 0, table, items, items[0, :1], out=torch.zeros(1, 64), num_sms=num_sms, space=space, scale=1.0,
            rank=32,
        )  # fmt: skip


def test_the_benchmark_compares_with_the_definition(device: str, num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        for name, value in (("RANK", 32), ("ROTATED", 16), ("PAGE", 16), ("DTYPE", torch.float16)):
            monkeypatch.setattr(bench_latent, name, value)
    _, error = bench_latent.calls(4, 3, 70, 2, num_sms, device)
    assert error < 2e-2
