"""`bytes_for_pages`: the GPU memory that an engine's KV pool may use.

An engine on its own uses free memory. Engines that share a GPU cannot, since they start and end at any time: each of N
engines gets an N-th of what all may use, and counts only its own memory against that.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.runner.options.footprint import GIB
from weft.engine.runner.options.resolve import ResolvedConfig

CONTEXT_BYTES = GIB
"""Assumed GPU memory of a process besides torch's tensors, if other processes use the GPU too."""


class MemoryUsage(NamedTuple):
    """Memory of a device, in bytes, before the pool is allocated."""

    total: int
    free: int
    own: int
    """Used by this process's tensors, without weights that other engines map too."""
    common: int = 0
    """Used by these shared weights."""


def share_bytes(config: ResolvedConfig, total: int, common: int) -> int:
    """Return the device memory that this engine may use, shared weights included. common: bytes of shared weights."""
    return common + (int(total * config.gpu_memory_utilization) - common) // config.sharers


def bytes_for_pages(config: ResolvedConfig, taken: MemoryUsage, reserve: int) -> int:
    """Return the bytes; negative if the engine does not fit even without pages. reserve: bytes to leave free."""
    share = share_bytes(config, taken.total, taken.common)
    if config.sharers > 1 or config.has_neighbours:
        return share - taken.common - taken.own - CONTEXT_BYTES - reserve
    return share - (taken.total - taken.free) - reserve
