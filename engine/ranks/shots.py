"""How sums are made, by their size: measured once by all ranks, and kept beside the tuned tiles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from weft.engine.runner.device.collectives import MEASURED_STEPS, Collectives, Steps

SIZES = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""tokens that are measured, as far as an iteration has so many"""
CLEARLY = 0.97
"""of the time of what is simpler: what something else must be under"""
SUSTAINED_TOKENS = 1024
"""from which an iteration is at the power limit, where bursts say too little: a Llama-3-70B's layer of 2,048 tokens on
two H200s took 1.1 % less with products that send in two steps, which were 0.8 % slower in bursts than sums in one. No
other model and size was measured so"""
_UNKNOWN = (0, 0)


def file_of(folder: Path, gpu: str, source: str, ranks: int, shape: str) -> Path:
    """gpu: its name. source: digest of the kernels' code. shape: what tells a model's sums and products apart."""
    return folder / f"sums-{'-'.join(gpu.lower().split())}-{ranks}x{shape}-{source[:12]}.json"


def read(file: Path) -> dict[int, Steps]:
    """By tokens; empty where nothing is known, or the file is none of these."""
    try:
        found = {
            int(tokens): Steps(*map(int, steps)) for tokens, steps in json.loads(file.read_text())["steps"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found if all(s.sums in (1, 2) and s.pushed in (0, 1, 2) for s in found.values()) else {}


def best(figures: dict[Steps, float], *, sustained: bool = False) -> Steps:
    """The quickest; of those that are as quick, the simplest, which come first. sustained: products that send in two
    steps come before these."""
    chosen = min(figures, key=lambda steps: (steps.pushed != 2 and sustained, steps.pushed, steps.sums))
    for steps, microseconds in figures.items():
        if microseconds < CLEARLY * figures[chosen]:
            chosen = steps
    return chosen


def agreed_steps(
    host: Collectives,
    file: Path,
    max_tokens: int,
    microseconds: Callable[[int, Steps], float] | None,
    *,
    pushes: bool = False,
) -> dict[int, Steps]:
    """Steps by tokens, the same on all ranks: those that rank 0's file knows, else by measurement, which it then keeps.

    microseconds: of a sum of so many tokens made so, the product before it included; every rank measures at once.
    None: nobody does, and what is not known is left out. pushes: products may write to the ranks.
    """
    sizes = [size for size in SIZES if size <= max_tokens]
    known = _told(host, sizes, read(file))
    if not pushes:
        known = {size: steps._replace(pushed=0) for size, steps in known.items()}
    if microseconds is None or len(known) == len(sizes):
        return known
    tried = [steps for steps in MEASURED_STEPS if pushes or not steps.pushed]
    figures = {size: {steps: microseconds(size, steps) for steps in tried} for size in sizes}
    chosen = {}
    for size, of in figures.items():
        sums = best({s: t for s, t in of.items() if not s.pushed})
        sent = {sums: of[sums], **{s: t for s, t in of.items() if s.pushed}}
        chosen[size] = Steps(sums.sums, best(sent, sustained=size >= SUSTAINED_TOKENS).pushed)
    if host.rank == 0:
        part = file.with_suffix(f".{os.getpid()}.part")
        told = {size: {f"{s.sums} {s.pushed}": round(t, 2) for s, t in of.items()} for size, of in figures.items()}
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"steps": chosen, "microseconds": told}, indent=1))
            part.replace(file)
    return _told(host, sizes, chosen)


def _told(host: Collectives, sizes: Sequence[int], own: dict[int, Steps]) -> dict[int, Steps]:
    """What rank 0 has."""
    every = host.all_gather(torch.tensor([own.get(size, _UNKNOWN) for size in sizes]))
    return {
        size: Steps(*steps) for size, steps in zip(sizes, every[0].tolist(), strict=True) if tuple(steps) != _UNKNOWN
    }
