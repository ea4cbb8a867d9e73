"""`Footprint`: what the engines of a model take of their device's memory, and what is left for KV pages."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from weft.engine.config import EngineConfig
from weft.engine.errors import OutOfMemory
from weft.engine.memory.kv_layout import KvLayout

GIB = 2**30
CPU_MEMORY_SHARE = 0.25
"""of the machine's memory, at most, for KV pages on the CPU"""


def memory_bytes(device: torch.device) -> int:
    """Memory this process may use: the GPU's; or the machine's, or its control group's limit when that is lower."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as f:
            limit = f.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of engines that are configured alike."""

    config: EngineConfig
    device: torch.device
    """the meta device, on which all of them fit, stands for a GPU"""
    on_gpu: bool
    ranks: int
    weight_bytes: int
    """of one rank"""
    copies: int
    """of the weights, for all engines on the device"""

    def check_weights(self, dtype: torch.dtype) -> None:
        """Raises `OutOfMemory` where they leave nothing beside them."""
        own = self.weight_bytes * (1 if self.on_gpu else self.ranks)  # ranks of a CPU share its memory
        part, copies = self.config.share.memory, self.copies
        if self.device.type == "meta" or copies * own <= 0.9 * part * memory_bytes(self.device):
            return
        times = f" for each of {copies} engines" if copies > 1 else ""
        times += f", and {part:.0%} of it is this model's (memory_share)" if part < 1 else ""
        raise OutOfMemory(
            f"the weights need {own / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}{times}, "
            f"the {'GPU' if self.on_gpu else 'machine'} has {memory_bytes(self.device) / GIB:.1f} GiB: "
            "use a smaller model or --dtype bfloat16"
        )

    def pages(self, kv: KvLayout, most: int) -> int | None:
        """How many the pool of an engine has, where that is known before it runs: as many as the configuration says,
        else of a CPU's memory `most` at most. Raises `OutOfMemory` where there are too few, or too many together."""
        config, share = self.config, self.config.share
        if config.num_pages is not None:
            pages = config.num_pages
        elif config.kv_cache_gib is not None:
            pages = kv.pages_in(config.kv_cache_gib * GIB / self.ranks)
        elif self.on_gpu:
            return None
        else:
            room = int(memory_bytes(self.device) * share.memory * CPU_MEMORY_SHARE / (share.sharers * self.ranks))
            pages = min(most, kv.pages_in(room - self.weight_bytes * self.copies // share.sharers))
        if pages < 2:
            raise OutOfMemory(
                f"the KV pool has room for {max(pages, 0)} pages of {kv.page_bytes / 2**20:.1f} MiB, "
                "it needs at least 2: raise --kv-cache-gib or lower --page-size"
            )
        if self.device.type != "meta" and (share.sharers > 1 or (share.memory < 1 and not self.on_gpu)):
            self._check_together(pages * kv.page_bytes)
        return pages

    def _check_together(self, pool_bytes: int) -> None:
        """Refuse engines that fit the device one by one, but not together. pool_bytes: of one rank of one of them."""
        config, sharers = self.config, self.config.share.sharers
        own = self.ranks * (self.weight_bytes * self.copies // sharers + pool_bytes)
        all_of_it = config.share.memory * memory_bytes(self.device)
        if (together := sharers * (own + (0 if self.on_gpu else config.host_kv_gib * GIB))) > all_of_it:
            raise OutOfMemory(
                f"{sharers} engines need {together / GIB:.1f} GiB for weights and KV pages, the "
                f"{'GPU' if self.on_gpu else 'machine'} has {all_of_it / GIB:.1f} GiB for them: lower --kv-cache-gib"
                f"{' or --num-pages' if self.on_gpu else ', --num-pages or --host-kv-gib'}, which are each engine's, "
                "or the number of engines"
            )
