"""`room_for_pages`: what of a GPU's memory an engine's KV pool may take, alone on the device or beside others.

Alone, an engine sees what is taken. Beside others it cannot: they start and end when they like. So each of N engines
has an N-th of what all may take, whatever the others hold at the moment, and counts its own memory against that.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.runner.options.footprint import GIB
from weft.engine.runner.options.resolve import ResolvedConfig

CONTEXT_BYTES = GIB
"""that a process takes of a GPU beside torch's tensors, where others' share of it cannot be told apart: assumed"""


class Taken(NamedTuple):
    """Of a device, in bytes, before there are pages."""

    total: int
    free: int
    own: int
    """by this process's tensors, without weights that others map as well"""
    common: int = 0
    """by such weights"""


def share_bytes(config: ResolvedConfig, total: int, common: int) -> int:
    """Memory of the device that this engine may use, weights in common included. common: bytes of these."""
    return common + (int(total * config.gpu_memory_utilization) - common) // config.sharers


def room_for_pages(config: ResolvedConfig, taken: Taken, reserve: int) -> int:
    """Bytes; negative where not even everything else fits. reserve: of these, to be left free."""
    share = share_bytes(config, taken.total, taken.common)
    if config.sharers > 1 or config.has_neighbours:
        return share - taken.common - taken.own - CONTEXT_BYTES - reserve
    return share - (taken.total - taken.free) - reserve
