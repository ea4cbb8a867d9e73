"""`numbers`: the numbers in a tensor's bytes, plain or in ggml's blocks, on whatever device the bytes are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
CHUNK = 1 << 24
"""numbers that are made of blocks at once: they pass through float32 and through whole numbers"""


def block_of(kind: str) -> tuple[int, int]:
    """Numbers and bytes of a block. Raises `KeyError` for what the library does not know."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return int(numbers), int(size)


def numbers(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """`raw [..., bytes of a row]` uint8, blocks -> `[..., numbers of a row]`, rounded once from float32 to `dtype`."""
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
    """From blocks in uint8 to float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as on_cpu

    which = GGMLQuantizationType[kind]
    try:
        # Runs where the tensor is, and with all threads; the library's own is numpy.
        from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize
    except ImportError:  # not in every version that weft takes
        known = False
    else:
        known = int(which) in GGML_BLOCK
    if known:
        return lambda blocks: dequantize(blocks, int(which), torch.float32)
    return lambda blocks: torch.from_numpy(on_cpu(blocks.cpu().numpy(), which)).to(blocks.device)
