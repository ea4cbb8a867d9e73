"""What reading packed pages would cost a kernel: `python tests/gpu/packed_reader.py`, on a GPU.

Two loops that only add up the squares of what they read, over pages of the 8B shape (8 MiB): bf16 as it lies in the
pool, and packed pages unpacked in registers, whose escapes are left out (patching them comes on top). Each sum is
checked. So the packed loop's time beside the other's is the best that decode attention could gain by such pages, and
its joules too.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels import packed_page_triton
from weft.kernels.measure import Meter, sustained
from weft.kernels.packed_page import PackedPage

FORMS = {"8B": PackedPage(32 * 2 * 64 * 1024, 64, 1024), "small": PackedPage(2 * 2 * 16 * 64, 16, 64)}


@triton.jit
def _squares(word):
    """Of the two bf16 numbers of each word."""
    low = (word << 16).to(tl.float32, bitcast=True)
    high = (word & -65536).to(tl.float32, bitcast=True)
    return tl.sum(low * low + high * high)


@triton.jit
def _raw_kernel(pool, out, WORDS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr):
    """A program: some of a page's tiles."""
    page = pool + tl.program_id(1).to(tl.int64) * WORDS
    total = 0.0
    for first in tl.range(tl.program_id(0) * TILE, WORDS, tl.num_programs(0) * TILE, num_stages=STAGES):
        total += _squares(tl.load(page + first + tl.arange(0, TILE)))
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def _packed_kernel(
    cells, out, STRIDE: tl.constexpr, BASES_AT: tl.constexpr, CODES_AT: tl.constexpr, LOWS_AT: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program: some columns of a page, in all its blocks; bases are read once a block, as a head's would be."""
    cell = cells + tl.program_id(1).to(tl.int64) * STRIDE
    bases = (cell + BASES_AT).to(tl.pointer_type(tl.int16))
    lows = (cell + LOWS_AT).to(tl.pointer_type(tl.int16))
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    total = 0.0
    for part in tl.range(0, BLOCKS * (ROWS // BR), num_stages=STAGES):
        block = part // (ROWS // BR)
        row = part % (ROWS // BR) * BR + tl.arange(0, BR)
        at = (block * ROWS + row)[:, None] * COLUMNS + column[None, :]
        base = tl.load(bases + block * COLUMNS + column).to(tl.int32)[None, :]
        code = tl.load(cell + CODES_AT + at).to(tl.int32)
        low = tl.load(lows + at).to(tl.int32)
        first = ((base & 255) - (code & 15)) & 255
        second = (((base >> 8) & 255) - (code >> 4)) & 255
        signs = ((low & 0x80) << 8) | ((low & 0x8000) << 16)
        word = signs | (low & 0x7F) | ((low & 0x7F00) << 8) | first << 7 | second << 23
        total += _squares(word)
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), total)


def read_raw(pool: Tensor, out: Tensor, words: int, tile: int, stages: int, warps: int) -> None:
    _raw_kernel[(out.shape[1], len(pool))](
        packed_page_triton._words(pool), out, WORDS=words, TILE=tile, STAGES=stages, num_warps=warps
    )  # fmt: skip


def read_packed(form: PackedPage, cells: Tensor, out: Tensor, rows: int, columns: int, stages: int, warps: int) -> None:
    _packed_kernel[(form.width // 2 // columns, len(cells))](
        cells, out, STRIDE=cells.stride(0), BASES_AT=form.bases_at, CODES_AT=form.codes_at, LOWS_AT=form.lows_at,
        BLOCKS=form.blocks, ROWS=form.rows, COLUMNS=form.width // 2, BC=columns, BR=rows, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--form", choices=FORMS, default="8B")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    form, device = FORMS[options.form], "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    pool = torch.empty(options.pages, form.values, dtype=torch.bfloat16, device=device)
    spread = torch.exp(torch.randn(form.blocks, 1, form.width, device=device))
    for page in pool.view(options.pages, form.blocks, form.rows, form.width):
        # within 2^14 of a channel's largest, so that no number is an escape
        drawn = torch.randn(page.shape, device=device)
        page.copy_(drawn.sign() * drawn.abs().clamp(0.01, 4.0) * spread)
    cells = torch.zeros(options.pages, form.nbytes, dtype=torch.uint8, device=device)
    most = packed_page_triton.MOST_PAGES
    for first in range(0, options.pages, most):
        some = list(range(first, min(first + most, options.pages)))
        packed_page_triton.pack(form, pool, some, cells[first:])
    want = sum(float(page.float().square().sum(dtype=torch.float64)) for page in pool)
    meter, rows = Meter() if device == "cuda" else None, []
    half = form.width // 2
    tried = [("bf16", min(tile, form.values // 2), 0, 3, 4) for tile in (1024, 4096)]
    tried += [
        ("packed", min(form.rows, tall), min(half, wide), stages, 4)
        for tall, wide, stages in ((16, 64, 3), (32, 64, 3), (16, 128, 3), (8, 256, 3), (32, 64, 1))
    ]
    for kind, tall, wide, stages, warps in tried:
        if kind == "bf16":
            out = torch.zeros(options.pages, max(1, form.values // 2 // (16 * tall)), device=device)
            call = partial(read_raw, pool, out, form.values // 2, tall, stages, warps)
        else:
            out = torch.zeros(options.pages, half // wide, device=device)
            call = partial(read_packed, form, cells, out, tall, wide, stages, warps)
        call()
        error = abs(float(out.sum(dtype=torch.float64)) / want - 1)
        assert error < 1e-3, (kind, error)
        if meter is None:
            print(kind, tall, wide, stages, f"error {error:.1e}")
            continue
        s = sustained([call], meter, options.seconds)
        values = options.pages * form.values / s.ms / 1e9
        rows.append({
            "read": kind, "tile": [tall, wide], "stages": stages, "warps": warps, "ms": s.ms, "watts": s.watts,
            "mhz": s.mhz, "joules": s.joules, "TB/s of bf16": 2 * values,
        })  # fmt: skip
        print(f"{kind:7} {tall:5} x {wide:4} {stages} stages: {s.ms:7.3f} ms, {2 * values:5.2f} TB/s of bf16, "
              f"{s.watts:4.0f} W, {s.mhz:5.0f} MHz, {s.joules:.4f} J", flush=True)  # fmt: skip
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if meter is not None:
        meter.close()


if __name__ == "__main__":
    main()
