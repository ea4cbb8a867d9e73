"""`RealisticDummy`: made-up weights with the statistics of trained ones, for what depends on operands (a card's power).

Plain made-up weights are alike everywhere. Trained ones are not: rows and columns have scales that are spread
log-normally, a few channels of the residual stream are far larger than the rest in every layer and token (their norm
weights are small in turn), and so are some channels of the keys. Nothing was fitted to one checkpoint.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from weft.engine.model.checkpoint import WHOLE, Part
from weft.engine.model.families.family import TensorNames
from weft.engine.model.spec import ModelSpec

DEVIATION = 0.02
"""of a matrix' numbers, as of plain made-up ones"""
SPREAD = 0.35
"""of the logarithm of a row's or column's scale"""
NORM_SPREAD = 0.3
OUTLIERS = 1 / 512
"""share of the stream's channels that are far larger"""
LEAST_OUTLIERS = 2
STREAM_OUTLIER = 30.0
"""what every embedding has there; its sign is the channel's. What layers add has deviations of about one"""
WRITE_OUTLIER = 4.0
"""by how much more is added there"""
NORM_OUTLIER = 0.1
"""what norms before a product multiply them by"""
KEY_OUTLIER = 5.0
"""of one channel in each `KEY_SPACING`"""
KEY_SPACING = 32


class RealisticDummy:
    """As `Dummy`: seeded tensors by name, each the same whatever was drawn before it and whatever part is asked for."""

    def __init__(self, seed: int, device: torch.device, spec: ModelSpec, names: TensorNames) -> None:
        hidden = spec.hidden_size
        self._seed, self._device, self._names, self._hidden = seed, device, names, hidden
        self._less_one = spec.norm.unit_offset
        generator = torch.Generator().manual_seed(self._seed_of("stream"))
        count = min(hidden, max(LEAST_OUTLIERS, round(hidden * OUTLIERS)))
        self.outliers = torch.randperm(hidden, generator=generator)[:count].sort().values
        """channels of the stream"""
        self._signs = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0
        writes = (names.o, names.down, names.expert_down, names.experts_down, names.shared_down)
        self._writes = tuple(name.removesuffix(".weight") for name in writes if name)
        own, d = spec.shard_of, spec.head_dim
        queries = spec.num_heads * own.ranks * d
        self._fused_keys = slice(queries, queries + spec.num_kv_heads * own.kv_parts * d)
        """of the rows of q, k and v in one tensor"""

    def _seed_of(self, name: str) -> int:
        return zlib.crc32(f"{self._seed} {name}".encode())  # generators of a CPU take 32 bits

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        whole = part.whole(shape)
        if self._device.type == "meta":
            return torch.empty(whole, device=self._device)[part.of_whole(shape)]
        own = torch.Generator(self._device).manual_seed(self._seed_of(name))
        scales = torch.Generator().manual_seed(self._seed_of(f"{name} scales"))
        if len(whole) == 1:
            made = self._vector(name, whole[0], own, scales)
        else:
            made = self._matrix(name, whole, own, scales)
        return made[part.of_whole(shape)]

    def _vector(self, name: str, width: int, own: torch.Generator, scales: torch.Generator) -> Tensor:
        if name.endswith("bias"):
            return torch.empty(width, device=self._device).normal_(0.0, DEVIATION, generator=own)
        weight = _log_normal(width, NORM_SPREAD, scales)
        if width == self._hidden:
            weight[self.outliers] *= NORM_OUTLIER
        return (weight - 1.0 if self._less_one else weight).to(self._device)

    def _matrix(self, name: str, shape: tuple[int, ...], own: torch.Generator, scales: torch.Generator) -> Tensor:
        made = torch.empty(shape, device=self._device).normal_(0.0, DEVIATION, generator=own)
        # scales of the last two dimensions, whichever of them is the output
        rows, columns = _log_normal(shape[-2], SPREAD, scales), _log_normal(shape[-1], SPREAD, scales)
        turned = self._names.transposed or (self._names.experts_alternate and len(shape) == 3)
        out = columns if turned else rows
        module = name.removesuffix(".weight")
        if module == self._names.embedding:
            made.mul_(columns.to(self._device))
            made[:, self.outliers.to(self._device)] += (self._signs * STREAM_OUTLIER).to(self._device)
            return made
        if len(out) == self._hidden and any(_is(module, write) for write in self._writes):
            out[self.outliers] *= WRITE_OUTLIER
        elif _is(module, self._names.qkv or self._names.k):
            keys = out[self._fused_keys] if self._names.qkv else out
            keys[:: min(KEY_SPACING, len(keys))] *= KEY_OUTLIER
        return made.mul_(rows.to(self._device)[:, None]).mul_(columns.to(self._device))


def _is(module: str, name: str) -> bool:
    """Whether a module's name ends with one that may have the number of an expert, `{}`."""
    before, _, behind = name.partition("{}")
    return module.endswith(behind if behind else name) and before in module


def _log_normal(width: int, spread: float, generator: torch.Generator) -> Tensor:
    """`[width]` whose mean square is one."""
    return torch.exp(torch.randn(width, generator=generator) * spread - spread**2)
