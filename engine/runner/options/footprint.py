"""`Footprint`: device memory of a model's engines, and the memory left for KV pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.engine.config import EngineConfig
from weft.engine.errors import OutOfMemory
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.state_layout import NO_STATES, StateLayout
from weft.engine.runner.options.machine import CPU_MEMORY_SHARE, machine_memory

GIB = 2**30


def memory_bytes(device: torch.device) -> int:
    """Return the memory that this process may use: the GPU's, or the machine's within its control group's limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_memory()


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of engines with the same configuration on one device."""

    config: EngineConfig
    device: torch.device  # The meta device stands for a GPU on which everything fits.
    on_gpu: bool
    ranks: int
    weight_bytes: int  # Bytes of one rank.
    copies: int  # Copies of the weights, for all engines on the device.

    def check_weights(self, dtype: torch.dtype) -> None:
        """Raise `OutOfMemory` if the weights leave no memory for anything else."""
        own = self.weight_bytes * (1 if self.on_gpu else self.ranks)  # ranks on a CPU share its memory
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

    def pages(self, kv: KvLayout, most: int, states: StateLayout = NO_STATES) -> int | None:
        """Return the size of an engine's pool: as configured, or on a CPU `most` at most. On a GPU, None means that it
        is measured later. Raises `OutOfMemory` if there are too few pages, or the engines do not fit together."""
        config, share = self.config, self.config.share
        if config.num_pages is not None:
            pages = config.num_pages
        elif config.kv_cache_gib is not None:
            pages = kv.pages_in(min(config.kv_cache_gib, 2**40) * GIB / self.ranks)
        elif self.on_gpu:
            return None
        else:
            room = int(memory_bytes(self.device) * share.memory * CPU_MEMORY_SHARE / (share.sharers * self.ranks))
            pages = min(most, kv.pages_in(room - self.weight_bytes * self.copies // share.sharers))
        if pages < (needed := 2 + states.reserved):
            of_states = f" ({states.reserved} for the recurrent states of a request)" if states.pages else ""
            raise OutOfMemory(
                f"the KV pool holds {max(pages, 0)} pages of {kv.page_bytes / 2**20:.1f} MiB, but needs at least "
                f"{needed}{of_states}: raise --kv-cache-gib or lower --page-size"
            )
        if self.device.type != "meta" and (share.sharers > 1 or (share.memory < 1 and not self.on_gpu)):
            self._check_together(pages * kv.page_bytes)
        return pages

    def _check_together(self, pool_bytes: int) -> None:
        """Raise `OutOfMemory` if all engines together do not fit. pool_bytes: of one rank of one engine."""
        config, sharers = self.config, self.config.share.sharers
        own = self.ranks * (self.weight_bytes * self.copies // sharers + pool_bytes)
        available = config.share.memory * memory_bytes(self.device)
        if (needed := sharers * (own + (0 if self.on_gpu else config.host_kv_gib * GIB))) > available:
            raise OutOfMemory(
                f"{sharers} engines need {needed / GIB:.1f} GiB for weights and KV pages, the "
                f"{'GPU' if self.on_gpu else 'machine'} has {available / GIB:.1f} GiB for them: lower --kv-cache-gib"
                f"{' or --num-pages' if self.on_gpu else ', --num-pages or --host-kv-gib'}, which are each engine's, "
                "or the number of engines"
            )
