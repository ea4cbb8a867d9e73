"""Pictures of coloured digits, and questions about them with one right answer each."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32  # pixels of a picture's side, before `enlarged`
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230),
    "black": (20, 20, 20), "orange": (240, 150, 20), "purple": (150, 50, 190),
}  # fmt: skip
PLACES = ("top left", "top right", "bottom left", "bottom right")
# The rows of each digit, as five bits.
_ROWS = (
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31), (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14), (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14), (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip
GLYPHS = np.array([[[row >> bit & 1 for bit in range(4, -1, -1)] for row in rows] for rows in _ROWS], np.float32)
_WIDTH, _HEIGHT = 10, 14  # pixels of a drawn digit

Cell = tuple[int, str] | None
"""A digit and its colour, or nothing."""


class Picture(NamedTuple):
    pixels: NDArray[np.uint8]  # [SIDE, SIDE, 3]
    cells: tuple[Cell, ...]  # in the order of `PLACES`


class Question(NamedTuple):
    pictures: tuple[Picture, ...]
    text: str  # Pictures are numbered from 1.
    answer: str


def picture(rng: np.random.Generator) -> Picture:
    """Return a picture with one to four digits, all different, in any of four places."""
    filled = set(rng.permutation(4)[: rng.integers(1, 5)].tolist())
    digits, names = rng.permutation(10), list(COLOURS)
    cells: list[Cell] = [(int(digits[i]), names[rng.integers(len(names))]) if i in filled else None for i in range(4)]
    canvas = np.full((SIDE, SIDE, 3), rng.integers(200, 256), np.float32)
    half = SIDE // 2
    for i, cell in enumerate(cells):
        if cell is None:
            continue
        top = i // 2 * half + int(rng.integers(0, half - _HEIGHT + 1))
        left = i % 2 * half + int(rng.integers(0, half - _WIDTH + 1))
        mask = np.kron(GLYPHS[cell[0]], np.ones((2, 2), np.float32))[..., None]
        area = canvas[top : top + _HEIGHT, left : left + _WIDTH]
        area[:] = area * (1 - mask) + mask * np.array(COLOURS[cell[1]], np.float32)
    canvas += rng.normal(0, 4, canvas.shape)
    return Picture(canvas.clip(0, 255).astype(np.uint8), tuple(cells))


def enlarged(pixels: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    return pixels.repeat(factor, 0).repeat(factor, 1)


def png(pixels: NDArray[np.uint8], factor: int) -> bytes:
    """Return a picture as a client sends it."""
    file = io.BytesIO()
    Image.fromarray(enlarged(pixels, factor)).save(file, "PNG")
    return file.getvalue()


def question(rng: np.random.Generator) -> Question:
    """Return a question about one of one or two pictures."""
    pictures = tuple(picture(rng) for _ in range(1 + int(rng.random() < 0.4)))
    which = int(rng.integers(len(pictures)))
    cells = pictures[which].cells
    kind, place = rng.integers(3), int(rng.integers(4))
    cell = cells[place]
    if kind == 0:
        text, answer = f"digit {PLACES[place]}", "none" if cell is None else str(cell[0])
    elif kind == 1:
        text, answer = f"colour {PLACES[place]}", "none" if cell is None else cell[1]
    else:
        text, answer = "how many", str(sum(cell is not None for cell in cells))
    return Question(pictures, f"{text} in {which + 1}?", answer)
