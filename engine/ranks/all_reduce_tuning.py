"""Chooses the steps of an all-reduce by size: all ranks measure once, and rank 0 caches the result on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from weft.engine.runner.device.collectives import MEASURED_STEPS, Collectives, Steps

SIZES = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Token counts to measure, up to the largest iteration."""
CLEAR_GAIN = 0.97  # A less simple choice must take less than this share of the simpler one's time.
SUSTAINED_TOKENS = 1024
"""Tokens from which iterations run at the power limit, where bursts mislead: a Llama-3-70B layer of 2,048 tokens on two
H200s took 1.1 % less time with GEMMs that push in two steps, which were 0.8 % slower than one-step sums in bursts. No
other model or size was measured this way."""
_UNKNOWN = (0, 0)


def file_of(folder: Path, gpu: str, source: str, ranks: int, shape: str) -> Path:
    """gpu: its name. source: digest of the kernels' code. shape: identifies the model's sums and GEMMs."""
    return folder / f"sums-{'-'.join(gpu.lower().split())}-{ranks}x{shape}-{source[:12]}.json"


def read(file: Path) -> dict[int, Steps]:
    """Return steps by token count; empty if the file is missing or malformed."""
    try:
        steps = json.loads(file.read_text())["steps"].items()
        found = {int(tokens): Steps(*map(int, own)) for tokens, own in steps}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found if all(s.sums in (1, 2) and s.pushed in (0, 1, 2) for s in found.values()) else {}


def fastest(figures: dict[Steps, float], *, sustained: bool = False) -> Steps:
    """Return the fastest steps, or the simplest of those that are about as fast. sustained: prefer two-step pushes."""
    chosen = min(figures, key=lambda steps: (steps.pushed != 2 and sustained, steps.pushed, steps.sums))
    for steps, microseconds in figures.items():
        if microseconds < CLEAR_GAIN * figures[chosen]:
            chosen = steps
    return chosen


def tuned_steps(
    host: Collectives, file: Path, max_tokens: int, microseconds: Callable[[int, Steps], float] | None, *,
    pushes: bool = False,
) -> dict[int, Steps]:  # fmt: skip
    """Return steps by token count, the same on all ranks: from rank 0's file, else measured and then cached there.

    microseconds: times a sum of that many tokens with these steps, GEMM included; all ranks call it at the same point.
    None: do not measure, leave unknown sizes out. pushes: GEMMs may write to other ranks."""
    sizes = [size for size in SIZES if size <= max_tokens]
    known = _of_rank_0(host, sizes, read(file))
    if not pushes:
        known = {size: steps._replace(pushed=0) for size, steps in known.items()}
    if microseconds is None or len(known) == len(sizes):
        return known
    tried = [steps for steps in MEASURED_STEPS if pushes or not steps.pushed]
    figures = {size: {steps: microseconds(size, steps) for steps in tried} for size in sizes}
    chosen = {}
    for size, of in figures.items():
        sums = fastest({s: t for s, t in of.items() if not s.pushed})
        sent = {sums: of[sums], **{s: t for s, t in of.items() if s.pushed}}
        chosen[size] = Steps(sums.sums, fastest(sent, sustained=size >= SUSTAINED_TOKENS).pushed)
    if host.rank == 0:
        part = file.with_suffix(f".{os.getpid()}.part")
        times = {size: {f"{s.sums} {s.pushed}": round(t, 2) for s, t in of.items()} for size, of in figures.items()}
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"steps": chosen, "microseconds": times}, indent=1))
            part.replace(file)
    return _of_rank_0(host, sizes, chosen)


def _of_rank_0(host: Collectives, sizes: Sequence[int], own: dict[int, Steps]) -> dict[int, Steps]:
    """Return rank 0's choice."""
    every = host.all_gather(torch.tensor([own.get(size, _UNKNOWN) for size in sizes]))
    return {
        size: Steps(*steps) for size, steps in zip(sizes, every[0].tolist(), strict=True) if tuple(steps) != _UNKNOWN
    }
