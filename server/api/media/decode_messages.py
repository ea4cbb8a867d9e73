"""Messages between an API process and the process that decodes its images. No import here needs Pillow, an extra."""

from __future__ import annotations

import struct

import msgspec

HEADER = struct.Struct("<I")  # bytes of the next message


class Open(msgspec.Struct):
    """Decode this file later; answer with its size."""

    data: bytes
    memory_bytes: int  # limit of memory, beyond what the process has
    cpu_seconds: float
    seconds: float


class Size(msgspec.Struct):
    width: int = 0
    height: int = 0
    format: str = ""
    error: str = ""


class Cut(msgspec.Struct):
    """Answer with tiles, see `prepare.cut`."""

    canvas: list[tuple[int, int]]
    tiles: list[tuple[int, int, tuple[int, int, int, int] | None, bool]]
    resample: int
    background: tuple[int, int, int]


class Tiles(msgspec.Struct):
    pixels: bytes = b""  # of all tiles
    cpu_seconds: float = 0.0
    error: str = ""
