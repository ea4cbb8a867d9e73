"""`GgufCheckpoint`: the tensors of GGUF files under their names in a Hugging Face checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.checkpoint import WHOLE, Packing, Part, Stored
from weft.engine.model.gguf import blocks, packing
from weft.engine.model.gguf.file import INDEX, Entry
from weft.engine.model.gguf.forms import form_of
from weft.kernels.formats.packed_form import COLUMNS

READ_ALREADY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the configuration already contains."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class GgufCheckpoint:
    """Like `Checkpoint`. Blocks are dequantized on the device while loading."""

    def __init__(self, path: Path) -> None:
        """path: a directory with `INDEX`. Raises `ModelError`."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == index["architecture"])
        self._path, self._offset_norms = path, index["offset_norms"]
        self._names = get_tensor_name_map(arch, index["layers"])
        self._entries = {
            name: Entry(file, kind, tuple(shape), offset, size)
            for name, (file, kind, shape, offset, size) in index["tensors"].items()
        }
        self._mapped = [_map(path / file) for file in index["files"]]
        for name, entry in self._entries.items():
            if entry.offset + entry.size > len(self._mapped[entry.file]):
                raise ModelError(f"{path / index['files'][entry.file]} ends before its tensor {name}")
        self._asked: set[str] = set()

    def rename(self, known: str, prefix: str, others: tuple[str, ...], instead: str = "") -> None:
        """Does nothing: files have only one prefix."""

    def _find(self, name: str) -> tuple[str, int | None] | None:
        """Return the tensor's name in the file, and the expert if stacked there."""
        expert = _EXPERT.search(name)
        plain = name if expert is None else name.replace(expert[0], ".experts.")
        found = self._names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if found is None:
            return None
        if expert is None:
            return (found, None) if found in self._entries else None
        if found in self._entries:
            return found, int(expert[1])
        separate = found.replace("_exps.", f".{expert[1]}.")  # format of early files
        return (separate, None) if separate in self._entries else None

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def __call__(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored:
        """See `Checkpoint`."""
        found = self._find(name)
        if found is None:
            raise ModelError(f"{self._path.name} has no tensor for {name}, which its metadata require")
        there, expert = found
        self._asked.add(there)
        entry = self._entries[there]
        has = entry.shape if expert is None else entry.shape[1:]
        if (want := part.whole(shape)) not in (has, (1, *has)):
            raise ModelError(f"{name} ({there}) has shape {has}, its metadata require {want}")
        mapped = self._bytes(entry)
        if entry.kind in blocks.PLAIN:
            raw = mapped.view(blocks.PLAIN[entry.kind]).reshape(entry.shape)
            raw = (raw if expert is None else raw[expert]).reshape(want)[part.of_whole(shape)]
            return Stored(raw, _less_one if self._offset_norms and there.endswith("norm.weight") else None)
        raw = mapped.reshape(*entry.shape[:-1], -1)
        raw = (raw if expert is None else raw[expert]).reshape(*want[:-1], -1)
        return self._blocks(entry.kind, raw, shape, part)

    def _bytes(self, entry: Entry) -> Tensor:
        return self._mapped[entry.file][entry.offset : entry.offset + entry.size]

    def packing(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Packing | None:
        """See `Checkpoint`. Matrices of experts that are stacked in the file are not kept packed."""
        found = self._find(name)
        if found is None or found[1] is not None or len(shape) != 2:
            return None
        form = form_of(self._entries[found[0]].kind)
        begin, end = _columns(shape, part)
        fits = form is not None and not begin % COLUMNS and not end % COLUMNS
        return Packing(form) if fits and form is not None else None

    def packed(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Stored:
        """See `Checkpoint`."""
        stored = self(name, shape, part)
        found = self._find(name)
        assert found is not None
        kind = self._entries[found[0]].kind
        begin, end = _columns(shape, part)
        first = begin // blocks.block_of(kind)[0] * blocks.block_of(kind)[0]
        own = slice(begin - first, end - first)
        return stored._replace(decode=lambda raw, _: packing.pack(raw, kind, own))

    def _blocks(self, kind: str, raw: Tensor, shape: tuple[int, ...], part: Part) -> Stored:
        """Return the rows of a part, with only the blocks that its columns need."""
        *rows, _ = part.of_whole(shape)
        per_block, size = blocks.block_of(kind)
        first, last = _columns(shape, part)
        begin = first // per_block
        raw = raw[(*rows, slice(begin * size, -(-last // per_block) * size))]
        own = slice(first - begin * per_block, last - begin * per_block)
        return Stored(raw, dequantized(kind, own), by_rows=True)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of an existing tensor."""
        found = self._find(name)
        assert found is not None
        there, expert = found
        return self._entries[there].shape[0 if expert is None else 1 :]

    def refuse_further_layers(self, layer: str, num_layers: int) -> None:
        """Does nothing: the layer count comes from the file."""

    def surplus(self, harmless: Iterable[str]) -> list[str]:
        """Return names that were not requested."""
        asked = self._asked | set(READ_ALREADY)
        heads = ("output.weight",) if any("lm_head" in name for name in harmless) else ()
        return sorted(self._entries.keys() - asked - set(heads))


def _columns(shape: tuple[int, ...], part: Part) -> tuple[int, int]:
    """Return the first column of a part and the one after its last."""
    own = part.of_whole(shape)[-1]
    return own.start or 0, part.whole(shape)[-1] if own.stop is None else own.stop


def _less_one(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Subtract the one that llama.cpp adds to these norms."""
    return (raw.float() - 1.0).to(dtype)


def dequantized(kind: str, columns: slice = slice(None)) -> Callable[[Tensor, torch.dtype], Tensor]:
    """Return a function from rows of blocks to these columns of their values."""
    return lambda raw, dtype: blocks.dequantize(raw, kind, dtype)[..., columns]


def _map(file: Path) -> Tensor:
    try:
        size: Any = file.stat().st_size
        return torch.from_file(str(file.resolve()), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"cannot read {file.resolve()}: {error}") from None
