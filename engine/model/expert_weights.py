"""`ExpertWeights`: reads a layer's expert matrices in any checkpoint layout and returns them stacked for the kernels.

A checkpoint has one tensor per expert or one for all experts, in 16 bits, FP8 or (gpt-oss) MXFP4. Compression tools
split stacked tensors, so a family with stacked experts is read in both layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model import matrices
from weft.engine.model.checkpoint import WHOLE, Part, Tensors
from weft.engine.model.families.family import TensorNames
from weft.engine.model.matrices import QuantizedMatrix, Unpacked, find_scale
from weft.engine.model.parts import Experts
from weft.engine.model.spec import ModelSpec
from weft.kernels.matmul import weight_layout as pack

ReadStacked = Callable[[str, int, int, int, Part], Unpacked]
"""Reads a part of a stacked tensor: `(name, count, out, inner, part)`."""


class ExpertMatrices(NamedTuple):
    """The matrices of all experts of a layer."""

    gate_up: Unpacked  # [E, 2 I, H], rows alternate; [E, I, H] without gates
    gate_up_bias: Tensor | None  # [E, 2 I]; [E, I] without gates
    down: Unpacked  # [E, H, I]
    down_bias: Tensor | None  # [E, H]


class ExpertWeights:
    """Reads the experts of one layer, or the rank's shard of them.

    matrix, bias: read one tensor by its name in the layer, as `(name, out, inner, part)` and `(name, out, part)`."""

    def __init__(
        self, tensors: Tensors, spec: ModelSpec, names: TensorNames, prefix: str,
        matrix: Callable[[str, int, int, Part], Unpacked], bias: Callable[[str, int, Part], Tensor],
    ) -> None:  # fmt: skip
        self._tensors, self._spec, self._names, self._prefix = tensors, spec, names, prefix
        self._matrix, self._bias = matrix, bias
        own = spec.shard_of
        self._rows, self._columns = Part(0, own.rank, own.ranks), Part(1, own.rank, own.ranks)
        self._piecewise = own.ranks > 1 and tensors.known is not None

    def read(self, e: Experts) -> ExpertMatrices:
        """Read the matrices of all experts. Raises `ModelError` for a missing tensor or one of another shape."""
        separate = self._tensors.has(f"{self._prefix}{self._names.expert_down.format(0)}.weight")
        return self._read_stacked(e) if self._names.experts_gate_up and not separate else self._read_separate(e)

    def _read_separate(self, e: Experts) -> ExpertMatrices:
        names, h, inter = self._names, self._spec.hidden_size, e.intermediate_size
        both = (names.expert_gate, names.expert_up) if self._spec.gated else (names.expert_up,)
        each = [name.format(i) for i in range(e.count) for name in both]
        read = [self._matrix(name, inter, h, self._rows) for name in each]
        if self._spec.gated:
            read = [self._map_rows(pack.interleave_gate_up, *pair) for pair in zip(read[0::2], read[1::2], strict=True)]
        gate_up = self._stack(read)
        downs = [names.expert_down.format(i) for i in range(e.count)]
        down = self._stack([self._matrix(name, h, inter, self._columns) for name in downs])
        gate_up_bias = down_bias = None
        if e.bias:
            found = torch.stack([self._bias(name, inter, self._rows) for name in each])
            gate_up_bias = found.view(e.count, len(both), inter).transpose(1, 2).flatten(1)
            down_bias = torch.stack([self._bias(name, h, WHOLE) for name in downs])
        return ExpertMatrices(gate_up, gate_up_bias, down, down_bias)

    def _stack(self, of: list[Unpacked]) -> Unpacked:
        return self._map_rows(lambda *each: torch.stack(each), *of, keep=True)

    def _map_rows(self, change: Callable[..., Tensor], *of: Unpacked, keep: bool = False) -> Unpacked:
        return matrices.map_rows(change, *of, dtype=self._tensors.dtype, keep=keep)

    def _read_stacked(self, e: Experts) -> ExpertMatrices:
        names, h, get = self._names, self._spec.hidden_size, self._tensors.get
        inter, n = e.intermediate_size, e.count
        rows = self._rows._replace(dim=1)
        gate_up_name, down_name = f"{self._prefix}{names.experts_gate_up}", f"{self._prefix}{names.experts_down}"
        gate_up: Unpacked
        down: Unpacked
        if names.experts_alternate:
            gate_up = self._transposed(gate_up_name, n, 2 * inter, h, rows)
            down = self._columns_of(self._transposed, down_name, n, h, inter)
        else:
            read = self._transposed if self._turned(gate_up_name, (n, 2 * inter * rows.of, h)) else self._stacked
            gate, up = self._halves(read, gate_up_name, n, inter, h)
            gate_up = self._map_rows(pack.interleave_gate_up, gate, up)
            down = self._columns_of(read, down_name, n, h, inter)
        gate_up_bias = down_bias = None
        if e.bias:
            gate_up_bias = get(f"{gate_up_name}_bias", (n, 2 * inter), rows)
            down_bias = get(f"{down_name}_bias", (n, h))
        return ExpertMatrices(gate_up, gate_up_bias, down, down_bias)

    def _turned(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a stacked tensor is `[experts, in, out]`. shape: its shape if not."""
        return self._names.experts_turned and not (self._tensors.has(name) and self._tensors.shape_of(name) == shape)

    def _columns_of(self, read: ReadStacked, name: str, count: int, out: int, inner: int) -> Unpacked:
        """Return a rank's columns `[count, out, inner]`; if quantized at load, with the scales of full rows."""
        own, asked = self._columns._replace(dim=2), self._spec.quantization
        if asked is None or not asked.at_load or own.of == 1:
            return read(name, count, out, inner, own)
        whole = read(name, count, out, inner * own.of, WHOLE)
        whole = matrices.quantize(whole) if isinstance(whole, Tensor) else whole
        assert isinstance(whole, QuantizedMatrix)  # stacked experts are never packed
        values = whole.weight.values[own.of_whole((count, out, inner))].contiguous()
        return whole._replace(weight=whole.weight._replace(values=values))

    def _stacked(self, name: str, count: int, out: int, inner: int, part: Part = WHOLE) -> Unpacked:
        """Read a tensor `[count, out, inner]`, in FP8 if it has a scale."""
        quantization = self._spec.quantization
        if quantization is None and not self._spec.widened:
            matrices.refuse_undeclared_scale(self._tensors, name.removesuffix(".weight"))
        static = quantization is not None and quantization.activations == "static"
        found = matrices.read_stacked(self._tensors, name, (count, out, inner), part, static=static)
        return matrices.dequantize(found, self._tensors.dtype) if self._spec.widened else found

    def _halves(self, read: ReadStacked, name: str, count: int, inter: int, h: int) -> list[Unpacked]:
        """Read gate and up `[count, inter, h]` from a tensor with the gate rows of each expert before its up rows."""
        rows = self._rows._replace(dim=1)
        whole = inter * rows.of
        firsts = (rows.part * inter, whole + rows.part * inter)
        if self._piecewise:
            return [read(name, count, inter, h, Part.span(first, 2 * whole, 1)) for first in firsts]
        together = read(name, count, 2 * whole, h, WHOLE)
        return [self._map_rows(partial(_rows_of, slice(first, first + inter)), together) for first in firsts]

    def _transposed(self, name: str, count: int, out: int, inner: int, part: Part) -> Unpacked:
        """Read `[count, out, inner]` from a tensor `[count, inner, out]` or from MXFP4 blocks `[count, out, inner]`.

        part: along `out` (1) or `inner` (2). MXFP4 blocks hold 32 numbers of `inner` and are not split. If matrices
        become FP8, MXFP4 numbers stay exact because their scales are powers of two."""
        if not self._tensors.has(f"{name}_blocks"):
            if find_scale(self._tensors, name) is not None:
                raise ModelError(f"{name} has a scale: stacked experts of this family are not read in FP8")
            turned = part._replace(dim=3 - part.dim) if part.dim else part
            return self._tensors.get(name, (count, inner, out), turned).transpose(1, 2).contiguous()
        cut = WHOLE
        if part.dim == 2 and inner % 32:
            inner, part, cut = inner * part.of, WHOLE, part
        groups = inner // 32
        blocks = self._tensors.get(f"{name}_blocks", (count, out, groups, 16), part, torch.uint8)
        scales = self._tensors.get(f"{name}_scales", (count, out, groups), part, torch.uint8)
        found = cut_to(pack.unpack_mxfp4(blocks, scales, self._tensors.dtype), cut).contiguous()
        asked = self._spec.quantization
        return matrices.quantize(found, exact=True) if asked is not None and asked.at_load else found


def _rows_of(own: slice, together: Tensor) -> Tensor:
    return together[:, own]


def cut_to(whole: Tensor, part: Part) -> Tensor:
    """Return that part of a tensor."""
    return whole.chunk(part.of, part.dim)[part.part] if part.of > 1 else whole
