"""Which resolution a LLaVA gives an image, and how many embeddings that makes: rules and towers share it."""

from __future__ import annotations

import math
from collections.abc import Sequence

Size = tuple[int, int]
"""(height, width)."""
SLACK = 1.1  # an image may exceed its limit by this before its embeddings are reduced


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """Return the resolution that keeps most pixels of an image and, among those, wastes least."""

    def worth(resolution: Size) -> tuple[int, int]:
        height, width = fitted(size, resolution, round_up=False)
        kept = min(height * width, size[0] * size[1])
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=worth)


def fitted(size: Size, into: Size, *, round_up: bool = True) -> Size:
    """Return the size of an image that is scaled to fit into a resolution."""
    (height, width), (most_height, most_width) = size, into
    if not round_up:
        scale = min(most_width / width, most_height / height)
        return int(height * scale), int(width * scale)
    by_width, by_height = most_width / width, most_height / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), most_height), most_width
    return most_height, min(math.ceil(width * by_height), most_width)


def shown(size: Size, rows: int, columns: int) -> Size:
    """Return the rows and columns of embeddings that show the image: those of its bars are left out."""
    height, width = size
    if width / height > columns / rows:
        return rows - 2 * ((rows - int(round(height * (columns / width), 7))) // 2), columns
    return rows, columns - 2 * ((columns - int(round(width * (rows / height), 7))) // 2)


def reduced(rows: int, columns: int, patches: int, most: int) -> Size:
    """Return rows and columns of embeddings after a reduction to about those of `most` tiles; 0: without one.
    patches: embeddings of a tile's side."""
    ratio = math.sqrt(rows * columns / (most * patches**2)) if most else 0.0
    return (int(rows // ratio), int(columns // ratio)) if ratio > SLACK else (rows, columns)


def num_tiled(size: Size, resolutions: Sequence[Size], side: int, patches: int, most: int) -> int:
    """Return how many embeddings an image's tiles give, with one more at each end of a row. side: pixels of a tile's
    side."""
    height, width = best_resolution(size, resolutions)
    rows, columns = shown(size, height // side * patches, width // side * patches)
    rows, columns = reduced(rows, columns, patches, most)
    return rows * (columns + 1) if columns > 0 else 0
