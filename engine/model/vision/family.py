"""`Vision`: what the engine needs to know about a family's images; `Normalisation`: from pixels to a tower's input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weft.engine.errors import ModelError
from weft.engine.images.rules import read_preprocessor

if TYPE_CHECKING:
    from torch import Tensor, nn

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision(ABC):
    """A model's vision part. Its subclasses are the families."""

    deepstack: int = 0
    """Layers of the language model, from the first, whose outputs get further embeddings of an image added."""
    rope_grid: int = 0
    """Patches per side of a token, if rotary positions inside an image are those of a grid; 0: those of its tokens."""
    cpu_only: bool = False
    """No GPU has computed it and been right."""
    bidirectional: int = 0
    """Most tokens of an image, if they see all of it and so lie in one chunk; 0: attention is causal."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Defaults of the family's image processor."""

    @classmethod
    @abstractmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Read a `config.json`. Raises `ModelError`."""

    @abstractmethod
    def num_embeddings(self, shapes: Shapes, grid: tuple[int, ...]) -> int:
        """Return how many embeddings an image with these tiles gives. Raises `ValueError`, with the reason, if the
        tower cannot take them."""

    @abstractmethod
    def example(self, tokens: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Return shapes of tiles and the grid of an image with about this many embeddings, to measure its memory."""

    @abstractmethod
    def parts(self, model: Any) -> nn.ModuleDict:
        """Return the modules of `transformers`' model that compute embeddings."""

    def on_gpu(self, parts: Any) -> None:  # noqa: B027 (most families need nothing)
        """Adapt the parts to a GPU, after they were moved there."""

    @abstractmethod
    def embed(self, parts: Any, tiles: Sequence[Tensor], grid: tuple[int, ...]) -> Tensor:
        """Return embeddings `[n, 1 + deepstack, H]` of one image. tiles: normalised, `[3, h, w]` each."""


def whole(value: Any, name: str) -> int:
    """Return a positive integer of a `config.json`. Raises `ModelError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, must be a positive integer")
    return value


def equal_squares(shapes: Shapes, side: int) -> None:
    """Raise `ValueError` unless all tiles have this side."""
    if any(shape != (side, side) for shape in shapes):
        raise ValueError(f"its tiles are not {side} x {side} pixels")


class Normalisation:
    """Converts uint8 pixels to the input of a tower: `(pixels * scale - mean) / std` in float32."""

    def __init__(self, path: Path, vision: Vision) -> None:
        """path: the model directory, whose image processor's settings are read. Raises `ModelError`."""
        import torch

        try:
            given = read_preprocessor(path) or {}
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the settings of the image processor in {path}: {error}") from None
        mean, std = given.get("image_mean") or vision.mean, given.get("image_std") or vision.std
        scale = given.get("rescale_factor") or 1 / 255
        try:
            self._mean = torch.tensor([float(m) for m in mean]).view(3, 1, 1)
            self._std = torch.tensor([float(s) for s in std]).view(3, 1, 1)
            self._scale = float(scale) if given.get("do_rescale", True) else 1.0
        except (TypeError, ValueError, RuntimeError):
            raise ModelError(f"{path}: image_mean, image_std or rescale_factor is of the wrong kind") from None
        if given.get("do_normalize") is False:
            self._mean, self._std = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)

    def to(self, device: Any) -> Self:
        """Move its constants to a device."""
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        return self

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return `[3, h, w]` float32 for pixels `[h, w, 3]` uint8."""
        values = (pixels.double() * self._scale).float().permute(2, 0, 1)
        return (values - self._mean) / self._std
