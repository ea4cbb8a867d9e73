"""A checkpoint matrix in its serving format: a tensor, `QuantizedMatrix` (FP8 with scales), `PackedRows` (4 or 8 bits).

Matrices stored in FP8 stay FP8 and those in 16 bits stay in 16: the files decide, not the module lists in their config.
Scales are expanded to rows, because packing joins and reorders rows (`kernels.matmul.weight_layout`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.checkpoint import WHOLE, Part, Stored, Tensors
from weft.engine.model.families.family import TensorNames
from weft.engine.model.spec import ModelSpec
from weft.kernels.formats import fp8, packed_rows
from weft.kernels.formats.fp8 import BLOCK, E4M3, Fp8Weight
from weft.kernels.formats.fp8_matrix import by_rows
from weft.kernels.formats.packed_rows import PackedRows

SCALES = ("weight_scale", "weight_scale_inv")
"""Suffixes of weight scales; values are multiplied by them, despite the second name."""
INPUT_SCALES = ("input_scale", "activation_scale")
HARMLESS = (".input_scale", ".activation_scale", ".input_scale_ub", ".q_scale")
"""Name endings in quantized checkpoints that may be unused."""


class QuantizedMatrix(NamedTuple):
    """One FP8 matrix, or several."""

    weight: Fp8Weight  # Scale `[..., out, n]`: n is 1, or one per `BLOCK` columns.
    input_scale: Tensor | None = None  # `[...]` float32: the static scale of its input.


Unpacked = Tensor | QuantizedMatrix | PackedRows


def check_format(name: str, stored: Stored, asked: torch.dtype) -> None:
    """Raise `ModelError` unless a tensor holds plain numbers, or FP8 values or integers where those are requested."""
    there = stored.raw.dtype
    if stored.decode is not None or there == asked:
        return
    if asked == E4M3:
        raise ModelError(
            f"{name} is {_name(there)}, but the checkpoint has a scale for it, as for matrices in float8_e4m3fn"
        )
    module = name.removesuffix(".weight")
    if there == E4M3 and module != name:
        raise ModelError(f"{name} is in 8 bits ({_name(there)}), and the checkpoint has no {module}.{SCALES[0]}")
    if there not in _NUMBERS:
        raise ModelError(f"{name} is {_name(there)}, which is not read here")


_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
"""The last dtype is for scales, which are powers of two."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_scale(tensors: Tensors, module: str) -> str | None:
    """Return the name of a module's weight scale; None if it is not quantized."""
    return next((name for end in SCALES if tensors.has(name := f"{module}.{end}")), None)


def read(tensors: Tensors, module: str, out: int, inner: int, part: Part = WHOLE, *, static: bool = False) -> Unpacked:
    """Read a module's matrix `[out, inner]` or that part of it. static: with its input scale.

    Raises `ModelError` with the name of a tensor that is missing or has another shape."""
    name = find_scale(tensors, module)
    if name is None:
        return read_plain(tensors, f"{module}.weight", out, inner, part)
    values = tensors.get(f"{module}.weight", (out, inner), part, E4M3)
    scale = _scale(tensors, name, (out, inner), part)
    input_scale = None
    if static:
        given = _input_scale(tensors, module)
        one = tensors.get(given, _one(tensors, given), WHOLE, torch.float32)
        input_scale = _positive(given, one).reshape(())
    return QuantizedMatrix(Fp8Weight(values, scale), input_scale)


def read_plain(tensors: Tensors, name: str, out: int, inner: int, part: Part = WHOLE) -> Tensor | PackedRows:
    """Read a matrix that has no separate scales, or keep it packed."""
    packing = tensors.packing(name, (out, inner), part)
    if packing is None:
        return tensors.get(name, (out, inner), part)
    data = tensors.get(name, (out, inner), part, torch.uint8)
    return PackedRows(data, packing.form, inner, packing.order)


def read_stacked(
    tensors: Tensors, name: str, shape: tuple[int, int, int], part: Part = WHOLE, *, static: bool = False
) -> Unpacked:
    """Like `read`, for the tensor `name` with matrices `[count, out, inner]` of several experts.

    Scales also form one tensor: one per expert, or those of a matrix with a leading expert dimension."""
    module, (count, out, inner) = name.removesuffix(".weight"), shape
    scale_name = find_scale(tensors, module)
    if scale_name is None:
        return tensors.get(name, shape, part)
    values = tensors.get(name, shape, part, E4M3)
    there = tensors.shape_of(scale_name)
    scales = _positive(scale_name, tensors.get(scale_name, there, WHOLE, torch.float32))
    if not there or there[0] != count:
        raise ModelError(f"{scale_name} has shape {there}: its first dimension must be the {count} experts")
    own = part._replace(dim=part.dim - 1) if part.of > 1 else part
    scale = torch.stack([_by_row(scale_name, each, (out, inner), own) for each in scales.unbind()])
    input_scale = None
    if static:
        given = _input_scale(tensors, module)
        shape_of_it = tensors.shape_of(given)
        one = _positive(given, tensors.get(given, shape_of_it, WHOLE, torch.float32)).reshape(-1)
        if len(one) not in (1, count):
            raise ModelError(f"{given} has shape {shape_of_it}: it must have one scale, or one per expert ({count})")
        input_scale = one.expand(count)
    return QuantizedMatrix(Fp8Weight(values, scale), input_scale)


def refuse_undeclared_scale(tensors: Tensors, module: str) -> None:
    """Raise `ModelError` for a matrix with a scale if the config does not declare quantization."""
    if (scale := find_scale(tensors, module)) is not None:
        raise ModelError(f"the checkpoint has {scale}, but its config.json has no quantization_config of FP8")


def _input_scale(tensors: Tensors, module: str) -> str:
    given = next((n for end in INPUT_SCALES if tensors.has(n := f"{module}.{end}")), None)
    if given is None:
        raise ModelError(f"the checkpoint has no tensor {module}.{INPUT_SCALES[0]}, which its static activations need")
    return given


def _one(tensors: Tensors, name: str) -> tuple[int, ...]:
    shape = tensors.shape_of(name)
    if any(n != 1 for n in shape):
        raise ModelError(f"{name} has shape {shape}: only one scale for the whole input of a projection is read")
    return shape


def _scale(tensors: Tensors, name: str, shape: tuple[int, int], part: Part) -> Tensor:
    """Return the scale `[out, n]` float32 of that part of a matrix."""
    there = tensors.shape_of(name)
    return _by_row(name, _positive(name, tensors.get(name, there, WHOLE, torch.float32)), shape, part)


def _by_row(name: str, scale: Tensor, shape: tuple[int, int], part: Part) -> Tensor:
    """Return `[out, n]` for that part of a matrix from its scale in any form."""
    out, inner = part.whole(shape)
    there = tuple(scale.shape)
    blocks = (-(-out // BLOCK), -(-inner // BLOCK))
    if all(n == 1 for n in there):
        kind = "tensor"
    elif there in ((out,), (out, 1)):
        kind = "channel"
    elif there == blocks:
        kind = "block"
    else:
        raise ModelError(
            f"{name} has shape {there}: a matrix of {out} x {inner} needs one scale, {out} of them, or "
            f"{blocks[0]} x {blocks[1]} for blocks of {BLOCK} x {BLOCK}"
        )
    rows, columns = part.of_whole(shape) if part.of > 1 else (slice(None), slice(None))
    if kind == "tensor":
        return scale.reshape(1, 1).expand(shape[0], 1).contiguous()
    if kind == "channel":
        return scale.reshape(out, 1)[rows].contiguous()
    own = fp8.by_row(scale, out)[rows]
    if columns == slice(None):
        return own.contiguous()
    if columns.start % BLOCK or (columns.stop % BLOCK and columns.stop != inner):
        raise ModelError(
            f"{name} has blocks of {BLOCK} columns, which {shape[1]} columns per rank would split: "
            "use fewer ranks (--tensor-parallel-size)"
        )
    return own[:, columns.start // BLOCK : -(-columns.stop // BLOCK)].contiguous()


def _positive(name: str, scale: Tensor) -> Tensor:
    # A subnormal scale is refused as well, because its inverse overflows.
    if not scale.is_meta and not bool((scale >= torch.finfo(torch.float32).tiny).all()):
        raise ModelError(f"{name} has scales that are not above zero: the checkpoint is damaged")
    return scale


def kv_scales(tensors: Tensors, spec: ModelSpec, names: TensorNames) -> Tensor | None:
    """Return the scales of FP8 K and V, `[layers, 2, Hkv]` float32, for this rank's KV heads; None if there are none.

    Raises `ModelError` for a scale of another shape or not above zero."""
    attention = names.o.rpartition(".")[0]
    layers = []
    for i in range(spec.num_layers):
        if not spec.layer(i).attention:
            continue
        planes = []
        for plane, projection in (("k", names.k), ("v", names.v)):
            known = (
                f"{attention}.{plane}_scale",
                f"{attention}.attn.{plane}_scale",
                f"{projection}.{plane}_scale",
                f"{projection}.output_scale",
                f"{names.qkv or projection}.{plane}_scale",
                f"{attention}.kv_scale",
            )
            there = (f"{names.layer.format(i)}{name}" for name in known)
            name = next((name for name in there if tensors.has(name)), None)
            planes.append(None if name is None else _head_scales(tensors, name, spec))
        layers.append(planes)
    given = [scale for planes in layers for scale in planes if scale is not None]
    if not given or given[0].is_meta:
        return None
    one = torch.ones(spec.num_kv_heads, device=given[0].device)
    every = [one if scale is None else scale for planes in layers for scale in planes]
    return torch.stack(every).view(len(layers), 2, -1)


def _head_scales(tensors: Tensors, name: str, spec: ModelSpec) -> Tensor:
    own, there = spec.shard_of, tensors.shape_of(name)
    scale = _positive(name, tensors.get(name, there, WHOLE, torch.float32)).reshape(-1)
    if scale.numel() == 1:
        return scale.expand(spec.num_kv_heads)
    if scale.numel() != spec.num_kv_heads * own.kv_parts:
        raise ModelError(
            f"{name} has shape {there}: K and V need one scale, or {spec.num_kv_heads * own.kv_parts} for their heads"
        )
    return scale.view(own.kv_parts, -1)[own.kv_part]


def quantize(weight: Tensor, *, exact: bool = False) -> QuantizedMatrix:
    """Quantize `[..., out, inner]` with one scale per output channel, expert by expert to save memory.

    exact: use powers of two, which represent four-bit numbers exactly."""
    if weight.is_meta:
        values = torch.empty(weight.shape, dtype=E4M3, device="meta")
        return QuantizedMatrix(Fp8Weight(values, torch.empty((*weight.shape[:-1], 1), device="meta")))
    if weight.dim() > 2:
        values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
        scale = torch.empty((*weight.shape[:-1], 1), device=weight.device)
        for i, each in enumerate(weight):
            own = quantize(each, exact=exact).weight
            values[i].copy_(own.values)
            scale[i].copy_(own.scale)
        return QuantizedMatrix(Fp8Weight(values, scale))
    made = fp8.quantize_weight(weight, exact=exact)
    return QuantizedMatrix(made._replace(scale=made.scale[:, None]))


def dequantize(matrix: Unpacked, dtype: torch.dtype) -> Tensor:
    """Return the values of a matrix `[out, inner]`, or of experts `[experts, out, inner]`."""
    if isinstance(matrix, Tensor):
        return matrix
    if isinstance(matrix, PackedRows):
        return matrix.values(dtype)
    values, scale = matrix.weight
    if values.is_meta:
        return torch.empty(values.shape, dtype=dtype, device="meta")
    if values.dim() > 2:  # one by one, to save float32 memory
        made = torch.empty(values.shape, dtype=dtype, device=values.device)
        for i, each in enumerate(values):
            made[i].copy_(dequantize(QuantizedMatrix(Fp8Weight(each, scale[i])), dtype))
        return made
    return fp8.weight_values(packed(matrix.weight)).to(dtype)


def packed(weight: Fp8Weight) -> Fp8Weight:
    """Return the weight with scales `[..., out]` as GEMMs read them; block scales stay as they are."""
    return weight._replace(scale=weight.scale[..., 0]) if weight.scale.shape[-1] == 1 else weight


def map_rows(change: Callable[..., Tensor], *matrices: Unpacked, dtype: torch.dtype, keep: bool = False) -> Unpacked:
    """Apply `change`, which only moves rows, to matrices. If their formats differ, all are converted to `dtype`.

    A GEMM has one static input scale, so the largest is used. keep: keep each."""
    small = [m for m in matrices if isinstance(m, PackedRows)]
    if len(small) == len(matrices) and (joined := packed_rows.by_rows(change, *small)) is not None:
        return joined
    quantized = [m for m in matrices if isinstance(m, QuantizedMatrix)]
    if len(quantized) < len(matrices) or len({m.weight.scale.shape[-1] for m in quantized}) > 1:
        return change(*(dequantize(m, dtype) for m in matrices))
    given = [m.input_scale for m in quantized if m.input_scale is not None]
    scale = None
    if given:
        stacked = torch.stack(given)
        scale = stacked if keep or stacked.is_meta else stacked.amax(0)
    return QuantizedMatrix(by_rows(change, *(m.weight for m in quantized)), scale)


def scaled(matrix: Unpacked, factor: float) -> Unpacked:
    if factor == 1.0:
        return matrix
    if isinstance(matrix, Tensor):
        return (matrix.float() * factor).to(matrix.dtype)
    if isinstance(matrix, PackedRows):
        return packed_rows.times(matrix, factor)
    return matrix._replace(weight=matrix.weight._replace(scale=matrix.weight.scale * factor))
