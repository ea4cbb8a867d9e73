"""`GgufFile`: reads metadata and tensor locations of a GGUF file and its parts. `choose` selects a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from weft.engine.errors import ModelError, one_line, refuse_pointer

INDEX = "gguf.json"  # File in the model directory that lists the GGUF files and their tensors.
SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
LISTED = 8  # Number of files that an error lists.


class Entry(NamedTuple):
    """A tensor of a file."""

    file: int  # Index of the part that contains it.
    kind: str  # Storage type in ggml's terms: F32, Q4_K, …
    shape: tuple[int, ...]  # Shape of the values, the last dimension contiguous.
    offset: int  # Its first byte in the file.
    size: int  # Size in bytes.


def parts_of(path: Path) -> list[Path]:
    """Return all parts of the file that `path` is or belongs to. Raises `ModelError` if one is missing."""
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
    """Return the model's name: the file name without suffix and part number."""
    match = SPLIT.fullmatch(path.name)
    return match["stem"] if match else path.name.removesuffix(path.suffix)


def models_in(files: Iterable[str]) -> dict[str, list[str]]:
    """Return files by their first part, without image projectors."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        name = PurePosixPath(file).name
        if not name.lower().endswith(".gguf") or name.lower().startswith("mmproj"):
            continue
        split = SPLIT.fullmatch(name)
        first = file if split is None else file.replace(f"-{split['part']}-of-", "-00001-of-")
        found.setdefault(first, []).append(file)
    return found


def choose(repository: str, files: Iterable[str], wanted: str = "") -> list[str]:
    """Return the parts of the file `wanted`: its name, or a word of it such as Q4_K_M; "": the only file.

    Raises `ModelError`, one line, with the available files."""
    models = models_in(files)
    if not models:
        raise ModelError(f"{repository} has no GGUF file")
    if wanted in models:
        return models[wanted]
    fitting = {
        first: parts
        for first, parts in models.items()
        if wanted.lower().removesuffix(".gguf") in PurePosixPath(first).name.lower()
    }
    if wanted and len(fitting) > 1:  # Q4_K also occurs in Q4_K_M
        ends = {f: p for f, p in fitting.items() if PurePosixPath(f).stem.lower().endswith(wanted.lower())}
        fitting = ends or fitting
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    among = list(fitting or models)
    names = ", ".join(among[:LISTED]) + (f" and {len(among) - LISTED} more" if len(among) > LISTED else "")
    which = f"no GGUF file that {wanted!r} names" if wanted and not fitting else f"{len(among)} GGUF files"
    raise ModelError(f"{repository} has {which}; there are {names}: give {repository}:FILE")


def architecture_of(path: Path) -> str | None:
    """Return the architecture from the start of the metadata; None if it is not there."""
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
        """Return a metadata value: a number, string, bool or list of them."""
        field = self._readers[0].fields.get(key)
        if field is None:
            return default
        value = field.contents()
        # Shortest decimal of the float32, so that 1e-6 stays 1e-6.
        return float(str(np.float32(value))) if isinstance(value, float) and field.types[0].name == "FLOAT32" else value

    def keys_under(self, prefix: str) -> list[str]:
        """Return the metadata keys with this prefix."""
        return [key for key in self._readers[0].fields if key.startswith(prefix)]

    def numbers(self, name: str) -> list[float]:
        """Return the values of a small float32 tensor."""
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
    # A damaged length or offset makes the library raise any of these.
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, TypeError, OSError) as error:
        reason = one_line(error, 120)
        raise ModelError(
            f"{path} is not a complete GGUF file ({path.stat().st_size:,} bytes; {reason}): download it again"
        ) from None
