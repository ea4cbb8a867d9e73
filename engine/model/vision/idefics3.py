"""Idefics3 and SmolVLM: a SigLIP tower over square tiles, whose patches a pixel shuffle joins into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from weft.engine.model.vision.family import Shapes, Vision, equal_squares, whole

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3(Vision):
    side: int  # Pixels of a tile's side.
    tokens: int  # Embeddings of a tile.

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        vision = config["vision_config"]
        side = whole(vision.get("image_size", 224), "vision_config.image_size")
        patch = whole(vision.get("patch_size", 32), "vision_config.patch_size")
        joined = whole(config.get("scale_factor", 2), "scale_factor")
        return cls(side=side, tokens=(side // patch) ** 2 // joined**2)

    def num_embeddings(self, shapes: Shapes, grid: tuple[int, ...]) -> int:  # noqa: ARG002 (tiles are alike)
        equal_squares(shapes, self.side)
        return len(shapes) * self.tokens

    def example(self, tokens: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        return ((self.side, self.side),) * max(1, tokens // self.tokens), (0, 0)

    def parts(self, model: Any) -> nn.ModuleDict:
        from torch import nn

        return nn.ModuleDict({"tower": model.model.vision_model, "connector": model.model.connector})

    def embed(self, parts: Any, tiles: Sequence[Tensor], grid: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        import torch

        # Called directly: `get_image_features` drops tiles that are zero everywhere.
        states = parts["tower"](pixel_values=torch.stack(list(tiles))).last_hidden_state
        joined: Tensor = parts["connector"](states)
        return joined.flatten(0, 1)[:, None]
