"""Mistral 3: a Pixtral tower over pictures of any size, whose patches are merged into tokens; breaks end their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, Self

from weft.engine.errors import ModelError
from weft.engine.model.vision.family import Shapes, Vision, whole
from weft.engine.model.vision.qwen_vl import CLIP_MEAN, CLIP_STD

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral3(Vision):
    unit: int  # Pixels of a token's side.
    largest: int  # Pixels of a picture's side at most.
    layers: tuple[int, ...]  # Hidden states of the tower that are projected.

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        vision, layers = config["vision_config"], feature_layers(config, -1)
        patch = whole(vision.get("patch_size", 16), "vision_config.patch_size")
        joined = whole(config.get("spatial_merge_size", 2), "spatial_merge_size")
        largest = whole(vision.get("image_size", 1024), "vision_config.image_size")
        return cls(unit=patch * joined, largest=largest, layers=layers, mean=CLIP_MEAN, std=CLIP_STD)

    def num_embeddings(self, shapes: Shapes, grid: tuple[int, ...]) -> int:  # noqa: ARG002 (the tile's shape says it)
        if len(shapes) != 1:
            raise ValueError("it has several tiles")
        height, width = shapes[0]
        if height % self.unit or width % self.unit or max(height, width) > self.largest:
            raise ValueError(f"its sides are not multiples of {self.unit} up to {self.largest} pixels")
        return height * width // self.unit**2

    def example(self, tokens: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        side = max(1, min(isqrt(tokens), self.largest // self.unit))
        return ((side * self.unit, side * self.unit),), (side, side)

    def parts(self, model: Any) -> nn.ModuleDict:
        from torch import nn

        own = model.model
        return nn.ModuleDict({"tower": own.vision_tower, "projector": own.multi_modal_projector})

    def embed(self, parts: Any, tiles: Sequence[Tensor], grid: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        import torch

        (tile,) = tiles
        sizes = [(tile.shape[1], tile.shape[2])]
        made = parts["tower"](tile[None], image_sizes=sizes, output_hidden_states=True, return_dict=True)
        selected = torch.cat([made.hidden_states[layer] for layer in self.layers], -1)
        return self.project(parts["projector"], selected[0], sizes)[:, None]

    def project(self, projector: Any, selected: Tensor, sizes: Any) -> Tensor:
        projected: Tensor = projector(selected, sizes)
        return projected


def feature_layers(config: dict[str, Any], default: int) -> tuple[int, ...]:
    """Return the hidden states of a tower that its projector reads. Raises `ModelError`."""
    layers = config.get("vision_feature_layer", default)
    layers = tuple(layers) if isinstance(layers, list) else (layers,)
    if not all(isinstance(layer, int) for layer in layers):
        raise ModelError(f"config.json: vision_feature_layer is {layers}, must be integers")
    return layers
