"""GEMMs with further depth for LoRA adapters against the torch reference, and to the bit without adapters."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.kernels.matmul import adapter_depth, adapter_work
from weft.kernels.matmul import mid_projections as projections
from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig
from weft.kernels.matmul.gemm_launch import workspace
from weft.kernels.matmul.mid_config import BLOCK_TOKENS, TALL, MidConfig
from weft.kernels.reference import layer as reference
from weft.kernels.reference.adapters import Delta, LowRank

RANKS = [16, 3, 16, 8]
SWAPPED = GemmConfig(16, 64, 128, 2, 4, 8, 2, True, 1, 1)
PLAIN = GemmConfig(64, 64, 64, 2, 4, 8, 1, False, 1, 1)
MID = MidConfig(128)
ON_GPU = [pytest.param(c, marks=pytest.mark.nightly) for c in (
    SPECIAL, MID, MidConfig(96), MidConfig(128, split=2), MidConfig(96, rows=TALL),
    MidConfig(128, split=2, rows=TALL), MidConfig(128, box=32),
)]  # fmt: skip


class Slots(NamedTuple):
    """Matrices of a projection in all slots, as tests make them."""

    a: Tensor  # `[S, P, R, K]`
    b: Tensor  # `[S, sum(n), R]`: the rows of each part, in sequence.
    shift: Tensor  # `[S, P, R]`
    widths: tuple[int, ...]


def random_slots(
    count: int, depth: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype, device: str, ranks: list[int]
) -> Slots:
    a = torch.randn(count, len(widths), rank, depth) / depth**0.5
    b = torch.randn(count, sum(widths), rank) / rank**0.5
    shift = torch.randn(count, len(widths), rank)
    for slot, own in enumerate(ranks):
        a[slot, :, own:], b[slot, :, own:], shift[slot, :, own:] = 0, 0, 0
    return Slots(a.to(device, dtype), b.to(device, dtype), shift.to(device, dtype), widths)


def _low_ranks(slots: Slots, slot: int, step: int, *, shifted: bool) -> list[LowRank]:
    """The matrices of a slot as the reference has them. step: 2 if rows of two parts alternate."""
    found, start = [], 0
    for part, width in enumerate(slots.widths):
        b = slots.b[slot, start : start + width].float()
        shift = slots.shift[slot, part].float() if shifted else None
        found.append(LowRank(slots.a[slot, part].float(), b, part if step > 1 else start, step, shift))
        start += width
    return found


def delta(x: Tensor, slots: Slots, slot_of: Tensor, step: int = 1, *, shifted: bool = False) -> Tensor:
    """What adapters add to the rows of x."""
    added = torch.zeros(len(x), sum(slots.widths), device=x.device)
    groups = [
        ((slot_of == s).nonzero()[:, 0].to(x.device), _low_ranks(slots, s, step, shifted=shifted))
        for s in range(len(slots.a))
    ]
    for rows, values in Delta(groups, sum(slots.widths)).values(x):
        added[rows] += values
    return added


def work_of(slot_of: Tensor, ranks: list[int], tokens: int, device: str) -> adapter_depth.Work:
    rows, items, counts = adapter_work.sort_rows(slot_of.numpy().astype(np.int32), np.array(ranks, np.int32), tokens)
    order = torch.zeros(tokens, dtype=torch.int32)
    order[: len(rows)] = torch.from_numpy(rows)
    assert len(items) <= adapter_work.max_items(tokens, len(ranks))
    made = order, torch.from_numpy(items), torch.tensor(counts, dtype=torch.int32)
    return adapter_depth.Work(*(part.to(device) for part in made))


def mix(live: int) -> Tensor:
    """Rows of slots 0, 1 and 3, and rows without an adapter."""
    return torch.tensor([-1, 0, 3, 1])[torch.randint(4, (live,))]


def shrunk(
    x: Tensor, slots: Slots, slot_of: Tensor, ranks: list[int], sumsq: Tensor | None = None
) -> Tensor:  # fmt: skip
    """The terms of the rows of x. sumsq: of a norm with a bias before the projection."""
    (count, parts, rank, depth), tokens, device = slots.a.shape, len(x), x.device
    width = parts * rank
    terms = torch.zeros(tokens, adapter_depth.columns(count, width), dtype=x.dtype, device=device)
    partial = torch.full((adapter_depth.scratch_size(tokens, [(depth, width)]),), torch.nan, device=device)
    scratch = adapter_depth.Scratch(partial, torch.zeros(4096, dtype=torch.int32, device=device))
    adapter_depth.shrink_terms(
        x, slots.a.view(count, -1), work_of(slot_of, ranks, tokens, str(device)), terms, scratch, width=width,
        shift=None if sumsq is None else slots.shift.view(count, -1), sumsq=sumsq, eps=1e-5,
    )  # fmt: skip
    assert not scratch.arrived.any()
    return terms


def further(x: Tensor, slots: Slots, slot_of: Tensor, step: int = 1) -> adapter_depth.More:
    """The further depth of a projection of x, as `AdapterSlots` lays it out. step: 2 if rows of two parts alternate."""
    (count, parts, rank, _), device = slots.a.shape, x.device
    width = parts * rank
    b = torch.zeros(sum(slots.widths), adapter_depth.columns(count, width), dtype=x.dtype, device=device)
    start = 0
    for part, n in enumerate(slots.widths):
        rows = slice(part, None, step) if step > 1 else slice(start, start + n)
        for slot in range(count):
            b[rows, (slot * parts + part) * rank :][:, :rank] = slots.b[slot, start : start + n]
        start += n
    used = adapter_work.used_slots(slot_of.numpy().astype(np.int32), count)
    steps = {
        rows: adapter_depth.Steps(*(torch.from_numpy(t).to(device) for t in adapter_work.tile_steps(used, rows, width)))
        for rows in (BLOCK_TOKENS, TALL)
    }
    return adapter_depth.More(shrunk(x, slots, slot_of, RANKS), b, steps)


@pytest.mark.parametrize(("tokens", "live"), [(1, 1), (16, 13), pytest.param(300, 290, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shifted", [False, True])
def test_terms_equal_the_reference(device: str, tokens: int, live: int, shifted: bool) -> None:
    depth, dtype, ranks = 1056 if tokens > 1 else 96, torch.float16, [16, 3, 32, 8]
    torch.manual_seed(6)
    slots = random_slots(4, depth, (32, 32, 32), 32, dtype, device, ranks)
    identity = slots._replace(b=torch.eye(32, device=device).repeat(4, 3, 1))
    slot_of = mix(live) if live > 1 else torch.tensor([1])
    x = torch.randn(tokens, depth).to(device, dtype)
    sumsq = torch.rand(3, tokens, device=device) * depth
    scale = reference.rms_scale(sumsq.sum(0), depth, 1e-5)[:, None]
    terms = shrunk(x, slots, slot_of, ranks, sumsq if shifted else None)
    expected = torch.zeros(terms.shape, device=device)
    own = delta((x.float() * scale)[:live], identity, slot_of, shifted=shifted)
    for row, slot in enumerate(slot_of.tolist()):
        if slot >= 0:
            expected[row, slot * 96 : slot * 96 + 96] = own[row]
    torch.testing.assert_close(terms.float() * scale, expected, atol=2e-2, rtol=1e-2)
    assert ((terms == 0) >= (expected == 0)).all()


def options(live: int, config: Any, device: str) -> dict[str, Any]:
    if device == "cpu" and not (isinstance(config, GemmConfig) and not config.special):
        pytest.skip("Gluon has no interpreter")
    count = torch.full((1,), live, dtype=torch.int32, device=device)
    space = workspace(torch.device(device), elements=1 << 20)
    return {"num_sms": 4, "space": space, "num_tokens": count, "config": config}


@pytest.mark.parametrize(("tokens", "live"), [(16, 13), pytest.param(300, 290, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("config", [SWAPPED, PLAIN, *ON_GPU])
@pytest.mark.parametrize("kind", ["gate_up", "residual", "plain"])
def test_the_epilogue_sees_the_deltas(device: str, kind: str, config: Any, tokens: int, live: int) -> None:
    depth = 1152 if tokens < 20 else 320
    dtype = torch.float16 if device == "cpu" else torch.bfloat16  # the interpreter has no products in bfloat16
    widths = {"gate_up": (128, 128), "residual": (192,), "plain": (64, 64, 128)}[kind]
    torch.manual_seed(5)
    slots = random_slots(4, depth, widths, 16, dtype, device, RANKS)
    slot_of = mix(live)
    x = torch.randn(tokens, depth).to(device, dtype)
    w = (torch.randn(sum(widths), depth) / depth**0.5).to(device, dtype)
    more = further(x, slots, slot_of, 2 if kind == "gate_up" else 1)
    own = options(live, config, device)
    sumsq = torch.rand(3, tokens, device=device) * depth
    scale = reference.rms_scale(sumsq.sum(0), depth, 1e-5)[:, None]
    raw = x.float() @ w.float().T
    added = delta(x[:live].float(), slots, slot_of, 2 if kind == "gate_up" else 1)
    raw[:live] += added

    def run(more: adapter_depth.More | None) -> Tensor:
        if kind == "residual":
            out, sums = before.clone(), torch.zeros(16, tokens, device=device)
            _, sums = projections.residual_project(x, w, out, out=out, sumsq=sums, more=more, **own)
            close(sums.sum(0)[:live], out[:live].float().square().sum(1), atol=1e-2, rtol=1e-2)
            return out
        if kind == "gate_up":
            out = torch.zeros(tokens, widths[0], device=device, dtype=dtype)
            return projections.gate_up_project(x, sumsq, w, 1e-5, out=out, more=more, **own)
        out = torch.zeros(tokens, sum(widths), device=device, dtype=dtype)
        return projections.linear_project(x, None, w, 0.0, out=out, more=more, **own)

    close = torch.testing.assert_close
    before = torch.randn(tokens, widths[0]).to(device, dtype)
    out = run(more)
    scaled = raw * scale
    expected = {
        "gate_up": lambda: reference.gated("silu", scaled[:, 0::2], scaled[:, 1::2].clone()),
        "residual": lambda: before.float() + raw,
        "plain": lambda: raw,
    }[kind]()  # fmt: skip
    close(out[:live].float(), expected[:live], atol=4e-2, rtol=3e-2)
    without = (slot_of < 0).nonzero()[:, 0].to(device)
    assert torch.equal(out[without], run(None)[without]), "a row without an adapter has other bits"
    assert not torch.equal(out[:live], run(None)[:live])


@pytest.mark.parametrize("rows", [BLOCK_TOKENS, TALL])
def test_tiles_name_the_columns_of_their_slots(rows: int) -> None:
    rng = np.random.default_rng(0)
    for width, slots in ((16, 9), (48, 5), (128, 3), (96, 4)):
        slot_of = rng.integers(-1, slots, 400).astype(np.int32)
        slot_of[128:256] = rng.choice([-1, 2], 128)
        blocks, counts = adapter_work.tile_steps(adapter_work.used_slots(slot_of, slots), rows, width)
        assert blocks.shape == (-(-400 // rows), -(-slots * width // 64))
        for tile, count in enumerate(counts):
            own = set(slot_of[tile * rows : tile * rows + rows]) - {-1}
            expected = {column // 64 for slot in own for column in range(slot * width, (slot + 1) * width)}
            assert blocks[tile, :count].tolist() == sorted(expected)
    blocks, counts = adapter_work.tile_steps(adapter_work.used_slots(slot_of[:0], 4), rows, 16)
    assert (blocks.shape, counts.shape) == ((0, 1), (0,))
