"""Gemma 3: square pictures with a fixed number of embeddings; its tokens see all of their image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from weft.engine.model.vision.family import Shapes, Vision, equal_squares, whole

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3(Vision):
    side: int  # Pixels of a picture's side.
    tokens: int  # Embeddings of a picture.

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        side = config["vision_config"].get("image_size", 224)
        tokens = whole(config.get("mm_tokens_per_image", 256), "mm_tokens_per_image")
        return cls(side=whole(side, "vision_config.image_size"), tokens=tokens, bidirectional=tokens)

    def num_embeddings(self, shapes: Shapes, grid: tuple[int, ...]) -> int:  # noqa: ARG002 (pictures are alike)
        equal_squares(shapes, self.side)
        if len(shapes) != 1:
            raise ValueError("it has several tiles")
        return self.tokens

    def example(self, tokens: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:  # noqa: ARG002
        return ((self.side, self.side),), (1,)

    def parts(self, model: Any) -> nn.ModuleDict:
        from torch import nn

        own = model.model
        return nn.ModuleDict({"tower": own.vision_tower, "projector": own.multi_modal_projector})

    def embed(self, parts: Any, tiles: Sequence[Tensor], grid: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        import torch

        states = parts["tower"](pixel_values=torch.stack(list(tiles))).last_hidden_state
        projected: Tensor = parts["projector"](states)
        return projected.flatten(0, 1)[:, None]
