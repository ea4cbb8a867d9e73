"""`dequantize`: converts a tensor's bytes, plain or in ggml blocks, to values on the device of the bytes.

The common types are converted here with few passes over each chunk, rare ones by `transformers` or the `gguf` library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from weft.engine.model.gguf.file import KINDS

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
CHUNK = 1 << 24  # Values that a GPU converts at once, because they pass through bytes and float32.
CPU_CHUNK = 1 << 20  # The same on a CPU: few enough for caches, and enough that threads do not wait for Python.
_BLOCKS = {name: (values, size) for name, values, size in KINDS.values()}

_LEVELS_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_LEVELS_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # Twice the values of this float type.


def block_of(kind: str) -> tuple[int, int]:
    """Return values and bytes per block. Raises `KeyError` for an unknown type."""
    return _BLOCKS[kind]


def dequantize(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Convert `[..., bytes per row]` uint8 blocks to `[..., values per row]`, rounded once from float32 to `dtype`."""
    per_block, size = block_of(kind)
    out = torch.empty((*raw.shape[:-1], raw.shape[-1] // size * per_block), dtype=dtype, device=raw.device)
    dequantize_into(out, raw, kind)
    return out


def dequantize_into(out: Tensor, raw: Tensor, kind: str) -> None:
    """Convert blocks to the contiguous `out`, see `dequantize`."""
    per_block, size = block_of(kind)
    blocks, values = raw.reshape(-1, size), out.view(-1, per_block)
    decode, step = _decoder(kind), max(1, (CPU_CHUNK if raw.device.type == "cpu" else CHUNK) // per_block)
    for first in range(0, len(blocks), step):
        some = blocks[first : first + step]
        values[first : first + step].copy_(decode(some).view(len(some), per_block))


def fields(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes `[n, groups, width]` to `[n, groups, 8 / bits, width]`: first the lowest bits of all."""
    count = 8 // bits
    out = packed.new_empty((*packed.shape[:2], count, packed.shape[2]))
    for i in range(count):
        torch.bitwise_right_shift(packed, i * bits, out=out[:, :, i])
    return out.bitwise_and_((1 << bits) - 1)


def nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes `[n, width]` to `[n, 2 width]`: the low halves, then the high ones."""
    return fields(packed[:, None], 4).flatten(1)


@cache
def _spread(value: int, device: torch.device) -> Tensor:
    """Return, for each byte, eight bytes in one int64: `value` where its bit is set, the lowest first."""
    bits = torch.arange(256, dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits * value).view(torch.int64).flatten().to(device)


def bits(packed: Tensor, value: int) -> Tensor:
    """Unpack bytes `[n, width]` to `[n, 8 width]`: `value` for a bit that is set, else 0, the lowest bit first."""
    spread = _spread(value, packed.device).index_select(0, packed.flatten().int())
    return spread.view(torch.uint8).view(len(packed), -1)


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block as float32 `[n, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 2:]).float().sub_(8).mul_(half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 6:]).bitwise_or_(bits(blocks[:, 2:6], 16))
    return codes.float().sub_(16).mul_(half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 8:]).bitwise_or_(bits(blocks[:, 4:8], 16))
    return codes.float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(half(blocks, 0))


def _scaled(codes: Tensor, scale: Tensor, low: Tensor | None = None) -> Tensor:
    """Return `codes * scale - low` for codes `[n, ...]` and one of each `[n, groups]` per group of them."""
    values = codes.view(*scale.shape, -1).float().mul_(scale[..., None])
    return values if low is None else values.sub_(low[..., None])


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, :16]
    codes = fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2)
    return _scaled(codes, half(blocks, 80) * (scales & 15), half(blocks, 82) * (scales >> 4))


def q3_k_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes `[n, 256]`, of which 4 is zero, and scales `[n, 16]`."""
    packed = blocks[:, 96:108]
    scales = nibbles(packed[:, :8]) | fields(packed[:, None, 8:], 2).flatten(1) << 4
    # A bit of the first 32 bytes is set for the four upper codes of each group of eight.
    upper = fields(blocks[:, None, :32], 1).view(-1, 2, 4, 32) << 2
    codes = fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2).bitwise_or_(upper)
    return codes.flatten(1), half(blocks, 108) * (scales.float() - 32)


def _q3_k(blocks: Tensor) -> Tensor:
    codes, scales = q3_k_parts(blocks)
    return _scaled(codes.view(torch.int8).sub_(4), scales)


def scales_and_lows(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and lows per block of Q4_K and Q5_K, six bits each in 12 bytes, times the block's."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    lows = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales * half(blocks, 0), lows * half(blocks, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(fields(blocks[:, 16:].unflatten(1, (4, 32)), 4), *scales_and_lows(blocks))


def q5_k_codes(blocks: Tensor) -> Tensor:
    """Return codes `[n, 4, 2, 32]`."""
    upper = fields(blocks[:, None, 16:48], 1).view(-1, 4, 2, 32) << 4
    return fields(blocks[:, 48:].unflatten(1, (4, 32)), 4).bitwise_or_(upper)


def _q5_k(blocks: Tensor) -> Tensor:
    return _scaled(q5_k_codes(blocks), *scales_and_lows(blocks))


def q6_k_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes `[n, 2, 4, 32]`, of which 32 is zero, and scales `[n, 16]`."""
    upper = fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2).bitwise_left_shift_(4)
    codes = fields(blocks[:, :128].unflatten(1, (2, 64)), 4).view(-1, 2, 4, 32).bitwise_or_(upper)
    return codes, half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)


def _q6_k(blocks: Tensor) -> Tensor:
    codes, scales = q6_k_parts(blocks)
    return _scaled(codes.view(torch.int8).sub_(32), scales)


@cache
def _table(levels: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


def _levels(codes: Tensor, levels: Sequence[int]) -> Tensor:
    return _table(levels, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _levels(nibbles(blocks[:, 2:]), _LEVELS_IQ4).mul_(half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = blocks[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device) & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2)
    scales = (low.flatten(1) | high.flatten(1) << 4).float() - 32
    codes = fields(blocks[:, 8:].unflatten(1, (8, 16)), 4)
    return _levels(codes, _LEVELS_IQ4).view(-1, 8, 32).mul_((half(blocks, 0) * scales)[..., None])


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    # A power of two half as large as the exponent says, because the levels are doubled; the two lowest are subnormal.
    scale = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23).view(torch.float32)
    return _levels(nibbles(blocks[:, 1:]), _LEVELS_E2M1).mul_(scale)


def _nvfp4(blocks: Tensor) -> Tensor:
    # The highest code of a scale stands for zero, and the levels are doubled.
    scales = (blocks[:, :4] & 127).contiguous().view(torch.float8_e4m3fn).float().nan_to_num_(0).mul_(0.5)
    codes = fields(blocks[:, 4:].unflatten(1, (4, 8)), 4)
    return _levels(codes, _LEVELS_E2M1).view(-1, 4, 16).mul_(scales[..., None])


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}  # fmt: skip


def _decoder(kind: str) -> Callable[[Tensor], Tensor]:
    """Return a function from uint8 blocks `[n, bytes]` to float32 with as many values as `n` blocks hold."""
    if kind in _DECODERS:
        return _DECODERS[kind]
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_with_numpy

    which = GGMLQuantizationType[kind]
    try:
        # Runs on the tensor's device; the gguf library uses numpy.
        from transformers.integrations.gguf.dequant import GGML_BLOCK
        from transformers.integrations.gguf.dequant import dequantize as dequantize_with_torch
    except ImportError:  # not in every supported version
        known = False
    else:
        known = int(which) in GGML_BLOCK
    if known:
        return lambda blocks: dequantize_with_torch(blocks, int(which), torch.float32)
    return lambda blocks: torch.from_numpy(dequantize_with_numpy(blocks.cpu().numpy(), which)).to(blocks.device)
