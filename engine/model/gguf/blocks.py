"""`dequantize`: converts a tensor's bytes, plain or in ggml blocks, to values on the device of the bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
CHUNK = 1 << 24  # Values converted at once, because they pass through integers and float32.


def block_of(kind: str) -> tuple[int, int]:
    """Return values and bytes per block. Raises `KeyError` for a type that the library does not support."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(values), int(size)


def dequantize(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Convert `[..., bytes per row]` uint8 blocks to `[..., values per row]`, rounded once from float32 to `dtype`."""
    per_block, size = block_of(kind)
    rows = raw.reshape(-1, raw.shape[-1])
    width = rows.shape[1] // size * per_block
    out = torch.empty(len(rows), width, dtype=dtype, device=raw.device)
    decode, step = _decoder(kind), max(1, CHUNK // max(1, width))
    for first in range(0, len(rows), step):
        some = rows[first : first + step].contiguous()
        out[first : first + step] = decode(some).reshape(len(some), width)
    return out.reshape(*raw.shape[:-1], width)


def _decoder(kind: str) -> Callable[[Tensor], Tensor]:
    """Return a function from uint8 blocks to float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_with_numpy

    which = GGMLQuantizationType[kind]
    try:
        # Runs on the tensor's device with all threads; the gguf library uses numpy.
        from transformers.integrations.gguf.dequant import GGML_BLOCK
        from transformers.integrations.gguf.dequant import dequantize as dequantize_with_torch
    except ImportError:  # not in every supported version
        known = False
    else:
        known = int(which) in GGML_BLOCK
    if known:
        return lambda blocks: dequantize_with_torch(blocks, int(which), torch.float32)
    return lambda blocks: torch.from_numpy(dequantize_with_numpy(blocks.cpu().numpy(), which)).to(blocks.device)
