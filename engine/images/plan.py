"""`ImageRule`: what a model's processor would do with an image of a given size. `ImagePlan`: the answer for one image.

Rules know sizes only. They never see pixels, so `/tokenize` and admission need no decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Detail = Literal["auto", "low", "high"]
Encode = Callable[[str], list[int]]
"""Token ids of a text, with special tokens parsed and none added."""

LOW_DETAIL_SIDE = 512
"""`detail: low` limits an image to about this many pixels squared."""
VERSION = 1
"""Part of every image's digest. Raise it when a rule changes."""


class Run(NamedTuple):
    """A token of the expanded placeholder, repeated."""

    token_id: int
    length: int
    is_embedding: bool
    """The image's embeddings replace these tokens."""


class Tile(NamedTuple):
    """One picture for the vision tower."""

    height: int
    width: int
    box: tuple[int, int, int, int] | None = None
    """Left, top, right and bottom of the part of the canvas that it shows, which may exceed it; None for all of it."""
    whole: bool = False
    """It shows the image itself, not the canvas."""


@dataclass(frozen=True, slots=True)
class ImagePlan:
    canvas: tuple[tuple[int, int], ...]
    """(height, width) of the canvas: the image is resized to each of them in turn."""
    tiles: tuple[Tile, ...]
    """Cut from the canvas, and resized again where the box has another size."""
    grid: tuple[int, ...]
    """Layout of the embeddings, as the family defines it."""
    placeholder: tuple[Run, ...]
    background: tuple[int, int, int] = (0, 0, 0)
    """Color outside the canvas."""

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each tile."""
        return tuple((tile.height, tile.width) for tile in self.tiles)

    @property
    def num_tokens(self) -> int:
        return sum(run.length for run in self.placeholder)

    @property
    def num_embeddings(self) -> int:
        return sum(run.length for run in self.placeholder if run.is_embedding)

    @property
    def num_pixels(self) -> int:
        return sum(tile.height * tile.width for tile in self.tiles)


class ImageRule(Protocol):
    family: str
    marker: int
    """The token that stands for one image in a rendered prompt. The placeholder replaces it."""
    resample: int
    """Pillow's number of the resampling filter."""
    written: str
    """How a template that takes only strings must write an image; it contains the marker."""
    around: tuple[str, str]
    """Text to write before and after the marker in a rendered prompt."""
    token_ids: frozenset[int]
    """Tokens that only image placeholders may contain."""
    low_if_several: bool
    """The images of a request with several have low detail."""

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        """Raises `ImageSizeError` if the model cannot take an image of this size."""
        ...


class ImageSizeError(ValueError):
    """The model cannot take an image of this size. The message is one clause for the client."""


def only(tokens: list[int], what: str) -> int:
    """The id of a special token. Raises `ValueError` unless it is one token."""
    if len(tokens) != 1:
        raise ValueError(f"the tokenizer has no token {what}")
    return tokens[0]


def side(size: dict[str, Any] | int, *names: str) -> int:
    """The first given of several names of a size. Older files have a number alone."""
    if isinstance(size, int):
        size = {names[-1]: size}
    for name in names:
        if isinstance(value := size.get(name), int) and value > 0:
            return value
    raise ValueError(f"the preprocessor has no {' or '.join(names)}")
