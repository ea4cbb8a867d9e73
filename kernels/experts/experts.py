"""The GEMMs of an expert layer, and the permutation of rows to experts and back (reference: `reference/experts.py`).

Rows are normed and copied into expert order, where each expert's rows begin at a multiple of the tile height. One
launch processes all experts by a list of tiles in device memory, and every operand arrives by TMA. `place` holds the
row of each choice of each token: `_combine_kernel` fetches a token's rows from there and adds them in the order of its
choices. No token is dropped, and there are no sorts and no atomic additions.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import is_hopper
from weft.kernels.experts import experts_triton
from weft.kernels.experts.experts_config import by_rule
from weft.kernels.experts.router import TILE, Choice
from weft.kernels.matmul import tuned
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_tiles import live_tokens, row_scale

TILE_FIELDS = 4
"""Fields of a tile in the work list: its expert, its group's first tile, tiles and rows of the group, no padding."""
COLUMNS = 256  # Columns of a row that one program copies at once.
FEW_TOKENS = 256
"""Up to this many tokens, programs copy only that many columns of a row, so that there are enough programs."""
MAX_PAD = 128  # Rows of the tallest tile.


class ExpertSpace(NamedTuple):
    """Rows of one nano-batch in expert order; padding between experts is undefined."""

    rows: Tensor  # [R, H] the experts' input, later their output.
    hidden: Tensor  # [R, I]
    place: Tensor  # [T, K] int32: the row of each choice.
    tiles: Tensor  # [tiles, TILE_FIELDS] int32
    number: Tensor  # [1] int32: number of tiles.


def expert_space(
    tokens: int, hidden: int, inter: int, count: int, top: int, dtype: torch.dtype, device: torch.device | str
) -> ExpertSpace:
    """Allocate space for `tokens` tokens with any routing and any tiles."""
    pairs = tokens * top
    rows = pairs + min(count, pairs) * (MAX_PAD - 1)
    rows = -(-rows // MAX_PAD) * MAX_PAD

    def buffer(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    return ExpertSpace(
        buffer(rows, hidden, kind=dtype), buffer(rows, inter, kind=dtype), buffer(tokens, top),
        buffer(-(-pairs // 16) + min(count, pairs), TILE_FIELDS), buffer(1),
    )  # fmt: skip


@triton.jit
def write_tiles(tiles, number, start, blocks, total, expert, PAD: tl.constexpr, GROUP: tl.constexpr,
                 FIELDS: tl.constexpr):  # fmt: skip
    """Write the work list: tiles of each expert; those of a group, which share weights, are neighbors."""
    for j in tl.range(0, tl.max(blocks, axis=0)):
        mask = j < blocks
        at = tiles + (start + j) * FIELDS
        group = j // GROUP * GROUP
        tl.store(at, expert, mask=mask)
        tl.store(at + 1, start + group, mask=mask)
        tl.store(at + 2, tl.minimum(GROUP, blocks - group), mask=mask)
        tl.store(at + 3, tl.minimum(GROUP * PAD, total - group * PAD), mask=mask)
    tl.store(number, tl.sum(blocks, axis=0))


@triton.jit
def expert_rows(
    experts, rank, counts, tiles, number, live, first, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BT: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr, PAD: tl.constexpr,
    GROUP: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Return (row, choice, whether it exists, row in expert order) of the choices of `TOKENS` tokens from `first` on.

    The first program writes the work list."""
    expert = tl.arange(0, EP)
    counted = tl.cdiv(live, BT)
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    for at in tl.range(0, counted, CHUNK):
        tile = at + tl.arange(0, CHUNK)
        some = (tile < counted)[:, None] & (expert < E)[None, :]
        taken = tl.load(counts + tile[:, None] * E + expert[None, :], mask=some, other=0)
        total += tl.sum(taken, axis=0)
        before += tl.sum(tl.where((tile < first // BT)[:, None], taken, 0), axis=0)
    blocks = (total + PAD - 1) // PAD
    start = tl.cumsum(blocks, axis=0) - blocks
    if (first == 0) & (tl.program_id(1) == 0):
        write_tiles(tiles, number, start, blocks, total, expert, PAD, GROUP, FIELDS)
    pair = tl.arange(0, TOKENS * KP)
    row = first + pair // KP
    k = pair % KP
    real = (row < live) & (k < K)
    own = tl.load(experts + row * K + k, mask=real, other=0)
    to = tl.load(rank + row * K + k, mask=real, other=0) + tl.gather(start * PAD + before, own, axis=0)
    return row, k, real, to


@triton.jit(do_not_specialize=["T", "stride_sumsq"])
def _scatter_kernel(
    x, sumsq, stride_sumsq, experts, rank, counts, place, out, tiles, number, num_tokens, T, H, eps, E: tl.constexpr,
    EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    BC: tl.constexpr, CHUNK: tl.constexpr, PAD: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy `COLUMNS` columns of `TOKENS` tokens, which belong to one tile of the counts, to their experts."""
    begin(PDL)
    release(PDL)
    live = live_tokens(num_tokens, T)
    first = tl.program_id(0) * TOKENS
    if (first >= live) & (first > 0):
        return
    row, k, real, to = expert_rows(
        experts, rank, counts, tiles, number, live, first, E, EP, K, KP, BT, TOKENS, CHUNK, PAD, GROUP, FIELDS
    )  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(place + row * K + k, to, mask=real)
    if sumsq is not None:
        scale = row_scale(sumsq, row, live, stride_sumsq, H, eps, PARTS)
    begins = tl.program_id(1) * COLUMNS
    for left in tl.range(begins, tl.minimum(begins + COLUMNS, H), BC):
        column = left + tl.arange(0, BC)
        some = real[:, None] & (column < H)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * H + column[None, :], mask=some, other=0.0)
        if sumsq is not None:
            value = (value.to(tl.float32) * scale[:, None]).to(value.dtype)
        tl.store(out + to.to(tl.int64)[:, None] * H + column[None, :], value, mask=some)


@triton.jit
def add_experts(y, place, weights, x, row, at, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """Return columns `at` of a row of x plus its weighted expert results, rounded."""
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        source = tl.load(place + row * K + k).to(tl.int64)
        weight = tl.load(weights + row * K + k)
        total += tl.load(y + source * H + at, mask=at < H, other=0.0).to(tl.float32) * weight
    stream = tl.load(x + row * H + at, mask=at < H, other=0.0)
    return (stream.to(tl.float32) + total).to(stream.dtype)


@triton.jit(do_not_specialize=["T"])
def _combine_kernel(
    y, place, weights, x, out, sumsq, num_tokens, T, H, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_tokens(num_tokens, T):
        return
    squares = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, H, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = add_experts(y, place, weights, x, row, at, H, K, BLOCK)
        tl.store(out + row * H + at, total, mask=at < H)
        squares += total.to(tl.float32) * total.to(tl.float32)
    tl.store(sumsq + row, tl.sum(squares, axis=0))


def choose(tokens: int, features: int, depth: int, count: int, top: int) -> GemmConfig:
    """Return the tiles for both GEMMs of `count` experts with `top` per token: measured ones, else by rule.

    features, depth: of a gate-up matrix."""
    measured = tuned.lookup(tokens, features, depth, count, top)
    return measured or by_rule(tokens, count, top, hopper=is_hopper())


def _grouped(
    kind: str, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, space: ExpertSpace, config: GemmConfig,
    num_sms: int, tokens: int, activation: str = "",
) -> None:  # fmt: skip
    """Launch the kernel that `config` names over all experts."""
    if a.dtype != weight.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"operands must both be bfloat16 or float16, not {a.dtype} and {weight.dtype}")
    if weight.shape[2] % 8 or out.shape[1] % 8:
        raise ValueError("rows must be a multiple of 16 bytes long")
    pairs = tokens * space.place.shape[1]
    tiles = min(pairs, -(-pairs // config.tokens) + weight.shape[0])
    grid = min(num_sms * config.per_sm, tiles * -(-weight.shape[1] // config.features))
    if config.special:
        from weft.kernels.experts import experts_hopper as kernels
    else:
        kernels = experts_triton  # type: ignore[misc]
    kernels.launch_grouped(kind, a, weight, bias, out, space.tiles, space.number, config, grid, activation)


def scatter_options(
    tokens: int, hidden: int, count: int, top: int, config: GemmConfig, columns: int
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid and the constants of a scatter kernel. columns: how many a program copies at once."""
    tiles, padded, wide = -(-tokens // TILE), max(16, triton.next_power_of_2(count)), triton.next_power_of_2(top)
    each = max(1, 32 // wide)  # tokens per program
    whole = columns if tokens <= FEW_TOKENS else 8 * columns
    return (-(-tokens // each), -(-hidden // whole)), {
        "E": count, "EP": padded, "K": top, "KP": wide, "BT": TILE, "TOKENS": each, "COLUMNS": whole, "BC": columns,
        "CHUNK": max(1, min(32, 4096 // padded, triton.next_power_of_2(tiles))), "PAD": config.tokens,
        "GROUP": config.group, "FIELDS": TILE_FIELDS, "num_warps": 4, **pdl_options(),
    }  # fmt: skip


def experts_gate_up(
    x: Tensor, sumsq: Tensor | None, choice: Choice, weight: Tensor, eps: float, *, activation: str = "silu",
    bias: Tensor | None = None, space: ExpertSpace, num_sms: int, num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:  # fmt: skip
    """Apply the norm and the experts' gate-up matrices `[E, 2 I, H]` (rows alternate), into rows of `space.hidden`.

    x `[T, H]`, sumsq `[sums, T]` float32, bias `[E, 2 I]`; choice is of the same T tokens. The work list in `space` is
    written for tiles of `config`: `experts_residual` needs the same one."""
    tokens, hidden = x.shape
    count, features, _ = weight.shape
    top = choice.experts.shape[1]
    config = config or choose(tokens, features, hidden, count, top)
    grid, options = scatter_options(tokens, hidden, count, top, config, COLUMNS)
    _scatter_kernel[grid](
        x, sumsq, 0 if sumsq is None else sumsq.stride(0), choice.experts, choice.rank, choice.counts, space.place,
        space.rows, space.tiles, space.number, num_tokens, tokens, hidden, eps,
        PARTS=1 if sumsq is None else sumsq.shape[0], **options,
    )  # fmt: skip
    _grouped("gate_up", space.rows, weight, bias, space.hidden, space, config, num_sms, tokens, activation)
    return space.hidden


def experts_residual(
    choice: Choice, weight: Tensor, x: Tensor, *, bias: Tensor | None = None, out: Tensor, sumsq: Tensor,
    space: ExpertSpace, num_sms: int, num_tokens: Tensor | None = None, config: GemmConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write x plus the weighted sum of the experts' matrices `[E, H, I]` times `space.hidden` to `out` (may be x).

    bias `[E, H]`; sumsq `[sums, T]` float32 is scratch. Returns out and its sums of squares, one row `[1, T]`. An
    expert's result is rounded once; a token's experts are added in float32, in the order of its choices."""
    tokens, hidden = x.shape
    count, _, inter = weight.shape
    top = choice.experts.shape[1]
    config = config or choose(tokens, 2 * inter, hidden, count, top)
    _grouped("plain", space.hidden, weight, bias, space.rows, space, config, num_sms, tokens)
    _combine_kernel[(tokens,)](
        space.rows, space.place, choice.weights, x, out, sumsq, num_tokens, tokens, hidden, K=top,
        BLOCK=min(1024, triton.next_power_of_2(hidden)), num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out, sumsq[:1]


@triton.jit
def shared_gate(x, sumsq, stride_sumsq, gate, row, H, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sigmoid of a normed row of x times `gate`."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, H, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * H + at, mask=at < H, other=0.0).to(tl.float32)
        total += value * tl.load(gate + at, mask=at < H, other=0.0).to(tl.float32)
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    squares = tl.sum(tl.load(sumsq + part * stride_sumsq + row, mask=part < PARTS, other=0.0), axis=0)
    return 1.0 / (1.0 + tl.exp(-tl.sum(total, axis=0) * tl.rsqrt(squares / H + eps)))


@triton.jit(do_not_specialize=["stride_sumsq"])
def _switch_kernel(
    x, sumsq, stride_sumsq, gate, h, H, WIDTH, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    switch = shared_gate(x, sumsq, stride_sumsq, gate, row, H, eps, PARTS, BLOCK)
    for first in tl.range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(h + row * WIDTH + at, mask=at < WIDTH, other=0.0)
        tl.store(h + row * WIDTH + at, (value.to(tl.float32) * switch).to(value.dtype), mask=at < WIDTH)


def gate_shared(x: Tensor, sumsq: Tensor, gate: Tensor, eps: float, *, out: Tensor) -> Tensor:
    """Multiply `out [T, I]`, a shared expert's hidden part, by the sigmoid of the normed x times `gate [1, H]`."""
    tokens, hidden = x.shape
    _switch_kernel[(tokens,)](
        x, sumsq, sumsq.stride(0), gate, out, hidden, out.shape[1], eps, PARTS=sumsq.shape[0], BLOCK=1024, num_warps=4,
        **pdl_options(),
    )  # fmt: skip
    return out
