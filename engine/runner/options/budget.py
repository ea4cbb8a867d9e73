"""`memory_budget`: the memory that an engine uses at most; `bytes_for_pages`: the size of its KV pool on a GPU.

An engine on its own uses free memory. Engines that share a GPU cannot, since they start and end at any time: each of N
engines gets an N-th of what all may use, and counts only its own memory against that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.options.footprint import GIB, memory_bytes
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.wire.messages import MemoryBudget
from weft.kernels.attention.torch_backend import GROUP_ELEMENTS

if TYPE_CHECKING:
    from weft.engine.model.transformers_impl.module import TransformersModule

RUNTIME_BYTES = 560 << 20
"""Memory of a CPU process: interpreter, libraries, threads, and compiled GEMMs that oneDNN caches (see
`wire.preloaded.PRIMITIVE_CACHES`)."""
CONTEXT_BYTES = GIB
"""Assumed GPU memory of a process besides torch's tensors, if other processes use the GPU too."""


class MemoryUsage(NamedTuple):
    """Memory of a device, in bytes, before the pool is allocated."""

    total: int
    free: int
    own: int  # Used by this process's tensors, without weights that other engines map too.
    common: int = 0  # Used by these shared weights.


def share_bytes(config: ResolvedConfig, total: int, common: int) -> int:
    """Return the device memory that this engine may use, shared weights included. common: bytes of shared weights."""
    return common + (int(total * config.gpu_memory_utilization) - common) // config.sharers


def bytes_for_pages(config: ResolvedConfig, usage: MemoryUsage, reserve: int) -> int:
    """Return the bytes; negative if the engine does not fit even without pages. reserve: bytes to leave free."""
    share = share_bytes(config, usage.total, usage.common)
    if config.sharers > 1 or config.has_neighbours:
        return share - usage.common - usage.own - CONTEXT_BYTES - reserve
    return share - (usage.total - usage.free) - reserve


def memory_budget(
    spec: ModelSpec, weights: Weights | TransformersModule, config: ResolvedConfig, host_pages_bytes: int
) -> MemoryBudget:
    """Return the budget of the process on a CPU, or of the device on a GPU, where `host_pages` are on the host.

    `config.num_pages` must be known.
    """
    assert config.num_pages is not None
    kv_pages = config.num_pages * config.kv.page_bytes
    if config.device.type == "cuda":
        # Everything else on the device fits in the share that the pool was sized by.
        common = weights.num_bytes if config.common_weights else 0
        share = share_bytes(config, memory_bytes(config.device), common)
        working = max(0, share - weights.num_bytes - kv_pages)
    else:
        working = RUNTIME_BYTES + _cpu_buffers(spec, config)
    return MemoryBudget(weights=weights.num_bytes, kv_pages=kv_pages, host_pages=host_pages_bytes, working=working)


def _cpu_buffers(spec: ModelSpec, config: ResolvedConfig) -> int:
    """Return the bytes of the largest iteration's activations, logits, gathered pages and masks, and of arrays per
    slot."""
    tokens, seqs, length = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    rows = min(tokens, seqs)
    layer = spec.qkv_size + 3 * spec.hidden_size + 3 * spec.intermediate_size
    activations = 4 * tokens * layer
    logits = 8 * 4 * rows * spec.vocab_size  # and their copies in sampling
    penalties = 5 * seqs * spec.vocab_size
    row = spec.num_kv_heads * spec.head_dim
    # As stored in pages, and once more if the computation uses another dtype.
    each = config.kv.dtype.itemsize + config.compute_dtype.itemsize * (config.kv.dtype != config.compute_dtype)
    gathered = 2 * each * min(GROUP_ELEMENTS, rows * length * row)
    # Lengths in a group differ by less than a factor of two; float32, and once more in the computation's dtype.
    masks = (4 + config.compute_dtype.itemsize) * min(GROUP_ELEMENTS, 2 * tokens * spec.heads_per_kv * length)
    slots = 4 * seqs * length
    return activations + logits + penalties + gathered + masks + slots + _state_buffers(spec, tokens, rows)


def _state_buffers(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Return the bytes that a recurrent layer needs in the largest iteration: its inputs, rows of a block's square
    matrices for each token and head, and the states of all requests before and after."""
    own = spec.recurrence
    if own is None:
        return 0
    each = 6 * own.block + 8 * (own.key_dim + own.value_dim)
    return 4 * tokens * (3 * own.inner + own.heads * each) + 4 * rows * own.state.nbytes
