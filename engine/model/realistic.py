"""`RealisticDummy`: random weights with the statistics of trained ones, for measurements that depend on values (power).

Plain random weights are uniform. In trained ones rows and columns have log-normally spread scales. A few channels of
the residual stream are far larger than the rest in every layer and token (with small norm weights), as are some key
channels. Nothing was fitted to a particular checkpoint.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from weft.engine.model.checkpoint import WHOLE, Part
from weft.engine.model.families.family import TensorNames
from weft.engine.model.spec import ModelSpec

DEVIATION = 0.02  # Standard deviation of matrix values, as in `Dummy`.
SPREAD = 0.35  # Standard deviation of the logarithm of row and column scales.
NORM_SPREAD = 0.3
OUTLIERS = 1 / 512  # Share of the stream's channels that are outliers.
LEAST_OUTLIERS = 2
STREAM_OUTLIER = 30.0
"""Embedding value in outlier channels, with a sign per channel. Layers add values with a deviation of about one."""
WRITE_OUTLIER = 4.0  # Factor on what layers add to outlier channels.
NORM_OUTLIER = 0.1  # Factor of norm weights in outlier channels.
KEY_OUTLIER = 5.0  # Factor on one key channel in each `KEY_SPACING`.
KEY_SPACING = 32


class RealisticDummy:
    """Like `Dummy`, but each tensor depends only on seed and name, not on the order of requests or the part read."""

    def __init__(self, seed: int, device: torch.device, spec: ModelSpec, names: TensorNames) -> None:
        hidden = spec.hidden_size
        self._seed, self._device, self._names, self._hidden = seed, device, names, hidden
        self._less_one = spec.norm.unit_offset
        generator = torch.Generator().manual_seed(self._seed_of("stream"))
        count = min(hidden, max(LEAST_OUTLIERS, round(hidden * OUTLIERS)))
        self.outliers = torch.randperm(hidden, generator=generator)[:count].sort().values
        """Outlier channels of the stream."""
        self._signs = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0
        writes: tuple[str, ...] = (names.o, names.down, names.expert_down, names.experts_down, names.shared_down)
        writes += (names.state.out,) if names.state is not None else ()
        self._writes = tuple(name.removesuffix(".weight") for name in writes if name)
        own, d = spec.shard_of, spec.head_dim
        queries = spec.num_heads * own.ranks * d
        self._fused_keys = slice(queries, queries + spec.num_kv_heads * own.kv_parts * d)
        """Rows of k in a fused QKV tensor."""

    def _seed_of(self, name: str) -> int:
        return zlib.crc32(f"{self._seed} {name}".encode())  # CPU generators take 32 bits

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
        # Both of the last two dimensions get scales, whichever is the output.
        rows, columns = _log_normal(shape[-2], SPREAD, scales), _log_normal(shape[-1], SPREAD, scales)
        stacked = self._names.experts_alternate or self._names.experts_turned
        transposed = self._names.transposed or (stacked and len(shape) == 3)
        out = columns if transposed else rows
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
    """Return whether a module's name ends with `name`, in which `{}` stands for an expert."""
    before, _, after = name.partition("{}")
    return module.endswith(after or name) and before in module


def _log_normal(width: int, spread: float, generator: torch.Generator) -> Tensor:
    """Draw `[width]` log-normal values whose mean square is one."""
    return torch.exp(torch.randn(width, generator=generator) * spread - spread**2)
