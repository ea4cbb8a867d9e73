"""`memory_budget`: what an engine will hold at most, told when it starts."""

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
"""of a process on a CPU: interpreter, libraries, threads, and what oneDNN keeps of compiled products (see
`wire.blank.PRIMITIVE_CACHES`)"""


def memory_budget(
    spec: ModelSpec, weights: Weights | BroadModule, config: ResolvedConfig, host_pages_bytes: int
) -> MemoryBudget:
    """On a CPU of the process, on a GPU of the device (`host_pages` are on the host there as well).

    Raises nothing; `config.num_pages` is known.
    """
    assert config.num_pages is not None
    kv_pages = config.num_pages * config.kv.page_bytes
    if config.device.type == "cuda":
        # Everything else on the device lies below the share that the pool was sized by.
        common = weights.num_bytes if config.common_weights else 0
        share = share_bytes(config, memory_bytes(config.device), common)
        working = max(0, share - weights.num_bytes - kv_pages)
    else:
        working = RUNTIME_BYTES + _cpu_buffers(spec, config)
    return MemoryBudget(weights=weights.num_bytes, kv_pages=kv_pages, host_pages=host_pages_bytes, working=working)


def _cpu_buffers(spec: ModelSpec, config: ResolvedConfig) -> int:
    """Activations, logits, gathered pages and masks of the largest iteration, and resident arrays."""
    tokens, seqs, length = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    rows = min(tokens, seqs)
    layer = spec.qkv_size + 3 * spec.hidden_size + 3 * spec.intermediate_size
    activations = 4 * tokens * layer
    logits = 8 * 4 * rows * spec.vocab_size  # and what sampling makes of them
    penalties = 5 * seqs * spec.vocab_size
    row = spec.num_kv_heads * spec.head_dim
    # as they lie in pages, and once more where that is not what is computed with
    each = config.kv.dtype.itemsize + config.compute_dtype.itemsize * (config.kv.dtype != config.compute_dtype)
    gathered = 2 * each * min(GROUP_ELEMENTS, rows * length * row)
    # Lengths in a group differ by less than a factor of two; float32, and once more in the computation's dtype.
    masks = (4 + config.compute_dtype.itemsize) * min(GROUP_ELEMENTS, 2 * tokens * spec.heads_per_kv * length)
    slots = 4 * seqs * length
    return activations + logits + penalties + gathered + masks + slots
