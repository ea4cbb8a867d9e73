"""`GgufFile`: the metadata of a GGUF file and where its tensors lie, over all parts of a file that is split."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.engine.errors import ModelError, one_line, refuse_pointer

INDEX = "gguf.json"
"""in the directory that stands for a file: which files, and what lies where in them"""
SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


class Entry(NamedTuple):
    """A tensor of a file."""

    file: int
    """which of the parts has it"""
    kind: str
    """how its numbers are stored, as ggml calls it: F32, Q4_K, …"""
    shape: tuple[int, ...]
    """of the numbers, the last dimension contiguous"""
    offset: int
    """its first byte in the file"""
    size: int
    """bytes"""


def parts_of(path: Path) -> list[Path]:
    """All parts of the file that `path` is, or is one of. Raises `ModelError` where one is missing."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [
        path.with_name(f"{match['stem']}-{i:05d}-of-{match['parts']}.gguf") for i in range(1, int(match["parts"]) + 1)
    ]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{path} is one of {len(parts)} parts; missing: {', '.join(absent[:3])}")
    return parts


def name_of(path: Path) -> str:
    """What the model is called: the file's name without its ending and its part."""
    match = SPLIT.fullmatch(path.name)
    return match["stem"] if match else path.name.removesuffix(path.suffix)


def architecture_of(path: Path) -> str | None:
    """What its metadata say first, without reading the others; None where that cannot be told."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    _, found, rest = head.partition(b"general.architecture")
    size = int.from_bytes(rest[4:12], "little")
    return rest[12 : 12 + size].decode(errors="replace") if found and head.startswith(b"GGUF") and size < 64 else None


class GgufFile:
    def __init__(self, path: Path) -> None:
        """Raises `ModelError`, one line, for a file that is damaged or incomplete."""
        self.path, self.parts = path, parts_of(path)
        self.tensors: dict[str, Entry] = {}
        self._readers = [_read(part) for part in self.parts]
        for i, reader in enumerate(self._readers):
            for t in reader.tensors:
                shape = tuple(int(n) for n in reversed(t.shape))
                self.tensors[t.name] = Entry(i, t.tensor_type.name, shape, int(t.data_offset), int(t.n_bytes))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: number, string, truth value or list of such."""
        field = self._readers[0].fields.get(key)
        if field is None:
            return default
        value = field.contents()
        # 1e-6 was written, in single precision.
        return float(str(np.float32(value))) if isinstance(value, float) and field.types[0].name == "FLOAT32" else value

    def keys_under(self, prefix: str) -> list[str]:
        """Of the metadata."""
        return [key for key in self._readers[0].fields if key.startswith(prefix)]

    def numbers(self, name: str) -> list[float]:
        """The numbers of a small tensor that is stored in float32."""
        tensor = next(t for reader in self._readers for t in reader.tensors if t.name == name)
        return [float(n) for n in tensor.data.reshape(-1)]


def _read(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError("GGUF files need the package gguf: pip install gguf") from None
    refuse_pointer(path)
    try:
        return GGUFReader(path)
    # The library reads what stands there; a damaged length or offset becomes any of these.
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, TypeError, OSError) as error:
        reason = one_line(error, 120)
        raise ModelError(
            f"{path} is no whole GGUF file ({path.stat().st_size:,} bytes; {reason}): download it again"
        ) from None
