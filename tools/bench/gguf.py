"""`weft bench gguf`: how many numbers per second a CPU converts from GGUF blocks to bfloat16, by type and threads."""

from __future__ import annotations

import argparse
import os
import time

import torch

from weft.engine.model.checkpoint import Stored
from weft.engine.model.conversion import Conversion, Wanted
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.gguf import blocks
from weft.engine.model.gguf.checkpoint import dequantized

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
WIDTH = 4096  # Values per row.
MILLIONS = 64  # Numbers of one measurement, in millions: more than the caches hold.
TENSORS = 16


def _measure(kind: str, threads: int) -> tuple[float, float]:
    """Return millions of numbers per second, and per second of processor time, of the best of three runs."""
    per_block, size = blocks.block_of(kind)
    rows = MILLIONS * 2**20 // WIDTH // TENSORS
    raw = torch.randint(0, 32, (rows, WIDTH // per_block * size), dtype=torch.uint8)
    stored = Stored(raw, dequantized(kind), by_rows=True)
    wanted = [Wanted("", stored, (rows, WIDTH), torch.bfloat16)] * TENSORS
    best = (0.0, 0.0)
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        with Conversion(wanted, FiniteCheck(), threads) as conversion:
            for _ in wanted:
                conversion.take()
        count = rows * WIDTH * TENSORS / 1e6
        best = max(best, (count / (time.perf_counter() - wall), count / (time.process_time() - cpu)))
    return best


def run(arguments: argparse.Namespace) -> int:
    counts = arguments.threads or sorted({1, 2, len(os.sched_getaffinity(0))})
    print("M numbers/s by threads (per second of processor time, which other processes do not slow as much)")
    print(f"{'type':8}" + "".join(f"{n:>15}" for n in counts))
    for kind in arguments.kinds or KINDS:
        cells = (_measure(kind, n) for n in counts)
        print(f"{kind:8}" + "".join(f"{wall:>8.0f} ({cpu:>4.0f})" for wall, cpu in cells), flush=True)
    return 0
