"""`GgufFile`: reads metadata and tensor locations of a GGUF file and its parts. `choose` selects a file."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from weft.engine.config import GGUF_INDEX
from weft.engine.errors import ModelError, refuse_pointer

INDEX = GGUF_INDEX  # File in the model directory that lists the GGUF files and their tensors.
SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
LISTED = 8  # Number of files that an error lists.
VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
DEEPEST_ARRAY = 4  # Arrays within arrays.

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Types of metadata values that are numbers, as numpy types."""
_FLOAT32, _STRING, _ARRAY = 6, 8, 9

KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
"""Storage types of tensors by their number: name, values per block, bytes per block."""


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


class _Damaged(Exception):
    """The file's own lengths, offsets or types contradict its size or each other."""


class _Part:
    """The metadata and the tensor table of one file, read through a memory map. Every length in the file is compared
    with the file's size before anything of that length is read. Raises `_Damaged` and `ModelError`."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data, self._size, self._at = data, len(data), 0
        if self._take(4) != b"GGUF":
            raise _Damaged("it does not start with GGUF")
        version = self._unpack("<I")
        if version not in VERSIONS:
            if version and not version & 0xFFFF:
                raise ModelError("is big-endian, which is not supported: convert it to little-endian")
            raise ModelError(f"has version {version} of the format; supported: {', '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._unpack("<Q"), self._unpack("<Q")
        self.values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in self.values:
                raise _Damaged(f"the key {key[:60]!r} occurs twice")
            self.values[key] = self._value(self._unpack("<I"))
        self.tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}  # Kind, shape, offset and size.
        table = [self._tensor() for _ in range(num_tensors)] if num_tensors <= self._size else self._damaged()
        alignment = self.values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise _Damaged("general.alignment is not a multiple of 8")
        begin = -(-self._at // alignment) * alignment
        for name, (kind, per_block, block), shape, offset in table:
            size = prod(shape) // per_block * block
            if name in self.tensors:
                raise _Damaged(f"the tensor {name[:60]!r} occurs twice")
            if shape and shape[-1] % per_block:
                raise _Damaged(f"rows of {name[:60]!r} have {shape[-1]} values, but {kind} has blocks of {per_block}")
            if offset % alignment:
                raise _Damaged(f"the tensor {name[:60]!r} is not aligned")
            if begin + offset + size > self._size:
                raise _Damaged(f"it ends before its tensor {name[:60]!r}")
            self.tensors[name] = (kind, shape, begin + offset, size)

    def _damaged(self) -> Any:
        raise _Damaged("a length exceeds its size")

    def _take(self, size: int) -> bytes:
        """Return the next bytes."""
        begin = self._at
        if size > self._size - begin:
            self._damaged()
        self._at = begin + size
        return self._data[begin : self._at]

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self) -> str:
        return self._take(self._unpack("<Q")).decode("utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """Like `_string`, `count` times, without a call for each: vocabularies have hundreds of thousands."""
        if count > (self._size - self._at) // 8:
            self._damaged()
        data, at, found = self._data, self._at, []
        unpack, last = struct.Struct("<Q").unpack_from, self._size - 8
        for _ in range(count):
            if at > last:
                self._damaged()
            begin = at + 8
            at = begin + unpack(data, at)[0]
            found.append(data[begin:at])
        if at > self._size:
            self._damaged()
        self._at = at
        return [text.decode("utf-8", "replace") for text in found]

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._unpack("<I"), self._unpack("<Q")
            if inner == _STRING:
                return self._strings(count)
            if inner in _NUMBERS:
                return self._numbers(inner, count)
            if depth == DEEPEST_ARRAY or count > self._size:
                self._damaged()
            return [self._value(inner, depth + 1) for _ in range(count)]
        if kind not in _NUMBERS:
            raise _Damaged(f"a value has the unknown type {kind}")
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        form = np.dtype(_NUMBERS[kind])
        found = np.frombuffer(self._take(count * form.itemsize), form)
        if kind == _FLOAT32:  # The shortest decimals, so that 1e-6 stays 1e-6.
            return [float(str(n)) for n in found] if count < 64 else found.tolist()
        return found.tolist()

    def _tensor(self) -> tuple[str, tuple[str, int, int], tuple[int, ...], int]:
        """Return name, kind, shape and offset of the next tensor of the table."""
        name, dimensions = self._string(), self._unpack("<I")
        if dimensions > MOST_DIMENSIONS:
            raise _Damaged(f"the tensor {name[:60]!r} has {dimensions} dimensions")
        shape = tuple(self._unpack("<Q") for _ in range(dimensions))[::-1]
        number, offset = self._unpack("<I"), self._unpack("<Q")
        if number not in KINDS:
            raise ModelError(f"stores {name[:60]!r} in a type that is not known here (number {number})")
        return name, KINDS[number], shape, offset


class GgufFile:
    def __init__(self, path: Path) -> None:
        """Raises `ModelError`, one line, for a file that is damaged or incomplete."""
        self.path, self.parts = path, parts_of(path)
        self.tensors: dict[str, Entry] = {}
        self._values: dict[str, Any] = {}
        for i, part in enumerate(self.parts):
            read = _read(part)
            self._values = self._values or read.values
            if both := self.tensors.keys() & read.tensors.keys():
                raise ModelError(f"{path}: several parts have the tensor {min(both)[:60]}")
            self.tensors |= {name: Entry(i, *found) for name, found in read.tensors.items()}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value: a number, string, bool or list of them."""
        return self._values.get(key, default)

    def keys_under(self, prefix: str) -> list[str]:
        """Return the metadata keys with this prefix."""
        return [key for key in self._values if key.startswith(prefix)]

    def numbers(self, name: str) -> list[float]:
        """Return the values of a small float32 tensor."""
        entry = self.tensors[name]
        if entry.kind != "F32":
            raise ModelError(f"{self.path}: {name} is {entry.kind}, not F32")
        with self.parts[entry.file].open("rb") as file:
            file.seek(entry.offset)
            return [float(n) for n in np.frombuffer(file.read(entry.size), "<f4")]


def _read(path: Path) -> _Part:
    refuse_pointer(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if not size:
                raise _Damaged("it is empty")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                return _Part(data)
    except ModelError as error:
        raise ModelError(f"{path} {error}") from None
    except (_Damaged, OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not a complete GGUF file ({path.stat().st_size:,} bytes; {error}): download it again"
        ) from None
