"""A matrix of a checkpoint in the number format that it is served in: a tensor, or `Quantised` (FP8 with scales).

What a checkpoint has in FP8 stays so, and what it has in 16 bits stays in 16: the files decide, not the lists of
modules in their config. Scales are written out by rows, because packing joins and reorders rows (`kernels.pack`).
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
from weft.kernels.formats import fp8
from weft.kernels.formats.fp8 import BLOCK, E4M3, Fp8Weight
from weft.kernels.formats.fp8_matrix import by_rows

SCALES = ("weight_scale", "weight_scale_inv")
"""a matrix' values are multiplied by it, whatever its name says"""
INPUT_SCALES = ("input_scale", "activation_scale")


HARMLESS = (".input_scale", ".activation_scale", ".input_scale_ub", ".q_scale")
"""ends of names that quantised checkpoints carry and that not everyone needs"""


class Quantised(NamedTuple):
    """One matrix, or several."""

    weight: Fp8Weight
    """scale `[..., out, n]`: n is 1, or one for each `BLOCK` columns"""
    input_scale: Tensor | None = None
    """`[...]` float32: the static one of what it multiplies"""


Unpacked = Tensor | Quantised


def check_format(name: str, stored: Stored, asked: torch.dtype) -> None:
    """That a tensor has numbers, or FP8 values or whole numbers where those are asked for. Raises `ModelError`."""
    there = stored.raw.dtype
    if stored.decode is not None or there == asked:
        return
    if asked == E4M3:
        raise ModelError(
            f"{name} is {_word(there)}, but the checkpoint has a scale for it, as for matrices in float8_e4m3fn"
        )
    module = name.removesuffix(".weight")
    if there == E4M3 and module != name:
        raise ModelError(f"{name} is in 8 bits ({_word(there)}), and the checkpoint has no {module}.{SCALES[0]}")
    if there not in _NUMBERS:
        raise ModelError(f"{name} is {_word(there)}, which is not read here")


_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
"""the last of them are scales, powers of two"""


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_as(tensors: Tensors, module: str) -> str | None:
    """The name of a module's scale; None: its matrix is not quantised."""
    return next((name for end in SCALES if tensors.has(name := f"{module}.{end}")), None)


def read(tensors: Tensors, module: str, out: int, inner: int, part: Part = WHOLE, *, static: bool = False) -> Unpacked:
    """The matrix `[out, inner]` of a module, or that part of it.

    static: with the scale of its input. Raises `ModelError`, which names what is missing or has another shape.
    """
    name = stored_as(tensors, module)
    if name is None:
        return tensors.get(f"{module}.weight", (out, inner), part)
    values = tensors.get(f"{module}.weight", (out, inner), part, E4M3)
    scale = _scale(tensors, name, (out, inner), part)
    input_scale = None
    if static:
        given = _input_scale(tensors, module)
        one = tensors.get(given, _one(tensors, given), WHOLE, torch.float32)
        input_scale = _positive(given, one).reshape(())
    return Quantised(Fp8Weight(values, scale), input_scale)


def read_stacked(
    tensors: Tensors, name: str, shape: tuple[int, int, int], part: Part = WHOLE, *, static: bool = False
) -> Unpacked:
    """As `read`, of the tensor `name`, which has matrices of several experts `[count, out, inner]`.

    Scales lie in one tensor too: one an expert, or as a matrix has them, with the experts in front.
    """
    module, (count, out, inner) = name.removesuffix(".weight"), shape
    scale_name = stored_as(tensors, module)
    if scale_name is None:
        return tensors.get(name, shape, part)
    values = tensors.get(name, shape, part, E4M3)
    there = tensors.shape_of(scale_name)
    scales = _positive(scale_name, tensors.get(scale_name, there, WHOLE, torch.float32))
    if not there or there[0] != count:
        raise ModelError(f"{scale_name} has shape {there}: it has scales of {count} experts, theirs in front")
    own = part._replace(dim=part.dim - 1) if part.of > 1 else part
    scale = torch.stack([_by_row(scale_name, each, (out, inner), own) for each in scales.unbind()])
    input_scale = None
    if static:
        given = _input_scale(tensors, module)
        shape_of_it = tensors.shape_of(given)
        one = _positive(given, tensors.get(given, shape_of_it, WHOLE, torch.float32)).reshape(-1)
        if len(one) not in (1, count):
            raise ModelError(f"{given} has shape {shape_of_it}: one scale is read, or one for each of {count} experts")
        input_scale = one.expand(count)
    return Quantised(Fp8Weight(values, scale), input_scale)


def refuse_untold(tensors: Tensors, module: str) -> None:
    """Raises `ModelError` where a matrix has a scale, of a checkpoint whose config does not say so."""
    if (scale := stored_as(tensors, module)) is not None:
        raise ModelError(f"the checkpoint has {scale}, but its config.json has no quantization_config of FP8")


def _input_scale(tensors: Tensors, module: str) -> str:
    given = next((n for end in INPUT_SCALES if tensors.has(n := f"{module}.{end}")), None)
    if given is None:
        raise ModelError(f"the checkpoint has no tensor {module}.{INPUT_SCALES[0]}, which its static activations need")
    return given


def _one(tensors: Tensors, name: str) -> tuple[int, ...]:
    shape = tensors.shape_of(name)
    if any(n != 1 for n in shape):
        raise ModelError(f"{name} has shape {shape}: one scale for all of a product's input is read, or none")
    return shape


def _scale(tensors: Tensors, name: str, shape: tuple[int, int], part: Part) -> Tensor:
    """`[out, n]` float32 of that part of a matrix."""
    there = tensors.shape_of(name)
    return _by_row(name, _positive(name, tensors.get(name, there, WHOLE, torch.float32)), shape, part)


def _by_row(name: str, scale: Tensor, shape: tuple[int, int], part: Part) -> Tensor:
    """`[out, n]` of that part of a matrix, of its scale in whichever form."""
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
            f"{name} has shape {there}: a matrix of {out} x {inner} has one scale, {out} of them, or "
            f"{blocks[0]} x {blocks[1]} of blocks of {BLOCK} x {BLOCK}"
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
            f"{name} has blocks of {BLOCK} columns, which {shape[1]} columns a rank would cut: "
            "use fewer ranks (--tensor-parallel-size)"
        )
    return own[:, columns.start // BLOCK : -(-columns.stop // BLOCK)].contiguous()


def _positive(name: str, scale: Tensor) -> Tensor:
    # and not so small that its inverse is none
    if not scale.is_meta and not bool((scale >= torch.finfo(torch.float32).tiny).all()):
        raise ModelError(f"{name} has scales that are not above zero: the checkpoint is damaged")
    return scale


def kv_scales(tensors: Tensors, spec: ModelSpec, names: TensorNames) -> Tensor | None:
    """`[layers, 2, Hkv]` float32 of this rank's KV heads: what K and V in FP8 are multiplied by; None where the
    checkpoint has none. Raises `ModelError` for one of another shape, or not above zero.
    """
    attention = names.o.rpartition(".")[0]
    layers = []
    for i in range(spec.num_layers):
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
    return torch.stack(every).view(spec.num_layers, 2, -1)


def _head_scales(tensors: Tensors, name: str, spec: ModelSpec) -> Tensor:
    own, there = spec.shard_of, tensors.shape_of(name)
    scale = _positive(name, tensors.get(name, there, WHOLE, torch.float32)).reshape(-1)
    if scale.numel() == 1:
        return scale.expand(spec.num_kv_heads)
    if scale.numel() != spec.num_kv_heads * own.kv_parts:
        raise ModelError(
            f"{name} has shape {there}: K and V have one scale, or {spec.num_kv_heads * own.kv_parts} for their heads"
        )
    return scale.view(own.kv_parts, -1)[own.kv_part]


def quantize(weight: Tensor, *, exact: bool = False) -> Quantised:
    """`[..., out, inner]` with a scale for each output channel; of experts one after the other, for the room it takes.

    exact: scales are powers of two, so that numbers of four bits stay what they are.
    """
    if weight.is_meta:
        values = torch.empty(weight.shape, dtype=E4M3, device="meta")
        return Quantised(Fp8Weight(values, torch.empty((*weight.shape[:-1], 1), device="meta")))
    if weight.dim() > 2:
        values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
        scale = torch.empty((*weight.shape[:-1], 1), device=weight.device)
        for i, each in enumerate(weight):
            own = quantize(each, exact=exact).weight
            values[i].copy_(own.values)
            scale[i].copy_(own.scale)
        return Quantised(Fp8Weight(values, scale))
    made = fp8.quantize_weight(weight, exact=exact)
    return Quantised(made._replace(scale=made.scale[:, None]))


def plain(matrix: Unpacked, dtype: torch.dtype) -> Tensor:
    """The numbers that a matrix `[out, inner]` stands for, or those of experts `[experts, out, inner]`."""
    if isinstance(matrix, Tensor):
        return matrix
    values, scale = matrix.weight
    if values.is_meta:
        return torch.empty(values.shape, dtype=dtype, device="meta")
    if values.dim() > 2:  # one after the other, for the room that float32 takes
        made = torch.empty(values.shape, dtype=dtype, device=values.device)
        for i, each in enumerate(values):
            made[i].copy_(plain(Quantised(Fp8Weight(each, scale[i])), dtype))
        return made
    return fp8.weight_values(packed(matrix.weight)).to(dtype)


def packed(weight: Fp8Weight) -> Fp8Weight:
    """With one scale a row, `[..., out]`, as products read it; or with those of blocks."""
    return weight._replace(scale=weight.scale[..., 0]) if weight.scale.shape[-1] == 1 else weight


def rows(change: Callable[..., Tensor], *matrices: Unpacked, dtype: torch.dtype, keep: bool = False) -> Unpacked:
    """What `change`, which only moves rows, makes of matrices. Some of them quantised, or of different kinds: all in
    `dtype`. Of several static scales the largest counts, as the product has one; with `keep`, each its own.
    """
    quantised = [m for m in matrices if isinstance(m, Quantised)]
    if len(quantised) < len(matrices) or len({m.weight.scale.shape[-1] for m in quantised}) > 1:
        return change(*(plain(m, dtype) for m in matrices))
    given = [m.input_scale for m in quantised if m.input_scale is not None]
    scale = None
    if given:
        stacked = torch.stack(given)
        scale = stacked if keep or stacked.is_meta else stacked.amax(0)
    return Quantised(by_rows(change, *(m.weight for m in quantised)), scale)


def times(matrix: Unpacked, factor: float) -> Unpacked:
    if factor == 1.0:
        return matrix
    if isinstance(matrix, Tensor):
        return (matrix.float() * factor).to(matrix.dtype)
    return matrix._replace(weight=matrix.weight._replace(scale=matrix.weight.scale * factor))
