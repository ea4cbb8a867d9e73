"""`packed_as`: finds out whether a checkpoint's matrices are in formats that a CPU computes with as they are."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

from weft.engine.model.gguf.file import INDEX
from weft.engine.model.gguf.forms import form_of
from weft.engine.model.parts import Packed
from weft.engine.model.spec import ModelSpec
from weft.kernels.formats.packed_form import COLUMNS, PackedForm, common_form

_TABLES = ("token_embd.weight", "output.weight")
_JOINED = re.compile(r"\.(attn_[qkv]|ffn_(gate|up))\.weight$")


def packed_as(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return the spec with the matrices in 4 and 8 bits that its checkpoint has; the same spec if it has none."""
    if spec.quantization is not None:
        return spec
    if (path / INDEX).is_file():
        found = _of_gguf(path)
    elif spec.integers is not None:
        own = spec.integers
        bits = 8 if own.bits == 8 else 4
        floats = 2 * (1 if own.symmetric else 2) / own.group if own.group else 0.0
        found = Packed(bits / 8 + floats, 0.0, 0.0, 1.0, f"{own.bits}-bit {own.method}")
    else:
        found = None
    return spec if found is None else replace(spec, packed=found)


class _Sizes:
    """Adds up matrices of a kind."""

    def __init__(self) -> None:
        self.values = self.plain = 0
        self.bytes = 0.0

    def add(self, values: int, form: PackedForm | None) -> None:
        self.values += values
        self.plain += values if form is None else 0
        self.bytes += 0.0 if form is None else values * form.bytes_per_value

    @property
    def means(self) -> tuple[float, float]:
        """Bytes of packed matrices per value of all, and the share of values that are not packed."""
        return (self.bytes / self.values, self.plain / self.values) if self.values else (0.0, 1.0)


def _of_gguf(path: Path) -> Packed | None:
    """Return what the index of a GGUF file says; None if none of its matrices is in 4 or 8 bits."""
    tensors = json.loads((path / INDEX).read_text(encoding="utf-8"))["tensors"]
    kinds: Counter[str] = Counter()
    products: dict[str, list[tuple[int, PackedForm | None]]] = {}
    for name, (_, kind, shape, _, _) in tensors.items():
        if len(shape) > 1:
            kinds[kind] += prod(shape)
            form = form_of(kind) if len(shape) == 2 and shape[-1] % COLUMNS == 0 else None
            product = _JOINED.sub(lambda match: f".{match[1][:4]}", name)  # q, k and v are one product
            products.setdefault(product, []).append((prod(shape), form))
    layers, tables = _Sizes(), _Sizes()
    for product, matrices in products.items():
        forms = [form for _, form in matrices if form is not None]
        form = common_form(forms) if len(forms) == len(matrices) else None
        (tables if product in _TABLES else layers).add(sum(count for count, _ in matrices), form)
    if not layers.bytes and not tables.bytes:
        return None
    formats = ", ".join(f"{kind} {100 * count / kinds.total():.0f} %" for kind, count in kinds.most_common())
    return Packed(*layers.means, *tables.means, formats)
