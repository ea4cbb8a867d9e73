"""In how many steps sums are made, by their size: measured once by all ranks, and kept beside the tuned tiles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from weft.engine.runner.collectives import Collectives

UNKNOWN = 0
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""tokens that are measured, as far as an iteration has so many; below the first, one step"""
CLEARLY = 0.97
"""of the time of one step: what two must be under"""


def file_of(folder: Path, gpu: str, source: str, ranks: int, hidden: int) -> Path:
    """gpu: its name. source: digest of the kernels' code."""
    return folder / f"sums-{'-'.join(gpu.lower().split())}-{ranks}x{hidden}-{source[:12]}.json"


def read(file: Path) -> dict[int, int]:
    """By tokens; empty where nothing is known, or the file is none of these."""
    try:
        found = {int(tokens): int(shots) for tokens, shots in json.loads(file.read_text())["shots"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found if set(found.values()) <= {1, 2} else {}


def agreed_shots(
    host: Collectives, file: Path, max_tokens: int, microseconds: Callable[[int, int], float] | None
) -> dict[int, int]:
    """Steps by tokens, the same on all ranks: those that rank 0's file knows, else by measurement, which it then keeps.

    microseconds: of a sum of so many tokens in so many steps; every rank measures at once. None: nobody does, and what
    is not known is left out.
    """
    sizes = [size for size in SIZES if size <= max_tokens]
    known = _told(host, sizes, read(file))
    if microseconds is None or len(known) == len(sizes):
        return known
    figures = {size: (microseconds(size, 1), microseconds(size, 2)) for size in sizes}
    chosen = {size: 2 if two < CLEARLY * one else 1 for size, (one, two) in figures.items()}
    if host.rank == 0:
        part = file.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"shots": chosen, "microseconds": figures}, indent=1))
            part.replace(file)
    return _told(host, sizes, chosen)


def _told(host: Collectives, sizes: Sequence[int], own: dict[int, int]) -> dict[int, int]:
    """What rank 0 has."""
    every = host.all_gather(torch.tensor([own.get(size, UNKNOWN) for size in sizes]))
    return {size: shots for size, shots in zip(sizes, every[0].tolist(), strict=True) if shots != UNKNOWN}
