"""What the device offers, and what the engine takes of it: dtype, batch bounds, the size of the KV pool."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.spec import ModelSpec

GIB = 2**30
CPU_MEMORY_SHARE = 0.25
"""of the machine's memory, at most, for KV pages on the CPU"""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The engine's options with every open choice made."""

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int

    def allocate_kv(self, spec: ModelSpec) -> Tensor:
        """The pool `[pages, layers, 2, page_size, Hkv, D]`, zeroed. Raises `OutOfMemory`."""
        shape = (self.num_pages, spec.num_layers, 2, self.page_size, spec.num_kv_heads, spec.head_dim)
        try:
            # Pages of zeros that the system maps on first touch: starting costs nothing, idle memory is not taken.
            pool = torch.from_numpy(np.zeros(math.prod(shape) * self.dtype.itemsize, np.uint8))
            return pool.view(self.dtype).view(shape)
        except MemoryError:
            size = self.num_pages * self.page_size * spec.kv_bytes_per_token(self.dtype.itemsize) / GIB
            raise OutOfMemory(f"{size:.1f} GiB of KV pages do not fit: lower --kv-cache-gib or --num-pages") from None


def memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit when that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as f:
            limit = f.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _cpu_dtype(spec: ModelSpec) -> torch.dtype:
    """bfloat16 for a bfloat16 checkpoint where the CPU multiplies it natively: half the bytes, twice the speed."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native and spec.dtype == "bfloat16" else torch.float32


def resolve(config: EngineConfig, spec: ModelSpec) -> DevicePlan:
    """Decide what the configuration leaves open. Raises `ConfigError` or `OutOfMemory`, one line."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is visible; use --device cpu")
    if config.device == "cuda":
        raise ConfigError("--device cuda is not supported by this version; use --device cpu")
    device = torch.device("cpu")
    # An operator's thread count, or all cores: the scheduler needs a fraction of one.
    torch.set_num_threads(config.cpu_threads or os.cpu_count() or 1)
    dtype = _cpu_dtype(spec) if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype == torch.float16:
        raise ConfigError("--dtype float16 needs a GPU; use float32 or bfloat16 on a CPU")
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ConfigError(f"--max-model-len {max_model_len} is more than the model's {spec.max_positions} positions")
    max_num_seqs = config.max_num_seqs or 256
    max_num_batched_tokens = config.max_num_batched_tokens or 512
    page_size = config.page_size
    page_bytes = page_size * spec.kv_bytes_per_token(dtype.itemsize)
    weight_bytes = spec.num_parameters * dtype.itemsize
    if weight_bytes > 0.9 * memory_bytes():
        raise OutOfMemory(
            f"the weights need {weight_bytes / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
            f"the machine has {memory_bytes() / GIB:.1f} GiB: use a smaller model or --dtype bfloat16"
        )
    pages_per_request = -(-max_model_len // page_size)
    if config.num_pages is not None:
        num_pages = config.num_pages
    elif config.kv_cache_gib is not None:
        num_pages = int(config.kv_cache_gib * GIB / page_bytes)
    else:
        room = int(memory_bytes() * CPU_MEMORY_SHARE) - weight_bytes
        num_pages = min(max_num_seqs * pages_per_request + 1, room // page_bytes)
    if num_pages < 2:
        raise OutOfMemory(
            f"the KV pool has room for {max(num_pages, 0)} pages of {page_bytes / 2**20:.1f} MiB, it needs at least 2: "
            "raise --kv-cache-gib or lower --page-size"
        )
    # A request that can never fit is refused at the door: the context limit is what the pool can hold.
    max_model_len = min(max_model_len, (num_pages - 1) * page_size)
    return DevicePlan(device, dtype, max_model_len, max_num_seqs, max_num_batched_tokens, page_size, num_pages)
