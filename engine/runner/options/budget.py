"""`memory_budget`: the memory that an engine uses at most, logged when it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.options.footprint import memory_bytes
from weft.engine.runner.options.gpu_memory import share_bytes
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.wire.messages import MemoryBudget
from weft.kernels.attention.torch_backend import GROUP_ELEMENTS

if TYPE_CHECKING:
    from weft.engine.model.broad.module import BroadModule

RUNTIME_BYTES = 560 << 20
"""Memory of a CPU process: interpreter, libraries, threads, and compiled GEMMs that oneDNN caches (see
`wire.preloaded.PRIMITIVE_CACHES`)."""


def memory_budget(
    spec: ModelSpec, weights: Weights | BroadModule, config: ResolvedConfig, host_pages_bytes: int
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
    return activations + logits + penalties + gathered + masks + slots
