"""LLaVA, LLaVA-NeXT, LLaVA-OneVision: a CLIP or SigLIP tower over squares; the latter two put tiles back together.

A LLaVA with Pixtral's tower is a Mistral 3 that merges no patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, Self

from weft.engine.errors import ModelError
from weft.engine.images.anyres import Size, best_resolution, num_tiled, reduced, shown
from weft.engine.images.llava import CLIP_MEAN, most_tiles
from weft.engine.model.vision.family import Shapes, Vision, equal_squares, whole
from weft.engine.model.vision.mistral3 import Mistral3, feature_layers
from weft.engine.model.vision.qwen_vl import CLIP_STD

if TYPE_CHECKING:
    from torch import Tensor, nn


def llava_of(config: dict[str, Any]) -> Vision:
    """Read a `config.json`. Raises `ModelError`."""
    return (Pixtral if config["vision_config"].get("model_type") == "pixtral" else Llava).of(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llava(Vision):
    side: int  # Pixels of a tile's side.
    patches: int  # Embeddings of a tile's side.
    layers: tuple[int, ...]  # Hidden states of the tower that are projected.
    skips: int  # States before those of patches.
    newline: bool  # An embedding of the model ends each row.
    tiled: tuple[Size, ...]  # Resolutions of images in tiles.
    most: int  # Tiles to whose number of embeddings those of an image are reduced; 0: they are not.

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        vision, newline = config["vision_config"], config.get("model_type") != "llava"
        side = whole(vision.get("image_size"), "vision_config.image_size")
        patches = side // whole(vision.get("patch_size"), "vision_config.patch_size")
        one_vision = config.get("model_type") == "llava_onevision"
        chosen = config.get("vision_feature_select_strategy") or ("full" if one_vision else "default")
        try:
            tiled = tuple((int(h), int(w)) for h, w in config.get("image_grid_pinpoints") or ()) if newline else ()
            most = most_tiles(config)
        except (TypeError, ValueError):
            message = "config.json: its image_grid_pinpoints or vision_aspect_ratio are of the wrong kind"
            raise ModelError(message) from None
        return cls(
            side=side, patches=patches, layers=feature_layers(config, -1 if one_vision else -2),
            skips=int(chosen == "default"), newline=newline, tiled=tiled, most=most, mean=CLIP_MEAN, std=CLIP_STD,
        )  # fmt: skip

    def num_embeddings(self, shapes: Shapes, grid: tuple[int, ...]) -> int:
        equal_squares(shapes, self.side)
        if len(shapes) == 1:
            return self.patches**2 + self.newline
        if not self.tiled or len(grid) != 2 or min(grid) < 1:
            raise ValueError("its tiles are not those of an image with a height and width")
        height, width = best_resolution(grid, self.tiled)
        if len(shapes) != 1 + (height // self.side) * (width // self.side):
            raise ValueError(f"an image of {grid[0]} x {grid[1]} pixels does not have {len(shapes)} tiles")
        if not (count := num_tiled(grid, self.tiled, self.side, self.patches, self.most)):
            raise ValueError("it is too narrow")
        return self.patches**2 + count

    def example(self, tokens: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        square = (self.side, self.side)
        many = max(1, isqrt(tokens // self.patches**2)) * self.side
        if not self.tiled or many == self.side:
            return (square,), ()
        height, width = best_resolution((many, many), self.tiled)
        return (square,) * (1 + (height // self.side) * (width // self.side)), (many, many)

    def parts(self, model: Any) -> nn.ModuleDict:
        from torch import nn

        own = model.model
        parts = nn.ModuleDict({"tower": own.vision_tower, "projector": own.multi_modal_projector})
        if self.newline:
            parts["newline"] = nn.ParameterDict({"weight": own.image_newline})
        return parts

    def embed(self, parts: Any, tiles: Sequence[Tensor], grid: tuple[int, ...]) -> Tensor:
        import torch

        made = parts["tower"](torch.stack(list(tiles)), output_hidden_states=True, return_dict=True)
        selected = torch.cat([made.hidden_states[layer][:, self.skips :] for layer in self.layers], -1)
        projected: Tensor = parts["projector"](selected)
        first, *others = projected
        pieces = [first]
        if others:
            pieces.append(self._joined(torch.stack(others), parts["newline"]["weight"], grid))
        elif self.newline:
            pieces.append(parts["newline"]["weight"][None])
        return torch.cat(pieces)[:, None]

    def _joined(self, tiles: Tensor, newline: Tensor, size: tuple[int, ...]) -> Tensor:
        """Return the rows of an image from its tiles' `[tiles, patches², H]`, without bars, each with its end."""
        import torch
        from torch.nn.functional import interpolate

        assert len(size) == 2
        height, width = (pixels // self.side for pixels in best_resolution(size, self.tiled))
        rows, columns = height * self.patches, width * self.patches
        image = tiles.view(height, width, self.patches, self.patches, -1).permute(4, 0, 2, 1, 3)
        image = image.reshape(-1, rows, columns)
        kept = shown(size, rows, columns)
        top, left = (rows - kept[0]) // 2, (columns - kept[1]) // 2
        image = image[:, top : top + kept[0], left : left + kept[1]]
        if (smaller := reduced(*kept, self.patches, self.most)) != kept:
            image = interpolate(image[None], smaller, mode="bilinear")[0]
        ends = newline[:, None, None].expand(-1, image.shape[1], 1)
        return torch.cat((image, ends), 2).flatten(1).t()


class Pixtral(Mistral3):
    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        return super().of({"vision_feature_layer": -2, **config, "spatial_merge_size": 1})

    def project(self, projector: Any, selected: Tensor, sizes: Any) -> Tensor:  # noqa: ARG002 (nothing is merged)
        projected: Tensor = projector(selected)
        return projected
