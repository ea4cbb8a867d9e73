"""Generates seeded PNG images for chat requests, without an image library."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.loadgen.errors import LoadError
from weft.loadgen.units import whole

CELL = 32
"""Side of the colored squares, in pixels. Squares keep files small, so that building them does not delay sending."""
MOST, LONGEST_SIDE = 64, 8192


@dataclass(frozen=True, slots=True)
class Images:
    """The images of every request."""

    count: int
    width: int = 512
    height: int = 512

    def __str__(self) -> str:
        return f"{self.count} {'image' if self.count == 1 else 'images'} of {self.width} × {self.height}"

    def parts(self, key: tuple[int, ...]) -> list[dict[str, Any]]:
        """Return content parts for a message. Equal keys give equal images."""
        files = (png(self.width, self.height, np.random.default_rng((*key, i))) for i in range(self.count))
        urls = (f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files)
        return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def parse(text: str, option: str) -> Images:
    """Read `N` or `NxWIDTHxHEIGHT`. Raises `LoadError`."""
    if not re.fullmatch(r"\d+(x\d+x\d+)?", text):
        raise LoadError(f"{option}: {text!r} is not N or NxWIDTHxHEIGHT, such as 2x1024x768")
    count, *sides = text.split("x")
    return Images(whole(count, option, most=MOST), *(whole(side, option, most=LONGEST_SIDE) for side in sides))


def png(width: int, height: int, rng: np.random.Generator) -> bytes:
    """Return an RGB image of randomly colored squares."""
    rows, columns = -(-height // CELL), -(-width // CELL)
    colors = rng.integers(0, 256, (rows, columns, 3), np.uint8)
    lines = np.zeros((height, 1 + 3 * width), np.uint8)
    lines[:, 0] = 2  # the filter Up: a line of zeros repeats the line above
    lines[::CELL, 0] = 0
    lines[::CELL, 1:] = colors.repeat(CELL, axis=1)[:, :width].reshape(rows, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
