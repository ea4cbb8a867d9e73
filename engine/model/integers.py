"""`IntegerCheckpoint`: reads low-bit integer matrices (AWQ, GPTQ, llm-compressor), dequantized or as `PackedRows`.

A value is `(code - zero) * scale`; the columns of a group share zero and scale. Dequantized, it is computed exactly in
float32 and rounded once to the serving dtype, so such a model takes the memory of a 16-bit one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.checkpoint import WHOLE, Checkpoint, Packing, Part, Stored
from weft.engine.model.parts import Integers
from weft.engine.model.spec import ModelSpec
from weft.kernels.formats.packed_form import COLUMNS, PackedForm
from weft.kernels.formats.packed_rows import pack_rows

GIB = 1 << 30
WORD = 32  # Bits of the integers that codes are packed into.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # Positions of eight neighboring codes in an AWQ word.
CHUNK = 1 << 24  # Values converted at once, because they pass through integers and float32.


class Ends(NamedTuple):
    """Suffixes of the tensor names of a module."""

    codes: str
    scales: str
    zeros: str
    groups: str


ENDS = {
    "awq": Ends(".qweight", ".scales", ".qzeros", ""),
    "gptq": Ends(".qweight", ".scales", ".qzeros", ".g_idx"),
    "compressed-tensors": Ends(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
}


class Codes(NamedTuple):
    """Everything to dequantize a matrix or a part of it; `[in, out]`, or `[out, in]` for compressed-tensors."""

    form: Integers
    scales: Tensor  # `[groups, out]`.
    zeros: Tensor | None  # As `scales`, packed; None: the middle of the code range.
    groups: Tensor | None  # `[in]`: the group of each column; None: in order.
    rows: slice  # Rows and columns of the part in `[out, in]`.
    columns: slice


class IntegerCheckpoint(Checkpoint):
    """A `Checkpoint` in which a module has a `weight` if it has codes."""

    def __init__(self, path: Path, stack: ExitStack, form: Integers) -> None:
        super().__init__(path, stack)
        self._form, self._ends = form, ENDS[form.method]
        self.unpacked = 0  # Bytes of the codes requested so far.

    def _module(self, name: str) -> str | None:
        """Return the module whose weight is `name` if it is stored as codes."""
        module = name.removesuffix(".weight")
        there = module != name and not super().__contains__(name) and super().__contains__(module + self._ends.codes)
        return module if there else None

    def __contains__(self, name: str) -> bool:
        if name.endswith(self._ends.scales) and super().__contains__(
            name.removesuffix(self._ends.scales) + self._ends.codes
        ):
            return False  # not the scale of an FP8 matrix
        return super().__contains__(name) or self._module(name) is not None

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored:
        """See `Checkpoint`."""
        module = self._module(name)
        if module is None:
            return super().__call__(name, shape, part)
        return self._stored(module, shape, part, dequantize)

    def packing(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Packing | None:
        """See `Checkpoint`. Groups that are not multiples of 32 columns, also those of a rank's part, are not kept."""
        module = self._module(name)
        if module is None or len(shape) != 2:
            return None
        _, inner = part.whole(shape)
        own, group = part.of_whole(shape)[1] if part.of > 1 else slice(None), self._form.group or inner
        begin, end = own.start or 0, inner if own.stop is None else own.stop
        order = None
        if (end_of_groups := self._ends.groups) and super().__contains__(module + end_of_groups):
            groups = super().__call__(module + end_of_groups, (inner,)).raw[begin:end].long()
            if bool((groups < 0).any()):
                return None  # Reading it reports the damage.
            if bool((groups[1:] < groups[:-1]).any()):
                order = torch.argsort(groups, stable=True)
            size = math.gcd(*groups.bincount().tolist())
        else:
            size = math.gcd(group, begin, end)
        if size < COLUMNS or size % COLUMNS:
            return None
        bits = 8 if self._form.bits == 8 else 4
        return Packing(PackedForm(bits, size, 1 << (self._form.bits - 1), not self._form.symmetric), order)

    def packed(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored:
        """See `Checkpoint`."""
        module, packing = self._module(name), self.packing(name, shape, part)
        assert module is not None
        assert packing is not None
        return self._stored(module, shape, part, partial(_packed, packing))

    def _stored(
        self, module: str, shape: tuple[int, ...], part: Part, decode: Callable[[Codes, Tensor, torch.dtype], Tensor]
    ) -> Stored:
        """Return the codes of a module's matrix, to be decoded together with its scales and zeros."""
        out, inner = whole = part.whole(shape)
        form, per_word = self._form, WORD // self._form.bits
        group = form.group or inner
        rows_first = form.method == "compressed-tensors"
        if rows_first:
            self._check_metadata(module, (out, inner))

        def get(end: str, *sizes: int) -> Tensor:
            made = super(IntegerCheckpoint, self).__call__(module + end, sizes[::-1] if rows_first else sizes).raw
            if made.is_floating_point() != (end == self._ends.scales):
                raise ModelError(f"{module}{end} is {str(made.dtype).removeprefix('torch.')}, which is not read here")
            return made

        rows, columns = (
            slice(own.start or 0, size if own.stop is None else own.stop)
            for own, size in zip(part.of_whole(shape) if part.of > 1 else (slice(None),) * 2, whole, strict=True)
        )
        groups, known = None, bool(self._ends.groups) and super().__contains__(module + self._ends.groups)
        if form.act_order and form.group and not known:
            raise ModelError(f"the checkpoint has no tensor {module}{self._ends.groups}, which its act-order needs")
        if known:
            groups = super().__call__(module + self._ends.groups, (inner,)).raw
            if not bool(((groups >= 0) & (groups < -(-inner // group))).all()):
                raise ModelError(
                    f"{module}{self._ends.groups} names groups that do not exist: the checkpoint is damaged"
                )
        count = -(-inner // group)
        scales = get(self._ends.scales, count, out)
        zeros = None
        if not form.symmetric:
            zeros = get(self._ends.zeros, count, -(-out // per_word))
        # The dimension along which a word packs several codes.
        packed = "out" if form.method == "awq" else "in"
        codes = get(
            self._ends.codes, *((inner, -(-out // per_word)) if packed == "out" else (-(-inner // per_word), out))
        )
        own_rows = _words(rows, per_word) if packed == "out" else rows
        own_columns = _words(columns, per_word) if packed == "in" else columns
        raw = codes[own_rows, own_columns] if rows_first else codes[own_columns, own_rows]
        self.unpacked += raw.nbytes
        return Stored(raw, partial(decode, Codes(form, scales, zeros, groups, rows, columns)))

    def _check_metadata(self, module: str, shape: tuple[int, int]) -> None:
        """Check that the file's other tensors of a matrix `[out, in]` agree with how its codes are read."""
        if super().__contains__(end := module + ".weight_shape"):
            stated = super().__call__(end, (2,)).raw.tolist()
            if stated != [*shape]:
                raise ModelError(f"{end} is {stated}, but the matrix is {[*shape]}")
        if self._form.symmetric and super().__contains__(end := module + self._ends.zeros):
            raise ModelError(f"{end} exists, but quantization_config says symmetric: true")

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of an existing tensor."""
        module = self._module(name)
        if module is None:
            return super().shape_of(name)
        first, second = super().shape_of(module + self._ends.codes)
        per_word = WORD // self._form.bits
        if self._form.method == "compressed-tensors":
            return first, second * per_word
        return (second * per_word, first) if self._form.method == "awq" else (second, first * per_word)

    def summary(self, served_bytes: int, spec: ModelSpec) -> str:
        """Return one line on how the codes are stored."""
        form, small = self._form, spec.quantization is not None
        return (
            f"matrices in {form.bits} bits ({form.method}) became {'FP8' if small else '16 or 32 bits'} while loading: "
            f"{self.unpacked / GIB:.2f} GiB of codes, the weights now take {served_bytes / GIB:.2f} GiB"
            f"{'' if small else ' (--quantization fp8 makes them smaller)'}"
        )

    def surplus(self, harmless: Iterable[str]) -> list[str]:
        return super().surplus((*harmless, *self._ends[2:], ".weight_shape"))


def _words(span: slice, per_word: int) -> slice:
    """Return the words that contain a span of codes."""
    return slice(span.start // per_word, -(-span.stop // per_word))


def _unpack(words: Tensor, bits: int, dim: int, order: Iterable[int] | None = None) -> Tensor:
    """Unpack int32 words to uint8 codes along `dim`."""
    order = range(WORD // bits) if order is None else order
    shifts = torch.tensor([bits * place for place in order], dtype=torch.int32, device=words.device)
    shifts = shifts.view(-1, *[1] * (words.ndim - 1 - dim))
    # The mask removes the sign bits that the arithmetic shift keeps.
    return ((words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(dim, dim + 1)


def _scales_and_zeros(codes: Codes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return both as float32 `[rows, groups]`."""
    form, bits = codes.form, codes.form.bits
    rows_first, order = form.method == "compressed-tensors", AWQ_ORDER if form.method == "awq" else None
    scales = codes.scales.to(device).float()
    if codes.zeros is None:
        zeros = torch.full_like(scales, 1 << (bits - 1))
    else:
        zeros = _unpack(codes.zeros.to(device), bits, 0 if rows_first else 1, order).float()
        if form.zeros_less_one:
            zeros = (zeros + 1) % (1 << bits)
    if not rows_first:
        scales, zeros = scales.t(), zeros.t()
    return scales[codes.rows], zeros[codes.rows]


def _group_of(codes: Codes, device: torch.device) -> Tensor:
    """Return the group of each column."""
    first, last = codes.columns.start, codes.columns.stop
    if codes.groups is None:
        return torch.arange(first, last, device=device) // (codes.form.group or last)
    return codes.groups[codes.columns].to(device).long()


def _packed(packing: Packing, codes: Codes, raw: Tensor, _dtype: torch.dtype) -> Tensor:
    """Return the bytes of `PackedRows` from the words `raw`."""
    form, order = packing
    scales, zeros = _scales_and_zeros(codes, raw.device)
    group_of = _group_of(codes, raw.device)
    group_of = (group_of if order is None else group_of[order])[:: form.group]
    unpacked = torch.empty(len(scales), codes.columns.stop - codes.columns.start, dtype=torch.uint8)
    for own, some in _unpacked(codes, raw, len(scales)):
        unpacked[:, own] = some
    if order is not None:
        unpacked = unpacked[:, order]
    scale = scales[:, group_of]
    low = (form.centre - zeros[:, group_of]) * scale if form.low else None
    return pack_rows(unpacked, scale, low, form)


def dequantize(codes: Codes, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[rows, columns]` in `dtype` from the words `raw`, on their device."""
    device = raw.device
    scales, zeros = _scales_and_zeros(codes, device)
    group_of = _group_of(codes, device)
    out = torch.empty(len(scales), len(group_of), dtype=dtype, device=device)
    for own, some in _unpacked(codes, raw, len(scales)):
        at = group_of[own]
        out[:, own] = ((some.float() - zeros[:, at]) * scales[:, at]).to(dtype)
    return out


def _unpacked(codes: Codes, raw: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield spans of the part's columns with their codes, `[rows, columns]` uint8."""
    form, bits, per_word = codes.form, codes.form.bits, WORD // codes.form.bits
    rows_first, order = form.method == "compressed-tensors", AWQ_ORDER if form.method == "awq" else None
    first, last = codes.columns.start, codes.columns.stop
    rowwise = form.method == "awq"
    base = first if rowwise else first // per_word * per_word  # the column that `raw` begins with
    step = max(1, CHUNK // max(1, count) // per_word) * per_word
    for begin in range(base, last, step):
        end = min(begin + step, last)
        span = slice(begin - base, end - base)
        if rowwise:
            row = codes.rows.start % per_word
            some = _unpack(raw[span], bits, 1, order)[:, row : row + count].t()
        elif rows_first:
            some = _unpack(raw[:, _words(span, per_word)], bits, 1)
        else:
            some = _unpack(raw[_words(span, per_word)], bits, 0).t()
        yield slice(max(begin, first) - first, end - first), some[:, max(0, first - begin) : end - begin]
